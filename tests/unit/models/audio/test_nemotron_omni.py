"""Nemotron 3 Omni's sounds: features and embeddings, compared with transformers, and its fields."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.audio_models import RATE, audio_inputs, make_audio_model
from support.model_helpers import assert_logits_close, load, our_logits, reference_logits
from support.sound_checks import check_embeddings, embed, noise, prepared, read_config
from support.tower_checks import same_on_all_threads
from support.variants import slow
from transformers.models.nemotron_h_omni import processing_nemotron_h_omni as processing

from shmllm.errors import EngineStartError, RequestError
from shmllm.frontend.items.registry import processors_of_model
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel

NAME, IN_FILES = "nemotron_h_omni", "NemotronH_Nano_Omni_Reasoning_V3"
PUBLISHED = {
    "sound_context_token_id": "audio_token_id",
    "llm_config": "text_config",
    "sound_config": "audio_config",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "biases and a factor": {
        "attention_bias": True,
        "projection_bias": True,
        "scale_input": True,
        "hidden_act": "gelu",
    },
    "no biases, other sizes": {
        "convolution_bias": False,
        "subsampling_factor": 4,
        "conv_kernel_size": 5,
    },
}
SECONDS = [0.021, 0.08, 0.0799, 0.165, 1.28, 3.21]
"""A position has 0.08 seconds: some are filled, so that the silence behind them has another one."""
TOKENS = [int(token) for token in torch.randint(0, 440, (40,), generator=torch.manual_seed(3))]
Models = tuple[Path, Any, DecoderModel]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Where a model is, transformers' and ours."""
    directory = tmp_path_factory.mktemp(NAME)
    return directory, make_audio_model(directory, NAME), load(directory)


@pytest.mark.parametrize("seconds", SECONDS)
@torch.inference_mode()
def test_features_and_embeddings_equal_transformers(seconds: float, models: Models) -> None:
    samples = noise(seconds)
    item, found = prepared(models[0], samples), audio_inputs([samples], NAME)
    count = int(found["input_features_mask"].sum())
    assert item.grid == (count, 1, 1)
    wanted = found["input_features"][0, :count]
    np.testing.assert_allclose(item.data, wanted, rtol=0, atol=3e-4)
    processor: Any = object.__new__(processing.NemotronH_Omni_Reasoning_V3Processor)
    processor.audio_subsampling_factor, processor.audio_hop_length = 8, 160
    assert item.num_tokens == processor._estimate_audio_num_embeddings(len(samples))
    exact = replace(item, data=wanted.numpy())
    theirs = models[1].get_audio_features(**found).pooler_output
    ours = embed(models[2], exact)
    assert ours.shape == theirs.shape == (item.num_tokens, 64)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 2e-5


def test_logits_of_text_equal_transformers(models: Models) -> None:
    _, reference, model = models
    ours = our_logits(model, TOKENS)
    assert_logits_close(ours, reference_logits(reference, TOKENS), 1e-4)


def test_the_number_of_threads_changes_no_bit(models: Models) -> None:
    directory, _, model = models
    item = prepared(directory, noise(1.28))
    same_on_all_threads(model.towers["audio"], lambda: embed(model, item))


@pytest.mark.parametrize("variant", [*map(slow, VARIANTS)])
def test_variants_equal_transformers(variant: str, tmp_path: Path) -> None:
    reference = make_audio_model(tmp_path, NAME, **VARIANTS[variant])
    model = load(tmp_path)
    for seconds in (0.64, 0.7):
        check_embeddings(tmp_path, reference, model, seconds)


def test_published_files_have_other_names(models: Models, tmp_path: Path) -> None:
    """Their configuration, and tensors that the model lacks."""
    config = json.loads((models[0] / "config.json").read_text())
    own = {theirs: config.pop(name) for theirs, name in PUBLISHED.items()}
    own["sound_config"]["model_type"] = "parakeet"
    for name in ("attention_bias", "scale_input"):
        del own["sound_config"][name]
    found = read_config(tmp_path, config | own | {"architectures": [IN_FILES]})
    assert found == ModelConfig.from_directory(models[0])
    weights = load_file(models[0] / "model.safetensors")
    further = ("sound_encoder.encoder.feature_extractor.window", "language_model.mtp.norm.weight")
    save_file(
        weights | {name: torch.ones(2) for name in (*further, "vision_final_layernorm.weight")},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "preprocessor_config.json").write_text(
        (models[0] / "preprocessor_config.json").read_text()
    )
    item = prepared(models[0], noise(0.3))
    assert torch.equal(embed(load(tmp_path), item), embed(models[2], item))


def test_a_model_without_a_tower_hears_nothing(models: Models, tmp_path: Path) -> None:
    config = json.loads((models[0] / "config.json").read_text()) | {"audio_config": None}
    assert read_config(tmp_path, config).audio is None
    assert "audio" not in processors_of_model(models[0], config)


def test_sounds_of_other_lengths_are_refused(models: Models) -> None:
    with pytest.raises(RequestError, match="too short: it has 319 samples"):
        prepared(models[0], np.ones(319, np.float32))
    with pytest.raises(RequestError, match="the model hears 120 at once"):
        prepared(models[0], np.ones(120 * RATE + 1, np.float32))


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("audio_config", {"model_type": "whisper"}, "supported: parakeet_encoder"),
        ("audio_config", {"hidden_act": "tanh"}, "'tanh' is not supported"),
        ("audio_config", {"subsampling_conv_stride": 3}, "subsampling_conv_stride 3 is not"),
        ("audio_config", {"subsampling_factor": 6}, r"subsampling_factor \(6\) must be a power"),
        ("audio_config", {"projection_hidden_size": None}, "'projection_hidden_size'"),
        ("text_config", {"model_type": "llama"}, "supported: nemotron_h"),
        (None, {"audio_token_id": None}, "'audio_token_id'"),
        (None, {"audio_token_id": 10**6}, "is no token of a vocabulary"),
    ],
)
def test_what_is_not_computed_is_refused(
    part: str | None, fields: dict[str, Any], message: str, models: Models, tmp_path: Path
) -> None:
    config = json.loads((models[0] / "config.json").read_text())
    (config if part is None else config[part]).update(fields)
    with pytest.raises(EngineStartError, match=rf"config\.json: .*{message}"):
        read_config(tmp_path, config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"feature_size": 80}, "takes 16 features"),
        ({"feature_extractor_type": "WhisperFeatureExtractor"}, "needs Parakeet's feature"),
    ],
)
def test_settings_that_do_not_suit_are_refused(
    settings: dict[str, Any], message: str, models: Models, tmp_path: Path
) -> None:
    config = json.loads((models[0] / "config.json").read_text())
    found = json.loads((models[0] / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(found | settings))
    with pytest.raises(EngineStartError, match=message):
        processors_of_model(tmp_path, config)
