"""Tests that every implementation of a doorbell passes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from shmllm.errors import ProtocolMismatchError, SegmentError
from shmllm.ipc import doorbell as module
from shmllm.ipc.doorbell import (
    HAS_CLOCKWAIT,
    Doorbell,
    choose_kind,
    initialise_doorbell,
    open_doorbell,
    remove_doorbell,
)
from shmllm.ipc.layout import DOORBELL_BYTES, DoorbellKind

KINDS = [
    pytest.param(
        DoorbellKind.SEM, marks=pytest.mark.skipif(not HAS_CLOCKWAIT, reason="no sem_clockwait")
    ),
    DoorbellKind.NAMED,
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def area(request: pytest.FixtureRequest) -> Iterator[memoryview]:
    if request.param is DoorbellKind.NAMED:
        pytest.importorskip("posix_ipc")
    memory = memoryview(bytearray(DOORBELL_BYTES))
    initialise_doorbell(memory, f"/shmllm-test-{os.getpid()}", request.param)
    yield memory
    remove_doorbell(memory)


@pytest.fixture
def bell(area: memoryview) -> Iterator[Doorbell]:
    bell = open_doorbell(area)
    yield bell
    bell.close()


def test_a_new_doorbell_has_no_post(bell: Doorbell) -> None:
    assert not bell.try_wait()
    assert not bell.wait(0.001)


def test_a_post_is_taken_once(bell: Doorbell) -> None:
    bell.post()
    assert bell.wait(60)
    assert not bell.try_wait()


def test_posts_are_counted_until_drained(bell: Doorbell) -> None:
    for _ in range(3):
        bell.post()
    assert bell.try_wait()
    bell.drain()
    assert not bell.try_wait()
    bell.drain()


def test_two_openings_of_a_doorbell_share_its_posts(bell: Doorbell, area: memoryview) -> None:
    other = open_doorbell(area)
    other.post()
    assert bell.try_wait()
    other.close()


def test_a_timeout_of_zero_or_less_does_not_wait(bell: Doorbell) -> None:
    assert not bell.wait(0)
    assert not bell.wait(-1)


class Interrupted(Exception):
    pass


@pytest.fixture
def alarm() -> Iterator[None]:
    previous = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


def test_an_exception_of_a_signal_handler_ends_the_wait(bell: Doorbell, alarm: None) -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(Interrupted):
        bell.wait(60)


def test_a_signal_handler_can_post(bell: Doorbell, alarm: None) -> None:
    signal.signal(signal.SIGALRM, lambda number, frame: bell.post())
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    assert bell.wait(60)


def test_a_signal_without_a_post_does_not_end_the_wait(bell: Doorbell, alarm: None) -> None:
    turns: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        turns.append(number)
        if len(turns) == 3:
            bell.post()

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    assert bell.wait(60)
    assert len(turns) >= 3


def test_a_closed_doorbell_refuses_every_call(bell: Doorbell) -> None:
    bell.close()
    bell.close()
    for call in (bell.post, bell.try_wait, bell.drain, lambda: bell.wait(0)):
        with pytest.raises(SegmentError, match="closed"):
            call()


def test_the_choice_follows_libc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HAS_CLOCKWAIT", False)
    assert choose_kind() is DoorbellKind.NAMED
    monkeypatch.setattr(module, "HAS_CLOCKWAIT", True)
    assert choose_kind() is DoorbellKind.SEM


def test_bytes_that_are_no_doorbell_are_refused() -> None:
    with pytest.raises(ProtocolMismatchError, match="kind 0"):
        open_doorbell(memoryview(bytearray(DOORBELL_BYTES)))


def test_a_name_that_is_taken_is_refused(area: memoryview) -> None:
    pytest.importorskip("posix_ipc")
    name = f"/shmllm-twice-{os.getpid()}"
    memory = memoryview(bytearray(DOORBELL_BYTES))
    initialise_doorbell(memory, name, DoorbellKind.NAMED)
    try:
        with pytest.raises(SegmentError, match="cannot create the doorbell"):
            initialise_doorbell(memory, name, DoorbellKind.NAMED)
    finally:
        remove_doorbell(memory)
    with pytest.raises(SegmentError, match="cannot open the doorbell"):
        open_doorbell(memory)
    remove_doorbell(memory)
