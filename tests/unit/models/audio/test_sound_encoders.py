"""Encoder-decoders of sounds of any length: features, and what config.json says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.model_helpers import load
from support.sound_encoders import RECIPES, make_sound_encoder
from support.variants import slow
from support.whisper_models import RATE, make_sound

from shmllm.errors import EngineStartError
from shmllm.frontend.audio.parakeet_features import torch_normals
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


def extractor_of(name: str) -> Any:
    kind = RECIPES[name].settings["feature_extractor_type"]
    return getattr(transformers, kind)(feature_size=FEATURES)


FEATURES = 16
PARAKEET: dict[str, dict[str, Any]] = {
    "cohere_asr": {"architectures": ["CohereAsrForConditionalGeneration"]},
    "canary": {"architectures": ["CanaryForConditionalGeneration"]},
}
CONFIGS = {"cohere_asr": transformers.CohereAsrConfig, "canary": transformers.CanaryConfig}


@pytest.mark.parametrize("name", PARAKEET)
@pytest.mark.parametrize("length", [480, 5000, 48_123])
def test_the_features_of_parakeet_are_those_of_transformers(
    tmp_path: Path, name: str, length: int
) -> None:
    """transformers computes them in float32, whose rounding a logarithm of small numbers shows."""
    noise = np.random.default_rng(length).normal(0, 0.1, length).astype(np.float32)
    config = PARAKEET[name] | {"encoder_config": {"num_mel_bins": FEATURES}}
    write(tmp_path, config, **RECIPES[name].settings)
    processor = processors_of_model(tmp_path, config)["audio"]
    prepared = processor.prepare(processor.open("sound", (noise, RATE)))
    found = extractor_of(name)(noise, sampling_rate=RATE, return_tensors="np")
    count = found["attention_mask"][0].sum()
    assert prepared.grid == (count, 1, 1)
    wanted = found["input_features"][0, :count]
    np.testing.assert_allclose(prepared.data, wanted, rtol=0, atol=3e-4)


@pytest.mark.parametrize("count", [16, 17, 31, 1000])
def test_noise_is_that_of_torch(count: int) -> None:
    wanted = torch.randn(count, generator=torch.Generator().manual_seed(count)).numpy()
    np.testing.assert_allclose(torch_normals(count, count), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", PARAKEET)
def test_absent_fields_have_the_defaults_of_transformers(tmp_path: Path, name: str) -> None:
    write(tmp_path, PARAKEET[name])
    absent = ModelConfig.from_directory(tmp_path)
    write(tmp_path, CONFIGS[name]().to_dict() | PARAKEET[name])
    assert replace(ModelConfig.from_directory(tmp_path), eos_token_ids=()) == absent
    assert absent.audio is not None
    assert absent.audio.decoder_start == {"cohere_asr": None, "canary": 7}[name]
    some = {"encoder_config": {"model_type": "parakeet_encoder", "num_attention_heads": 4}}
    write(tmp_path, PARAKEET[name] | some)
    absent = ModelConfig.from_directory(tmp_path)
    write(tmp_path, CONFIGS[name](**some).to_dict() | PARAKEET[name])
    assert replace(ModelConfig.from_directory(tmp_path), eos_token_ids=()) == absent


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("cohere_asr", {"subsampling_factor": 6}, r"subsampling_factor \(6\) must be a power"),
        ("canary", {"num_mel_bins": 84}, "that divides num_mel_bins"),
        ("canary", {"subsampling_conv_stride": 3}, "subsampling_conv_stride 3 is not supported"),
        ("canary", {"subsampling_conv_kernel_size": 5}, "kernel_size 5 is not supported"),
        ("cohere_asr", {"conv_kernel_size": 8}, r"conv_kernel_size \(8\) must be odd"),
        ("cohere_asr", {"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        ("canary", {"num_attention_heads": 7}, "num_attention_heads"),
        ("canary", {"model_type": "whisper"}, "model_type 'whisper' is not supported"),
        ("canary", {"head_dim": 64}, "head_dim 64 is not supported; supported: 128"),
        ("canary", {"hidden_size": 512}, "differs from that of encoder_config"),
    ],
)
def test_fields_of_parakeet_that_are_refused(
    tmp_path: Path, name: str, fields: dict[str, Any], message: str
) -> None:
    write(tmp_path, PARAKEET[name] | {"encoder_config": fields})
    with pytest.raises(EngineStartError, match=message):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("canary", {"feature_size": 80}, "takes 16 features of Parakeet's kind"),
        ("canary", WAVES | {"feature_size": 1}, "takes 16 features of Parakeet's kind"),
        ("canary", {"dither": 1e-5}, "dither must be 0"),
        ("cohere_asr", {"n_fft": 300}, "n_fft must be even, and at least win_length"),
        ("cohere_asr", {"dither": "much"}, "'dither' must be a number"),
    ],
)
def test_settings_that_do_not_suit_parakeet_are_refused(
    tmp_path: Path, name: str, settings: dict[str, Any], message: str
) -> None:
    config = PARAKEET[name] | {"encoder_config": {"num_mel_bins": FEATURES}}
    write(tmp_path, config, **RECIPES[name].settings | settings)
    with pytest.raises(EngineStartError, match=message):
        processors_of_model(tmp_path, config)


@pytest.mark.parametrize("form", [slow("published"), slow("modules")])
def test_names_of_cohere_transcribe_in_files(tmp_path: Path, form: str) -> None:
    """Published files have NeMo's names without the prefix that `save_pretrained` writes."""
    reference = make_sound_encoder(tmp_path, "cohere_asr")
    path = tmp_path / "model.safetensors"
    model = load(tmp_path)
    wanted = {name: views[0].clone() for name, views in model.named_weights().items()}
    if form == "modules":
        tensors = {name: each.clone() for name, each in reference.state_dict().items()}
    else:
        tensors = {name.removeprefix("model."): each for name, each in load_file(path).items()}
        tensors["preprocessor.featurizer.fb"] = torch.zeros(1, FEATURES, 257)
    save_file(tensors, path)
    again = load(tmp_path)
    for name, views in again.named_weights().items():
        assert torch.equal(views[0].clone(), wanted[name]), name
