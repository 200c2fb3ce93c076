"""Holds: whoever pauses, until all have resumed."""

from __future__ import annotations

import pytest

from shmllm.core.pausing import PAUSES, Hold, Holds, PauseMode
from shmllm.errors import RequestError


@pytest.mark.parametrize(
    ("modes", "is_frozen", "refuses_new"),
    [
        ([], False, False),
        (["abort"], True, False),
        (["keep"], True, False),
        (["wait"], False, True),
        (["wait", "keep"], True, True),
        (["abort", "keep"], True, False),
    ],
)
def test_the_strictest_of_all_holds_counts(modes, is_frozen, refuses_new):
    holds = Holds()
    for client, mode in enumerate(modes):
        holds.add(client, PAUSES[PauseMode.of(mode)])
    assert (holds.is_frozen, bool(holds.refusal)) == (is_frozen, refuses_new)
    assert bool(holds) == bool(modes)
    for client in range(len(modes)):
        assert holds
        holds.drop(client)
    assert not holds
    assert not holds.is_frozen
    assert not holds.refusal


def test_a_front_end_has_one_hold():
    holds = Holds()
    holds.add(3, PAUSES[PauseMode.KEEP])
    holds.add(3, PAUSES[PauseMode.WAIT])
    assert not holds.is_frozen
    holds.drop(3)
    holds.drop(3)
    assert not holds


def test_the_engine_holds_itself_beside_its_front_ends():
    holds = Holds()
    holds.add(0, PAUSES[PauseMode.KEEP])
    holds.add("sleep", Hold(True, "it sleeps"))
    assert holds.refusal == "it sleeps"
    holds.drop(0)
    assert holds.is_frozen
    holds.drop("sleep")
    assert not holds


@pytest.mark.parametrize("name", ["stop", "", None, 3, ["wait"]])
def test_another_mode_is_an_error(name):
    with pytest.raises(RequestError, match="'abort', 'wait', 'keep', got"):
        PauseMode.of(name)
