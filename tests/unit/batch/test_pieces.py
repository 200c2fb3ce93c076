"""Pieces: a wrong text is found, and fails alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmllm.batch import pieces
from shmllm.batch.pieces import Refused, run_in_pieces
from shmllm.errors import EnginePausedError, RequestError


class Reversing:
    """Reverses texts, and refuses lists with an empty one."""

    def __init__(self):
        self.done = []

    def __call__(self, texts):
        if "" in texts:
            raise RequestError(f"{len(texts)} texts")
        self.done.append(list(texts))
        return [text[::-1] for text in texts]


@given(st.lists(st.sampled_from(["", "ab", "cde"]), max_size=40), st.integers(1, 9))
def test_every_text_has_a_result_and_is_read_once(texts, most):
    call = Reversing()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "MOST_TEXTS", most)
        found = list(run_in_pieces(call, iter(texts)))
    refused = Refused("1 texts")
    assert found == [(i, text[::-1] if text else refused) for i, text in enumerate(texts)]
    assert [text for piece in call.done for text in piece] == [text for text in texts if text]
    assert max(map(len, call.done), default=0) <= most


def test_long_texts_are_few_in_a_piece(monkeypatch):
    monkeypatch.setattr(pieces, "MOST_CHARACTERS", 5)
    call = Reversing()
    list(run_in_pieces(call, iter(["abc", "def", "ghijklm", "n"])))
    assert call.done == [["abc", "def"], ["ghijklm"], ["n"]]


def test_the_next_piece_is_not_read_ahead(monkeypatch):
    monkeypatch.setattr(pieces, "MOST_TEXTS", 2)
    read = []
    texts = (read.append(text) or text for text in "abcdef")
    results = run_in_pieces(Reversing(), texts)
    assert [next(results), next(results)] == [(0, "a"), (1, "b")]
    assert read == ["a", "b"]


def test_a_paused_engine_refuses_no_text():
    def paused(texts):
        raise EnginePausedError("the engine sleeps")

    with pytest.raises(EnginePausedError):
        list(run_in_pieces(paused, iter("ab")))
