"""Pauses: the engine is paused until all pauses have ended."""

from __future__ import annotations

import pytest

from shmllm.core.pausing import PAUSES, Pause, PauseMode, Pauses
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
def test_the_strictest_of_several_pauses_applies(modes, is_frozen, refuses_new):
    pauses = Pauses()
    for client, mode in enumerate(modes):
        pauses.add(client, PAUSES[PauseMode.of(mode)])
    assert (pauses.is_frozen, bool(pauses.refusal)) == (is_frozen, refuses_new)
    assert bool(pauses) == bool(modes)
    for client in range(len(modes)):
        assert pauses
        pauses.drop(client)
    assert not pauses
    assert not pauses.is_frozen
    assert not pauses.refusal


def test_a_front_end_has_at_most_one_pause():
    pauses = Pauses()
    pauses.add(3, PAUSES[PauseMode.KEEP])
    pauses.add(3, PAUSES[PauseMode.WAIT])
    assert not pauses.is_frozen
    pauses.drop(3)
    pauses.drop(3)
    assert not pauses


def test_the_engine_has_pauses_of_its_own():
    pauses = Pauses()
    pauses.add(0, PAUSES[PauseMode.KEEP])
    pauses.add("sleep", Pause(True, "it sleeps"))
    assert pauses.refusal == "it sleeps"
    pauses.drop(0)
    assert pauses.is_frozen
    pauses.drop("sleep")
    assert not pauses


@pytest.mark.parametrize("name", ["stop", "", None, 3, ["wait"]])
def test_an_unknown_mode_is_an_error(name):
    with pytest.raises(RequestError, match="'abort', 'wait', 'keep', got"):
        PauseMode.of(name)
