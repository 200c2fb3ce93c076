"""Tests that every implementation of a doorbell passes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest
from support.programs import run_source

from shmllm.errors import ProtocolMismatchError, SegmentError
from shmllm.ipc import doorbell as module
from shmllm.ipc.doorbell import (
    HAS_FUTEX,
    Doorbell,
    choose_kind,
    initialise_doorbell,
    open_doorbell,
    remove_doorbell,
)
from shmllm.ipc.layout import DOORBELL_BYTES, DOORBELL_NAME_OFFSET, DOORBELL_POSTED_OFFSET
from shmllm.ipc.states import DoorbellKind
from shmllm.ipc.words import Word

KINDS = [
    pytest.param(DoorbellKind.FUTEX, marks=pytest.mark.skipif(not HAS_FUTEX, reason="no futex")),
    DoorbellKind.NAMED,
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def area(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[memoryview]:
    if request.param is DoorbellKind.NAMED:
        pytest.importorskip("posix_ipc")
        monkeypatch.setattr(module, "HAS_FUTEX", False)
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


def test_a_drained_doorbell_has_no_post(bell: Doorbell) -> None:
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


def test_the_choice_follows_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HAS_FUTEX", False)
    assert choose_kind() is DoorbellKind.NAMED
    monkeypatch.setattr(module, "HAS_FUTEX", True)
    assert choose_kind() is DoorbellKind.FUTEX


def test_bytes_that_are_no_doorbell_are_refused() -> None:
    with pytest.raises(ProtocolMismatchError, match="kind 0"):
        open_doorbell(memoryview(bytearray(DOORBELL_BYTES)))


@pytest.fixture
def no_futex(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that needs named semaphores."""
    pytest.importorskip("posix_ipc")
    monkeypatch.setattr(module, "HAS_FUTEX", False)


def test_a_name_that_is_taken_is_refused(no_futex: None) -> None:
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
def test_what_is_no_name_of_a_doorbell_is_refused(no_futex: None, name: bytes) -> None:
    memory = memoryview(bytearray(DOORBELL_BYTES))
    memory[0] = DoorbellKind.NAMED
    memory[DOORBELL_NAME_OFFSET : DOORBELL_NAME_OFFSET + len(name)] = name
    with pytest.raises(ProtocolMismatchError, match="no name of a doorbell"):
        open_doorbell(memory)


def test_a_named_doorbell_is_refused_where_none_is_needed() -> None:
    if not HAS_FUTEX:
        pytest.skip("this machine needs named semaphores")
    memory = memoryview(bytearray(DOORBELL_BYTES))
    memory[0] = DoorbellKind.NAMED
    with pytest.raises(ProtocolMismatchError, match="kind 2"):
        open_doorbell(memory)


needs_futex = pytest.mark.skipif(not HAS_FUTEX, reason="no futex")


DAMAGED = """
import mmap, os, random, signal, time
from shmllm.ipc.doorbell import initialise_doorbell, open_doorbell
from shmllm.ipc.layout import DOORBELL_BYTES
memory = memoryview(mmap.mmap(-1, DOORBELL_BYTES))
initialise_doorbell(memory, "unused", 1)
parent = os.getpid()
if not (child := os.fork()):
    source = random.Random(17)
    while os.getppid() == parent:
        for garbage in (source.randbytes(DOORBELL_BYTES - 8), bytes(DOORBELL_BYTES - 8)):
            memory[8:] = garbage
    os._exit(0)
bell = open_doorbell(memory)
num_taken = 0
end = time.monotonic() + 50
try:
    while num_taken < 200 and time.monotonic() < end:
        num_taken += bell.wait(0.0001)
        bell.post()
        bell.drain()
finally:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
bell.drain()
assert not bell.wait(0.001)
bell.post()
assert bell.wait(60)
print(num_taken)
"""


@needs_futex
def test_a_process_that_damages_a_doorbell_all_the_time_ends_no_other() -> None:
    done = run_source(DAMAGED, timeout=120)
    assert (done.returncode, done.stdout) == (0, b"200\n"), done.stderr.decode()


@needs_futex
@pytest.mark.parametrize("value", [1, 2**31, 2**32, 2**63, 2**64 - 1])
def test_any_value_is_one_post(value: int) -> None:
    memory = memoryview(bytearray(DOORBELL_BYTES))
    initialise_doorbell(memory, "unused", DoorbellKind.FUTEX)
    bell = open_doorbell(memory)
    Word(memory, DOORBELL_POSTED_OFFSET).store(value)
    assert bell.wait(60)
    assert not bell.try_wait()


@needs_futex
def test_a_wait_of_a_doorbell_that_another_thread_closes_says_so() -> None:
    memory = memoryview(bytearray(DOORBELL_BYTES))
    initialise_doorbell(memory, "unused", DoorbellKind.FUTEX)
    bell = open_doorbell(memory)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(bell.wait, 0.2)
        time.sleep(0.05)
        bell.close()
        with pytest.raises(SegmentError, match="closed"):
            waiting.result(60)


SLEEPER = """
import mmap, os, signal, time
from shmllm.ipc.doorbell import initialise_doorbell, open_doorbell
from shmllm.ipc.layout import DOORBELL_BYTES
memory = memoryview(mmap.mmap(-1, DOORBELL_BYTES))
initialise_doorbell(memory, "unused", 1)
if not (child := os.fork()):
    os._exit(0 if open_doorbell(memory).wait(60) else 1)
end = time.monotonic() + 20
while open(f"/proc/{child}/stat").read().rpartition(")")[2].split()[0] != "S":
    assert time.monotonic() < end, "it does not sleep"
    time.sleep(0.001)
open_doorbell(memory).post()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@needs_futex
def test_a_post_wakes_a_process_that_sleeps() -> None:
    done = run_source(SLEEPER, timeout=30)
    assert (done.returncode, done.stdout) == (0, b"0\n"), done.stderr.decode()
