"""Sounds that a model takes in parts: those of Voxtral have the features of transformers'
processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.audio_families import AUDIO_FAMILIES
from support.audio_models import AUDIO, RATE, SECONDS, audio_inputs, tokenizer_with

from shmllm.errors import EngineStartError, RequestError
from shmllm.frontend.audio.processor import AudioProcessor
from shmllm.frontend.audio.sound import Sound
from shmllm.frontend.items.registry import processors_of_model

FAMILY = AUDIO_FAMILIES["voxtral"]
TOKENIZER = tokenizer_with((FAMILY.begin, FAMILY.token))
CONFIG: dict[str, Any] = {
    "architectures": ["VoxtralForConditionalGeneration"],
    "audio_config": AUDIO | FAMILY.audio,
    "audio_token_id": TOKENIZER.token_to_id(FAMILY.token),
}
EXTRACTOR = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": AUDIO["num_mel_bins"],
    "chunk_length": SECONDS,
}
MOST, EACH = SECONDS * RATE, 50
RANDOM = np.random.default_rng(8)


@pytest.fixture
def processor(tmp_path: Path) -> AudioProcessor:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(EXTRACTOR))
    found = processors_of_model(tmp_path, CONFIG)["audio"]
    assert isinstance(found, AudioProcessor)
    return found


def sound(length: int) -> Sound:
    """A loud beginning, so that the features of a later part depend on the first one."""
    samples = RANDOM.standard_normal(length) * np.exp(-np.arange(length) / 9000)
    return Sound(samples.astype(np.float32), RATE)


@pytest.mark.parametrize("length", [1, 7_777, MOST - 1, MOST, MOST + 1, 2 * MOST + 15_000])
def test_parts_are_those_of_transformers(length: int, processor: AudioProcessor) -> None:
    given = sound(length)
    prepared = processor.prepare(given)
    wanted = audio_inputs([given.samples], "voxtral")["input_features"].numpy()
    assert len(prepared.parts) == len(wanted) == -(-length // MOST)
    assert prepared.num_tokens == EACH * len(wanted)
    for part, features in zip(prepared.parts, wanted, strict=True):
        assert (part.grid, part.num_tokens) == ((100 * SECONDS, 1, 1), EACH)
        assert part.data.flags.c_contiguous
        assert not part.data.flags.writeable
        np.testing.assert_allclose(part.data, features.T, rtol=0, atol=2e-5)


def test_the_beginning_is_taken_if_asked(processor: AudioProcessor) -> None:
    given = sound(2 * MOST)
    cut = Sound(given.samples[:MOST], RATE)
    whole, begin = processor.prepare(given), processor.prepare(given, {"truncation": True})
    assert (len(whole.parts), len(begin.parts)) == (2, 1)
    assert np.array_equal(begin.parts[0].data, processor.prepare(cut).parts[0].data)
    assert processor.identity(given, {"truncation": True}) == processor.identity(cut)
    assert processor.identity(given) != processor.identity(cut)


def test_each_part_has_its_tokens(processor: AudioProcessor) -> None:
    def encode(text: str) -> list[int]:
        ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
        return ids

    items = [processor.prepare(sound(length)) for length in (MOST + 1, 5)]
    text = f"Hear {processor.mark} and {processor.mark}."
    assert processor.mark == "[BEGIN_AUDIO][AUDIO]"
    wanted = encode(processor.expand_text("prompt", text, items))
    begin, token = (TOKENIZER.token_to_id(each) for each in (FAMILY.begin, FAMILY.token))
    assert (wanted.count(begin), wanted.count(token)) == (2, 3 * EACH)
    assert processor.expand_ids("prompt", encode(text), items, encode) == wanted
    parts = [part for item in items for part in item.parts]
    runs = processor.runs("prompt", wanted, parts)
    first = wanted.index(token)
    assert runs[:2] == [((first, first + EACH),), ((first + EACH, first + 2 * EACH),)]
    ((start, end),) = runs[2]
    assert (wanted[start - 1], end - start) == (begin, EACH)


def test_other_names_and_sizes(tmp_path: Path) -> None:
    values = {"feature_size": 128, "chunk_length": 30}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(EXTRACTOR | values))
    names = {"audio_token": "<a>", "begin_audio_token": "<b>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    found = processors_of_model(tmp_path, {"architectures": CONFIG["architectures"]})["audio"]
    assert (found.mark, found.token_id) == ("<b><a>", 24)
    (part,) = found.prepare(Sound(np.ones(9, np.float32), RATE)).parts
    assert (part.data.shape, part.num_tokens) == ((3000, 128), 375)


def test_wrong_fields_and_overrides_are_refused(processor: AudioProcessor, tmp_path: Path) -> None:
    wrong = CONFIG | {"audio_config": {"intermediate_size": 9}}
    with pytest.raises(EngineStartError, match="'encoder_ffn_dim' must be an integer of at least"):
        processors_of_model(tmp_path, wrong)
    with pytest.raises(RequestError, match="may have 'truncation' with True or False"):
        processor.prepare(sound(9), {"max_source_positions": 3000})
