from __future__ import annotations

import pytest

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


def test_a_signal_handler_may_call_fence_during_a_fence() -> None:
    assert words._lock.acquire(blocking=False)
    try:
        words.fence()
    finally:
        words._lock.release()
