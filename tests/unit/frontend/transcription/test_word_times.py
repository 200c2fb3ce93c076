"""Words and times are those of transformers' processor for forced alignment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers.models.qwen3_asr import processing_qwen3_asr

from shmllm.errors import RequestError
from shmllm.frontend.transcription.word_times import in_order, words_of


@pytest.mark.parametrize("spread", [2, 6, 40])
def test_times_never_go_back(spread: int) -> None:
    """Short and long stretches of wrong times, at the beginning, at the end and between others."""
    draw = np.random.default_rng(spread)
    for count in (1, 2, 3, 8, 40):
        for _ in range(40):
            steady = np.arange(count) * 3
            raw = np.where(draw.random(count) < 0.5, steady, draw.integers(0, spread * 3, count))
            raw = (raw * 80).astype(np.float32)
            times = in_order(raw)
            assert times == processing_qwen3_asr._fix_timestamps(raw)
            assert times == sorted(times)


@pytest.mark.parametrize(
    "text",
    [
        "The quick, brown fox!",
        "  It's 5 o'clock -- isn't it? ",
        "\u4f60\u597dworld\u4f60 3\u5e74",
        "Stra\u00dfe, caf\u00e9 na\u00efve\u2026 \u00bd",
        "\uc548\ub155 \uc138\uacc4",
        "\u7ea6\u7ff0\u30fb\u53f2\u5bc6\u65af",
        "... !!",
        "",
    ],
)
def test_words_are_those_of_transformers(text: str) -> None:
    processor: Any = object.__new__(processing_qwen3_asr.Qwen3ASRProcessor)
    assert words_of(text, "the text") == processor.split_words_for_alignment(text)


def test_accents_are_kept_whatever_their_form() -> None:
    assert words_of("cafe\u0301 nai\u0308ve", "the text") == ["caf\u00e9", "na\u00efve"]
    assert words_of(["cafe\u0301!"], "the text") == ["caf\u00e9"]


@pytest.mark.parametrize("text", ["\u3053\u308c", "\uff8a\uff9f", "\u30ab\u30bf"])
def test_japanese_needs_a_list(text: str) -> None:
    with pytest.raises(RequestError, match="the text is Japanese"):
        words_of(text, "the text")
    assert words_of([text], "the text") == [text]
