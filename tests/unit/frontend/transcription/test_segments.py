"""Segments of tokens, and what the special tokens of a model say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shmllm.errors import RequestError
from shmllm.frontend.transcription.segments import segments_of
from shmllm.frontend.transcription.vocabulary import Vocabulary
from shmllm.outputs.transcription import Segment, Transcript

ADDED = {
    **{"<|endoftext|>": 50, "<|startoftranscript|>": 51, "<|en|>": 52, "<|yue|>": 53},
    **{"<|translate|>": 54, "<|transcribe|>": 55, "<|nospeech|>": 56, "<|notimestamps|>": 57},
    **{"<|0.00|>": 58, "<|0.02|>": 59},
}


def make(directory: Path, added: dict[str, int] = ADDED, **generation: Any) -> Vocabulary:
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return Vocabulary.of(added, directory)


def segments(tokens: list[int], directory: Path, **options: Any) -> list[tuple[float, float, str]]:
    def decode(ids: Any) -> str:
        return "".join(f" {token}" for token in ids)

    given: dict[str, Any] = {"start": 100.0, "duration": 10.0, "step": 0.5} | options
    found = segments_of(tokens, make(directory), decode, **given)
    return [(each.start, each.end, each.text) for each in found]


def test_segments_lie_between_timestamps(tmp_path: Path) -> None:
    found = segments([58, 1, 2, 60, 62, 3, 64, 50], tmp_path)
    assert found == [(100.0, 101.0, "1 2"), (102.0, 103.0, "3")]


def test_text_without_timestamps_fills_the_window(tmp_path: Path) -> None:
    assert segments([1, 2, 50], tmp_path) == [(100.0, 110.0, "1 2")]
    assert segments([1, 60, 61, 2], tmp_path) == [(100.0, 101.0, "1"), (101.5, 110.0, "2")]


def test_times_are_inside_the_window_and_ordered(tmp_path: Path) -> None:
    assert segments([68, 1, 98], tmp_path) == [(105.0, 110.0, "1")]
    assert segments([68, 1, 58], tmp_path) == [(105.0, 105.0, "1")]
    assert segments([98, 1], tmp_path) == [(110.0, 110.0, "1")]


def test_no_text_gives_no_segment(tmp_path: Path) -> None:
    assert segments([50], tmp_path) == segments([58, 60, 50], tmp_path) == []


def test_prompts(tmp_path: Path) -> None:
    vocabulary = make(tmp_path)
    assert vocabulary.languages == {"en": 52, "yue": 53}
    assert vocabulary.prompt("yue", "translate", timestamps=True) == [51, 53, 54]
    assert vocabulary.prompt("en", "transcribe", timestamps=False) == [51, 52, 55, 57]


def test_a_model_of_one_language_names_none(tmp_path: Path) -> None:
    vocabulary = make(tmp_path, is_multilingual=False)
    assert vocabulary.prompt("", "transcribe", timestamps=True) == [51]


def test_rules(tmp_path: Path) -> None:
    vocabulary = make(
        tmp_path, suppress_tokens=[1, 2], begin_suppress_tokens=[3, 50], eos_token_id=50
    )
    without = {"suppress": [1, 2, 57], "suppress_first": [3, 50, 50], "end": 50}
    assert vocabulary.rules(timestamps=False) == without
    assert vocabulary.rules(timestamps=True) == without | {"timestamps": 58, "latest_first": 108}
    assert make(tmp_path, suppress_tokens=[-1], begin_suppress_tokens=None).suppress == ()


def test_a_tokenizer_without_special_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"lacks <\|startoftranscript\|>"):
        make(tmp_path, {"<s>": 1})


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    without = {text: token for text, token in ADDED.items() if text != "<|endoftext|>"}
    with pytest.raises(RequestError, match=r"lacks <\|endoftext\|>"):
        make(tmp_path, without)


def test_how_late_a_transcript_may_begin(tmp_path: Path) -> None:
    given = {"max_initial_timestamp_index": 0}
    assert (make(tmp_path).latest_first, make(tmp_path, **given).latest_first) == (50, 0)
    with pytest.raises(RequestError, match=r"max_initial_timestamp_index .* not 'x'"):
        make(tmp_path, max_initial_timestamp_index="x")


def test_the_text_of_a_transcript() -> None:
    found = Transcript("en", 2.0, [Segment(0, 1, "One."), Segment(1, 2, "Two.")])
    assert found.text == "One. Two."
