from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType

import pytest
from support.waiting import PATIENCE_S

from shmllm.ipc import words
from shmllm.ipc.words import FencedWord, PlainWord, TwiceFencedWord


@pytest.fixture(params=[PlainWord, FencedWord, TwiceFencedWord])
def word_type(request: pytest.FixtureRequest) -> type[PlainWord]:
    return request.param


def test_a_word_is_eight_little_endian_bytes_at_its_offset(word_type: type[PlainWord]) -> None:
    memory = bytearray(24)
    word = word_type(memoryview(memory), 8)
    word.store(0x0102030405060708)
    assert memory == bytes(8) + bytes.fromhex("0807060504030201") + bytes(8)
    assert word.load() == 0x0102030405060708


def test_a_word_holds_all_64_bits(word_type: type[PlainWord]) -> None:
    word = word_type(memoryview(bytearray(8)), 0)
    word.store(2**64 - 1)
    assert word.load() == 2**64 - 1


def test_a_closed_word_refuses_a_load(word_type: type[PlainWord]) -> None:
    word = word_type(memoryview(bytearray(8)), 0)
    word.close()
    word.close()
    with pytest.raises(ValueError, match="released"):
        word.load()


def test_a_fenced_word_fences_before_a_store_and_after_a_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = bytearray(8)
    seen: list[int] = []
    monkeypatch.setattr(words, "fence", lambda: seen.append(memory[0]))
    word = FencedWord(memoryview(memory), 0)
    word.store(7)
    assert seen == [0]
    word.load()
    assert seen == [0, 7]


def test_a_count_is_fenced_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = bytearray(8)
    seen: list[int] = []
    monkeypatch.setattr(words, "fence", lambda: seen.append(memory[0]))
    word = TwiceFencedWord(memoryview(memory), 0)
    word.store(7)
    assert seen == [0, 7]
    word.load()
    assert seen == [0, 7, 7, 7]


class Interrupted(Exception):
    pass


def test_exceptions_of_signal_handlers_leave_the_fence_usable() -> None:
    fence = words._fence_by_lock

    def handler(number: int, frame: FrameType | None) -> None:
        fence()
        raise Interrupted

    before = signal.signal(signal.SIGVTALRM, handler)
    num = 0
    try:
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            with contextlib.suppress(Interrupted):
                signal.setitimer(signal.ITIMER_VIRTUAL, 1e-6)
                while True:  # until the signal, which comes once
                    fence()
            num += 1
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert num
    other = threading.Thread(target=fence, daemon=True)
    other.start()
    other.join(PATIENCE_S)
    assert not other.is_alive()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_forked_beside_a_fence_can_fence() -> None:
    fence = words._fence_by_lock
    is_over = threading.Event()

    def fence_on() -> None:
        while not is_over.is_set():
            for _ in range(100):
                fence()

    thread = threading.Thread(target=fence_on)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if not child:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
                fence()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        is_over.set()
        thread.join()
