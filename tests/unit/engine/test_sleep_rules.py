"""SleepStateMachine: every call in every state, compared with a table."""

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
def states(pauses, memory):
    return SleepStateMachine(pauses, memory)


def fall_asleep(states, level, mode=PauseMode.ABORT):
    states.sleep(LEVELS[level], mode)


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
def test_several_levels_in_a_row(states, memory, levels, state, done):
    for level in levels:
        fall_asleep(states, level)
    assert states.state == state
    assert memory.calls == done


def test_the_engine_stays_awake_if_the_weights_cannot_be_kept(states, memory, pauses, monkeypatch):
    def refuse(part, keep):
        raise RequestError("no room")

    monkeypatch.setattr(memory, "release", refuse)
    with pytest.raises(RequestError):
        fall_asleep(states, 1)
    assert not states.state
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
def test_a_repeated_sleep_causes_a_warning_and_a_deeper_one_does_not(states, level, before, warns):
    if before is not None:
        fall_asleep(states, before)
    assert bool(states.warning(LEVELS[level])) == warns


@pytest.mark.parametrize("order", list(itertools.permutations(TAGS)))
@pytest.mark.parametrize("level", [0, 1, 2])
def test_tags_wake_one_at_a_time_in_any_order(states, memory, level, order):
    fall_asleep(states, level)
    left = LEVELS[level].parts
    for tag in order:
        memory.num_missing = 0
        states.wake(parts_of([tag]))
        left &= ~TAGS[tag]
        if not left & (K | W) and level:
            left = NONE  # scheduling wakes up with the last of the other parts
        assert states.asleep == left
    assert states.state == NONE


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("tags", [None, list(TAGS), tuple(TAGS)])
def test_all_parts_can_be_woken_together(states, memory, pauses, level, tags):
    fall_asleep(states, level)
    memory.calls.clear()
    states.wake(parts_of(tags))
    assert states.asleep == NONE
    assert bool(pauses) == (level == 2)
    restored = ["restore weights", "restore kv_cache"] if level else []
    assert memory.calls == restored + ["tidy"] * (level != 2)


def test_weights_are_missing_until_all_are_written(states, memory, pauses):
    fall_asleep(states, 2, PauseMode.KEEP)
    states.wake(None)
    assert states.state == MISSING
    assert "4 weights are missing" in pauses.refusal
    memory.num_missing = 1
    states.weights_written()
    assert pauses.is_frozen
    assert "1 weights are missing" in pauses.refusal
    memory.num_missing = 0
    states.weights_written()
    assert not pauses
    assert memory.calls[-1] == "tidy"


def test_weights_written_before_the_cache_wakes(states, memory, pauses):
    """TRL makes the calls in this order."""
    fall_asleep(states, 2)
    assert not states.wake(parts_of(["weights"]))
    memory.num_missing = 0
    states.weights_written()
    assert pauses.refusal == "the engine sleeps (kv_cache, scheduling): call wake_up() first"
    assert not states.wake(parts_of(["kv_cache"]))
    assert not pauses
    assert memory.calls[-1] == "tidy"


def test_missing_weights_stay_missing_when_they_sleep_again(states, memory):
    fall_asleep(states, 2)
    states.wake(None)
    fall_asleep(states, 1)
    states.wake(None)
    assert states.state == MISSING


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
def test_an_unneeded_wake_causes_a_warning_and_wakes_what_it_can(states, level, tags, words):
    if level is not None:
        fall_asleep(states, level)
    parts = parts_of(tags)
    expected = NONE if parts is None else states.asleep & ~parts
    warning = states.wake(parts)
    assert words in warning
    assert bool(warning) == bool(words)
    assert states.asleep == expected


def test_the_warning_of_an_unneeded_wake_reports_missing_weights(states):
    fall_asleep(states, 2)
    states.wake(None)
    assert "4 weights are missing" in states.wake(None)


def test_parts_stay_asleep_if_there_is_too_little_memory(states, memory, pauses):
    fall_asleep(states, 1)
    memory.is_short = True
    with pytest.raises(RequestError, match="no memory"):
        states.wake(None)
    assert states.state == ALL
    assert pauses.is_frozen
    memory.is_short = False
    states.wake(None)
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
def test_the_latest_mode_decides_whether_new_requests_are_queued(states, pauses, modes, queues):
    for mode in modes:
        fall_asleep(states, 1, PauseMode.of(mode))
        assert pauses.is_frozen
    assert (pauses.refusal == "") == queues


def test_draining_refuses_without_freezing(states, pauses):
    states.drain(3)
    assert not pauses.is_frozen
    assert pauses.refusal
    states.stop_draining(3)
    assert not pauses


@pytest.mark.parametrize("level", [-1, 3, "1", 1.0, None, True, [1]])
def test_an_unknown_level_is_an_error(level):
    with pytest.raises(RequestError, match="is 0, 1 or 2, got"):
        level_of(level)


@pytest.mark.parametrize("tags", ["weights", 3, {"weights": 1}, ["weights", "gpu"], [["weights"]]])
def test_unknown_tags_are_an_error(tags):
    with pytest.raises(RequestError, match="'weights', 'kv_cache', 'scheduling', got"):
        parts_of(tags)
