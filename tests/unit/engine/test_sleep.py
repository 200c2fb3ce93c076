"""The effect of sleep on requests, with a fake runner that discards its KV cache."""

from __future__ import annotations

import pytest
from support.fakes import FakeRunner, expected_tokens, info

from shmllm.config.engine import EngineConfig, SchedulerConfig
from shmllm.config.load import LoadConfig
from shmllm.core.pausing import PauseMode
from shmllm.engine.core import EngineCore
from shmllm.engine.sleep import LEVELS, SleepResult
from shmllm.errors import RequestError
from shmllm.outputs.columns import FinishReason
from shmllm.outputs.sleep_report import SleepState
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams

ABORT, WAIT, KEEP = PauseMode.ABORT, PauseMode.WAIT, PauseMode.KEEP
PROMPT = [1, 2, 3, 4, 5, 6]


@pytest.fixture
def core():
    config = EngineConfig(LoadConfig("nowhere"), scheduler=SchedulerConfig(8, 64))
    return EngineCore(config, FakeRunner(info()))


def begin(core, number=0, length=8, steps=3, client=0):
    """Add a request and run some steps. Returns its tokens so far."""
    core.add(client, EngineCoreRequest(number, PROMPT, SamplingParams(max_tokens=length)))
    return [token for _ in range(steps) for token in core.step()[client].token_ids]


def finish(core, tokens):
    for _ in range(50):
        for columns in core.step().values():
            tokens += columns.token_ids
    assert not core.scheduler.has_unfinished()
    return tokens


def write_weights(core):
    core.runner.memory.num_missing = 0
    core.weights_written()


@pytest.mark.parametrize("level", [0, 1, 2])
def test_kept_requests_continue_with_the_same_tokens(core, level):
    tokens = begin(core)
    slept = core.sleep(0, LEVELS[level], KEEP)
    assert isinstance(slept, SleepResult)
    assert slept.report.num_kept == 1
    assert core.step() == {}
    core.add(0, EngineCoreRequest(1, PROMPT, SamplingParams(max_tokens=1)))  # waits
    assert core.step() == {}
    core.sleeper.wake(0, None)
    if level == 2:
        assert core.step() == {}
        write_weights(core)
    tokens = finish(core, tokens)
    assert sorted(tokens) == sorted(expected_tokens(PROMPT, 8) + expected_tokens(PROMPT, 1))
    core.scheduler.check_integrity()


@pytest.mark.parametrize("level", [0, 1, 2])
def test_mode_abort_ends_all_requests_and_refuses_new_ones(core, level):
    begin(core)
    core.add(5, EngineCoreRequest(1, PROMPT, SamplingParams(max_tokens=3)))
    core.sleep(0, LEVELS[level], ABORT)
    ended = dict(core.take_outputs())
    assert {c: columns.numbers for c, columns in ended.items()} == {0: [0], 5: [1]}
    assert all(columns.finishes == [FinishReason.ABORT] for columns in ended.values())
    for client in (0, 5):
        rejected = core.add(client, EngineCoreRequest(2, PROMPT, SamplingParams()))
        assert rejected is not None
        assert rejected.is_retryable
        assert "the engine sleeps" in rejected.message
    core.scheduler.check_integrity()


def test_mode_wait_begins_when_all_requests_have_ended(core):
    begin(core, length=5, steps=2)
    assert core.sleep(3, LEVELS[1], WAIT) == 1
    rejected = core.add(0, EngineCoreRequest(1, PROMPT, SamplingParams()))
    assert rejected is not None
    assert rejected.is_retryable
    assert "goes to sleep" in rejected.message
    while core.scheduler.has_unfinished():
        assert core.sleep(3, LEVELS[1], WAIT) == 1
        core.step()
    assert isinstance(core.sleep(3, LEVELS[1], WAIT), SleepResult)
    core.sleeper.wake(0, None)
    assert not core.pauses


@pytest.mark.parametrize("how", ["disconnected", "cancelled"])
def test_a_cancelled_wait_leaves_no_pause(core, how):
    begin(core)
    assert core.sleep(3, LEVELS[1], WAIT) == 1
    if how == "disconnected":
        core.forget_client(3)
    else:
        core.sleeper.wake(3, SleepState(0))
    assert not core.pauses


def test_the_sleep_continues_after_its_front_end_disconnects(core):
    core.sleep(3, LEVELS[1], ABORT)
    core.forget_client(3)
    assert core.pauses.is_frozen
    core.sleeper.wake(0, None)
    assert not core.pauses


def test_mode_wait_does_not_wait_for_frozen_requests(core):
    tokens = begin(core)
    core.pause(1, KEEP)
    slept = core.sleep(0, LEVELS[1], WAIT)
    assert isinstance(slept, SleepResult)
    assert slept.report.num_kept == 1
    core.sleeper.wake(0, None)
    assert core.step() == {}  # the pause is still in force
    core.resume(1)
    assert finish(core, tokens) == expected_tokens(PROMPT, 8)


def test_a_pause_cannot_wait_for_requests_of_a_sleeping_engine(core):
    begin(core)
    core.sleep(0, LEVELS[0], KEEP)
    with pytest.raises(RequestError, match="cannot end"):
        core.pause(0, WAIT)
    assert core.pause(0, KEEP) == 1
    assert core.pause(0, ABORT) == 0
    assert core.pause(0, WAIT) == 0


def test_resuming_does_not_wake_the_engine_up(core):
    core.sleep(0, LEVELS[1], KEEP)
    core.pause(0, KEEP)
    assert not core.resume(0)
    assert core.pauses.is_frozen


def test_cached_prefixes_are_dropped_only_if_the_kv_cache_sleeps(core):
    def num_cached(number):
        core.add(0, EngineCoreRequest(number, PROMPT, SamplingParams(max_tokens=1)))
        return core.step()[0].cached_counts[0]

    num_cached(0)
    assert num_cached(1) > 0
    core.sleep(0, LEVELS[0], ABORT)
    core.sleeper.wake(0, None)
    assert num_cached(2) > 0
    core.sleep(0, LEVELS[1], ABORT)
    core.sleeper.wake(0, None)
    assert num_cached(3) == 0


def test_a_repeated_sleep_applies_its_mode(core):
    begin(core)
    core.sleep(0, LEVELS[1], KEEP)
    slept = core.sleep(0, LEVELS[1], ABORT)
    assert isinstance(slept, SleepResult)
    assert "asleep already" in slept.warning
    assert slept.report.num_kept == 0


def test_the_report_has_the_freed_memory(core):
    begin(core)
    report = core.sleep(0, LEVELS[2], KEEP).report
    assert report.before["kv_cache"] > 0
    assert report.after["kv_cache"] == 0
    assert report.freed_bytes == report.before["kv_cache"]
    assert report.asleep == ("weights", "kv_cache", "scheduling")
    assert (report.num_missing, report.num_kept) == (4, 1)
    assert "asleep: weights, kv_cache, scheduling; 4 weights are missing" in str(report)
    assert len(report.table().splitlines()) == 7
    assert type(report).from_json(report.to_json()) == report
