"""Every state of a sleeping engine, and every call in it: the rules against a table."""

from __future__ import annotations

import itertools

import pytest
from support.fakes import FakeMemory

from shmllm.core.pausing import PauseMode, Pauses
from shmllm.engine.sleep import LEVELS, SleepStateMachine, level_of, parts_of
from shmllm.errors import RequestError
from shmllm.outputs.sleep_report import TAGS, SleepState

S, K, W, MISSING = (
    SleepState.SCHEDULING,
    SleepState.KV_CACHE,
    SleepState.WEIGHTS,
    SleepState.MISSING,
)
ALL = S | K | W
NONE = SleepState(0)


@pytest.fixture
def memory():
    return FakeMemory({})


@pytest.fixture
def pauses():
    return Pauses()


@pytest.fixture
def sleeping(pauses, memory):
    return SleepStateMachine(pauses, memory)


def asleep(sleeping, level, mode=PauseMode.ABORT):
    sleeping.sleep(LEVELS[level], mode)


@pytest.mark.parametrize(
    ("levels", "state", "done"),
    [
        ([0], S, []),
        ([1], ALL, ["release weights keep", "release kv_cache", "tidy"]),
        ([2], ALL | MISSING, ["release weights", "release kv_cache", "tidy"]),
        ([0, 1], ALL, ["release weights keep", "release kv_cache", "tidy"]),
        ([0, 0], S, []),
        ([1, 0], ALL, ["release weights keep", "release kv_cache", "tidy"]),
        ([1, 1], ALL, ["release weights keep", "release kv_cache", "tidy"]),
        (
            [1, 2],
            ALL | MISSING,
            ["release weights keep", "release kv_cache", "tidy", "release weights", "tidy"],
        ),
        ([2, 1], ALL | MISSING, ["release weights", "release kv_cache", "tidy"]),
        ([2, 2], ALL | MISSING, ["release weights", "release kv_cache", "tidy"]),
    ],
)
def test_levels_one_after_the_other(sleeping, memory, levels, state, done):
    for level in levels:
        asleep(sleeping, level)
    assert sleeping.state == state
    assert memory.calls == done


def test_weights_that_cannot_be_kept_leave_it_awake(sleeping, memory, pauses, monkeypatch):
    def refuse(part, keep):
        raise RequestError("no room")

    monkeypatch.setattr(memory, "release", refuse)
    with pytest.raises(RequestError):
        asleep(sleeping, 1)
    assert not sleeping.state
    assert not pauses


@pytest.mark.parametrize(
    ("level", "before", "warns"),
    [
        (0, None, False),
        (0, 0, True),
        (0, 1, True),
        (1, 0, False),
        (1, 1, True),
        (1, 2, True),
        (2, 1, False),
        (2, 2, True),
    ],
)
def test_a_repeated_sleep_is_odd_and_a_deeper_one_is_not(sleeping, level, before, warns):
    if before is not None:
        asleep(sleeping, before)
    assert bool(sleeping.warning(LEVELS[level])) == warns


@pytest.mark.parametrize("order", list(itertools.permutations(TAGS)))
@pytest.mark.parametrize("level", [0, 1, 2])
def test_tags_wake_one_at_a_time_in_any_order(sleeping, memory, level, order):
    asleep(sleeping, level)
    left = LEVELS[level].parts
    for tag in order:
        memory.num_missing = 0
        sleeping.wake(parts_of([tag]))
        left &= ~TAGS[tag]
        if not left & (K | W) and level:
            left = NONE  # scheduling comes with the last memory
        assert sleeping.asleep == left
    assert sleeping.state == NONE


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("tags", [None, list(TAGS), tuple(TAGS)])
def test_everything_wakes_at_once(sleeping, memory, pauses, level, tags):
    asleep(sleeping, level)
    memory.calls.clear()
    sleeping.wake(parts_of(tags))
    assert sleeping.asleep == NONE
    assert bool(pauses) == (level == 2)
    restored = ["restore weights", "restore kv_cache"] if level else []
    assert memory.calls == restored + ["tidy"] * (level != 2)


def test_weights_are_missing_until_all_are_written(sleeping, memory, pauses):
    asleep(sleeping, 2, PauseMode.KEEP)
    sleeping.wake(None)
    assert sleeping.state == MISSING
    assert "4 weights are missing" in pauses.refusal
    memory.num_missing = 1
    sleeping.weights_written()
    assert pauses.is_frozen
    assert "1 weights are missing" in pauses.refusal
    memory.num_missing = 0
    sleeping.weights_written()
    assert not pauses
    assert memory.calls[-1] == "tidy"


def test_weights_written_before_the_cache_wakes(sleeping, memory, pauses):
    """TRL's order."""
    asleep(sleeping, 2)
    assert not sleeping.wake(parts_of(["weights"]))
    memory.num_missing = 0
    sleeping.weights_written()
    assert pauses.refusal == "the engine sleeps (kv_cache, scheduling): call wake_up() first"
    assert not sleeping.wake(parts_of(["kv_cache"]))
    assert not pauses
    assert memory.calls[-1] == "tidy"


def test_missing_weights_stay_missing_when_they_sleep_again(sleeping, memory):
    asleep(sleeping, 2)
    sleeping.wake(None)
    asleep(sleeping, 1)
    sleeping.wake(None)
    assert sleeping.state == MISSING


@pytest.mark.parametrize(
    ("level", "tags", "words"),
    [
        (None, None, "not asleep"),
        (None, ["weights"], "not asleep"),
        (0, ["weights", "kv_cache"], "not asleep: weights, kv_cache"),
        (0, ["weights", "scheduling"], "not asleep: weights"),
        (1, [], "no tag"),
        (0, None, ""),
        (1, ["scheduling"], ""),
        (1, ["kv_cache"], ""),
    ],
)
def test_an_unneeded_call_is_odd_and_does_what_it_can(sleeping, level, tags, words):
    if level is not None:
        asleep(sleeping, level)
    parts = parts_of(tags)
    expected = NONE if parts is None else sleeping.asleep & ~parts
    warning = sleeping.wake(parts)
    assert words in warning
    assert bool(warning) == bool(words)
    assert sleeping.asleep == expected


def test_waking_with_nothing_asleep_says_what_is_missing(sleeping):
    asleep(sleeping, 2)
    sleeping.wake(None)
    assert "4 weights are missing" in sleeping.wake(None)


def test_without_memory_what_was_not_woken_stays_asleep(sleeping, memory, pauses):
    asleep(sleeping, 1)
    memory.is_short = True
    with pytest.raises(RequestError, match="no memory"):
        sleeping.wake(None)
    assert sleeping.state == ALL
    assert pauses.is_frozen
    memory.is_short = False
    sleeping.wake(None)
    assert not pauses


@pytest.mark.parametrize(
    ("modes", "queues"),
    [
        (["abort"], False),
        (["wait"], False),
        (["keep"], True),
        (["keep", "abort"], False),
        (["abort", "keep"], True),
        (["keep", "wait"], True),
        (["abort", "wait"], False),
    ],
)
def test_the_latest_mode_decides_what_becomes_of_new_requests(sleeping, pauses, modes, queues):
    for mode in modes:
        asleep(sleeping, 1, PauseMode.of(mode))
        assert pauses.is_frozen
    assert (pauses.refusal == "") == queues


def test_draining_refuses_without_freezing(sleeping, pauses):
    sleeping.drain(3)
    assert not pauses.is_frozen
    assert pauses.refusal
    sleeping.stop_draining(3)
    assert not pauses


@pytest.mark.parametrize("level", [-1, 3, "1", 1.0, None, True, [1]])
def test_another_level_is_an_error(level):
    with pytest.raises(RequestError, match="is 0, 1 or 2, got"):
        level_of(level)


@pytest.mark.parametrize("tags", ["weights", 3, {"weights": 1}, ["weights", "gpu"], [["weights"]]])
def test_other_tags_are_an_error(tags):
    with pytest.raises(RequestError, match="'weights', 'kv_cache', 'scheduling', got"):
        parts_of(tags)
