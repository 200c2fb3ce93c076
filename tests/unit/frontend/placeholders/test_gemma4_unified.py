"""Images, videos and sounds of Gemma 4 12B are prepared and written as transformers does it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.torchvision_modules import import_without_torchvision
from transformers import Gemma4UnifiedConfig
from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import (
    Gemma4UnifiedAudioFeatureExtractor,
)

from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.audio_readers import read_audio_settings
from shmllm.frontend.items.registry import processors_of_model
from shmllm.frontend.placeholders.registry import placeholders_of_model

PROCESSING = import_without_torchvision("gemma4_unified.processing_gemma4_unified")
MARKS = ["<|image|>", "<|video|>", "<|audio|>", "<|image>", "<image|>", "<|audio>", "<audio|>"]
KINDS = ("image", "video", "audio")
NAMES = {"architectures": ["Gemma4UnifiedForConditionalGeneration"]}
PARTS: dict[str, Any] = {f"{part}_config": {} for part in ("text", "vision", "audio")}
SAMPLES = np.random.default_rng(1).standard_normal(2000).astype(np.float32)


def processors(directory: Path, tokenizer: Any, **extractor: Any) -> dict[Any, Any]:
    kinds = {f"{kind}_token_id": mark for kind, mark in zip(KINDS, MARKS, strict=False)}
    ids = {field: tokenizer.convert_tokens_to_ids(mark) for field, mark in kinds.items()}
    settings = {
        "image_processor": {"image_processor_type": "Gemma4UnifiedImageProcessor"},
        "video_processor": {"video_processor_type": "Gemma4UnifiedVideoProcessor"},
        "feature_extractor": {"feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor"}
        | extractor,
    }
    (directory / "processor_config.json").write_text(json.dumps(settings))
    tokenizer.save_pretrained(directory)
    return processors_of_model(directory, Gemma4UnifiedConfig(**ids, **PARTS).to_dict() | NAMES)


@pytest.fixture
def found(make_tokenizer: Callable[..., Any], tmp_path: Path) -> dict[Any, Any]:
    return processors(tmp_path, make_tokenizer(MARKS))


@pytest.mark.parametrize("length", [1, 640, 641, 2000])
def test_sounds_are_those_of_transformers(length: int, found: dict[Any, Any]) -> None:
    own: Any = Gemma4UnifiedAudioFeatureExtractor()
    inputs = own([SAMPLES[:length]], return_tensors="np")
    item = found["audio"].prepare(found["audio"].open("a sound", (SAMPLES[:length], 16_000)))
    assert np.array_equal(item.data, inputs["input_features"][0])
    assert item.grid == (len(item.data), 1, 1)
    theirs = PROCESSING.Gemma4UnifiedProcessor
    processor = theirs.__new__(theirs)
    processor.audio_token, processor.boa_token, processor.eoa_token = (MARKS[i] for i in (2, 5, 6))
    text = processor.replace_audio_token(inputs, 0)
    assert found["audio"].expand_text("prompt", "a <|audio|>b", [item]) == f"a {text}b"


def test_images_and_frames_are_those_of_gemma_4(
    found: dict[Any, Any], random_image: Callable[..., Image.Image]
) -> None:
    image = found["image"].prepare(random_image(300, 200))
    assert image.data.shape == (1, 16 * image.grid[1], 16 * image.grid[2], 3)
    assert image.num_tokens == image.grid[1] * image.grid[2] // 9 == 13 * 20
    text = found["image"].expand_text("prompt", "<|image|>", [image])
    assert text == f"<|image>{'<|image|>' * 260}<image|>"
    frames = np.zeros((3, 50, 90, 3), np.uint8)
    video = found["video"].prepare(found["video"].open("a video", (frames, {"fps": 0.5})))
    count = video.num_tokens // 3
    assert 50 < count <= 70
    expected = [f"00:0{2 * index} <|image>{'<|video|>' * count}<image|>" for index in range(3)]
    assert found["video"].expand_text("prompt", "<|video|>", [video]) == " ".join(expected)


def test_a_very_long_sound_is_refused(found: dict[Any, Any]) -> None:
    long = found["audio"].open("a sound", (np.zeros(640 * 60_000 + 1, np.float32), 16_000))
    with pytest.raises(RequestError, match=r"has 2,400\.0 seconds, and the model hears 2400 at"):
        found["audio"].prepare(long)


def test_an_extractor_that_does_not_suit_is_refused(
    make_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(MARKS)
    with pytest.raises(EngineStartError, match=r"takes 640 features .* makes 320 of 60000"):
        processors(tmp_path, tokenizer, audio_samples_per_token=320)
    with pytest.raises(
        EngineStartError, match=r"feature_size \(9\) differs from audio_samples_per_"
    ):
        processors(tmp_path, tokenizer, feature_size=9)
    processors(tmp_path, tokenizer)
    settings = read_audio_settings(tmp_path)
    assert settings is not None
    assert (settings.most_seconds, settings.rate) == (2400, 16_000)


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    whole = Gemma4UnifiedConfig(**PARTS).to_dict() | NAMES
    found = placeholders_of_model(tmp_path, whole)
    assert {kind: each.token_id for kind, each in found.items()} == {
        kind: whole[f"{kind}_token_id"] for kind in KINDS
    }
    given = NAMES | {name: {"a": 1} for name in PARTS}
    assert placeholders_of_model(tmp_path, given) == found
    assert placeholders_of_model(tmp_path, NAMES) == {}
