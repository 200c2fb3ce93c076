"""Encoder-decoders of sounds of any length: features, and what config.json says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from support.sound_encoders import RECIPES
from support.whisper_models import RATE, make_sound

from shmllm.errors import EngineStartError
from shmllm.frontend.items.registry import processors_of_model
from shmllm.models.config import ModelConfig

MOONSHINE: dict[str, Any] = {"architectures": ["MoonshineForConditionalGeneration"]}
WAVES = RECIPES["moonshine"].settings


def write(directory: Path, config: dict[str, Any], **settings: Any) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("normalizes", [False, True])
def test_the_features_of_moonshine_are_those_of_transformers(
    tmp_path: Path, normalizes: bool
) -> None:
    sound = make_sound(0.3, 1)
    write(tmp_path, MOONSHINE, **WAVES | {"do_normalize": normalizes})
    processor = processors_of_model(tmp_path, MOONSHINE)["audio"]
    prepared = processor.prepare(processor.open("sound", (sound, RATE)))
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=normalizes)
    (wanted,) = extractor(sound, sampling_rate=RATE, return_tensors="np")["input_values"]
    assert np.array_equal(prepared.data[:, 0], wanted)
    assert prepared.grid == (len(sound), 1, 1)


def test_absent_fields_of_moonshine_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    write(tmp_path, MOONSHINE)
    absent = ModelConfig.from_directory(tmp_path)
    write(tmp_path, transformers.MoonshineConfig().to_dict() | MOONSHINE)
    assert replace(ModelConfig.from_directory(tmp_path), eos_token_ids=()) == absent
    assert absent.audio is not None
    assert absent.audio.decoder_start == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoder_num_attention_heads": 4}, r"encoder_num_attention_heads \(4\) must be"),
        ({"decoder_num_key_value_heads": 2}, r"decoder_num_key_value_heads \(2\) must be"),
        ({"head_dim": 24}, "head_dim 24 is not supported"),
        ({"encoder_hidden_act": "tanh"}, "encoder_hidden_act 'tanh' is not supported"),
        ({"decoder_hidden_act": "mish"}, "decoder_hidden_act 'mish' is not supported"),
        ({"max_position_embeddings": 4000}, r"max_position_embeddings \(4000\) exceeds 2688"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope type 'linear' is not supported",
        ),
        ({"audio_config": None}, "the decoder needs its encoder"),
        ({"decoder_start_token_id": -1}, "decoder_start_token_id"),
    ],
)
def test_fields_of_moonshine_that_are_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    write(tmp_path, MOONSHINE | fields)
    with pytest.raises(EngineStartError, match=message):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"feature_size": 2}, "feature_size 2 is not supported"),
        ({"do_normalize": 1}, "'do_normalize' must be true or false"),
        ({"sampling_rate": 8000}, "takes 1 features of up to 1024000 frames"),
        ({"feature_extractor_type": "WhisperFeatureExtractor"}, "takes 1 features"),
    ],
)
def test_settings_that_do_not_suit_moonshine_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    write(tmp_path, MOONSHINE, **WAVES | settings)
    with pytest.raises(EngineStartError, match=message):
        processors_of_model(tmp_path, MOONSHINE)
