"""Tests that every implementation of a doorbell passes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import FrameType

import pytest
from support.programs import run_source

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
from shmllm.ipc.layout import DOORBELL_BYTES, DOORBELL_NAME_OFFSET, DOORBELL_SEM_OFFSET
from shmllm.ipc.states import DoorbellKind

KINDS = [
    pytest.param(
        DoorbellKind.SEM, marks=pytest.mark.skipif(not HAS_CLOCKWAIT, reason="no sem_clockwait")
    ),
    DoorbellKind.NAMED,
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def area(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[memoryview]:
    if request.param is DoorbellKind.NAMED:
        pytest.importorskip("posix_ipc")
        monkeypatch.setattr(module, "HAS_CLOCKWAIT", False)
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


@pytest.fixture
def no_clockwait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A libc that needs named semaphores."""
    pytest.importorskip("posix_ipc")
    monkeypatch.setattr(module, "HAS_CLOCKWAIT", False)


def test_a_name_that_is_taken_is_refused(no_clockwait: None) -> None:
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


@pytest.mark.parametrize("name", [b"/a/b/c", b"/" + b"n" * 62, b"/x\0y", b"", b"/shmllm-\xff"])
def test_what_is_no_name_of_a_doorbell_is_refused(no_clockwait: None, name: bytes) -> None:
    memory = memoryview(bytearray(DOORBELL_BYTES))
    memory[0] = DoorbellKind.NAMED
    memory[DOORBELL_NAME_OFFSET : DOORBELL_NAME_OFFSET + len(name)] = name
    with pytest.raises(ProtocolMismatchError, match="no name of a doorbell"):
        open_doorbell(memory)


def test_a_named_doorbell_is_refused_where_none_is_needed() -> None:
    if not HAS_CLOCKWAIT:
        pytest.skip("this libc needs named semaphores")
    memory = memoryview(bytearray(DOORBELL_BYTES))
    memory[0] = DoorbellKind.NAMED
    with pytest.raises(ProtocolMismatchError, match="kind 2"):
        open_doorbell(memory)


needs_clockwait = pytest.mark.skipif(not HAS_CLOCKWAIT, reason="no sem_clockwait")


@pytest.fixture
def sem_area() -> memoryview:
    memory = memoryview(bytearray(DOORBELL_BYTES))
    initialise_doorbell(memory, "unused", DoorbellKind.SEM)
    return memory


@needs_clockwait
def test_a_damaged_count_is_made_zero_at_once(
    sem_area: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2**31 - 1 posts, taken one by one, would take minutes."""
    bell = open_doorbell(sem_area)
    count = memoryview(sem_area)[DOORBELL_SEM_OFFSET : DOORBELL_SEM_OFFSET + 4]
    count[:] = (2**31 - 1).to_bytes(4, "little")
    assert bell.wait(60)
    take, num_taken = module._sem_trywait, 0

    def counted(semaphore: object) -> int:
        nonlocal num_taken
        num_taken += 1
        assert num_taken <= 100, "it takes all of them"
        return int(take(semaphore))

    monkeypatch.setattr(module, "_sem_trywait", counted)
    bell.drain()
    assert not bell.try_wait()
    bell.post()
    assert bell.try_wait()


DAMAGED_FLAGS = """
import sys
from shmllm.ipc.doorbell import initialise_doorbell, open_doorbell
from shmllm.ipc.layout import DOORBELL_BYTES, DOORBELL_SEM_OFFSET
from shmllm.ipc.states import DoorbellKind
memory = memoryview(bytearray(DOORBELL_BYTES))
initialise_doorbell(memory, "unused", DoorbellKind.SEM)
bell = open_doorbell(memory)
begin = DOORBELL_SEM_OFFSET + 8
for flags in (0, 1, 7, 2**32 - 1, 2**64 - 1, 0x7F80):
    def damage():
        memory[begin - 8 : begin] = (1 << 32).to_bytes(8, "little")  # a waiter, so post wakes it
        memory[begin : begin + 8] = flags.to_bytes(8, "little")
    damage()
    bell.post()
    assert bytes(memory[begin : begin + 8]) == flags.to_bytes(8, "little"), "only the waiter mends"
    damage()
    assert not bell.wait(0.001)
    bell.post()
    assert bell.wait(60), "the semaphore is new"
print("whole")
"""


@needs_clockwait
def test_damaged_flags_neither_abort_nor_hang_a_process() -> None:
    """With some of them libc aborts the process, and with 1 its `sem_post` sleeps for ever."""
    done = run_source(DAMAGED_FLAGS, timeout=20)
    assert (done.returncode, done.stdout) == (0, b"whole\n"), done.stderr.decode()
