"""Omnilingual ASR: samples and embeddings of sounds, compared with transformers, and its fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.audio_models import RATE, audio_inputs, make_audio_model
from support.model_helpers import assert_logits_close, load, our_logits, reference_logits
from support.sound_checks import check_embeddings, embed, noise, prepared, read_config
from support.tower_checks import same_on_all_threads
from support.variants import slow
from transformers import OmniASRConfig, OmniASRProcessor

from shmllm.errors import EngineStartError, RequestError
from shmllm.frontend.items.registry import processors_of_model
from shmllm.models.decoder import DecoderModel

NAME = "omniasr"
ARCHITECTURE = {"architectures": ["OmniASRForConditionalGeneration"]}
VARIANTS: dict[str, dict[str, Any]] = {
    "no biases of convolutions": {"conv_bias": False, "num_conv_pos_embedding_groups": 1},
    "other convolutions": {
        "conv_dim": [8, 16],
        "conv_kernel": [40, 9],
        "conv_stride": [20, 9],
        "num_conv_pos_embeddings": 2,
        "hidden_act": "silu",
    },
}
SECONDS = [0.1, 0.21, 1.3]
TOKENS = [int(token) for token in torch.randint(0, 440, (40,), generator=torch.manual_seed(3))]
Models = tuple[Path, Any, DecoderModel]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Where a model is, transformers' and ours."""
    directory = tmp_path_factory.mktemp(NAME)
    return directory, make_audio_model(directory, NAME), load(directory)


@pytest.mark.parametrize("seconds", SECONDS)
def test_samples_and_embeddings_equal_transformers(seconds: float, models: Models) -> None:
    samples = noise(seconds) + np.float32(0.1)
    item, found = prepared(models[0], samples), audio_inputs([samples], NAME)
    wanted = found["input_values"][0].T
    np.testing.assert_allclose(item.data, wanted, rtol=0, atol=3e-6)
    audio = models[1].config.audio_config
    processor: Any = object.__new__(OmniASRProcessor)
    processor.conv_kernel, processor.conv_stride = audio.conv_kernel, audio.conv_stride
    assert item.num_tokens == processor._get_num_audio_tokens(torch.tensor(len(samples)))
    check_embeddings(*models, seconds)


def test_logits_of_text_equal_transformers(models: Models) -> None:
    _, reference, model = models
    assert_logits_close(our_logits(model, TOKENS), reference_logits(reference, TOKENS), 1e-4)


@pytest.mark.parametrize("variant", [*map(slow, VARIANTS)])
def test_variants_equal_transformers(variant: str, tmp_path: Path) -> None:
    reference = make_audio_model(tmp_path, NAME, **VARIANTS[variant])
    check_embeddings(tmp_path, reference, load(tmp_path), 0.7)


def test_the_number_of_threads_changes_no_bit(models: Models) -> None:
    directory, _, model = models
    item = prepared(directory, noise(1.1))
    same_on_all_threads(model.towers["audio"], lambda: embed(model, item))


def test_sounds_of_other_lengths_are_refused(models: Models) -> None:
    with pytest.raises(RequestError, match="too short: it has 689 samples"):
        prepared(models[0], np.ones(689, np.float32))
    with pytest.raises(RequestError, match="the model hears 40 at once"):
        prepared(models[0], np.ones(40 * RATE + 1, np.float32))


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    some = {"text_config": {"a": 1}, "audio_config": {"a": 1}}
    found = read_config(tmp_path, some | ARCHITECTURE)
    own = read_config(tmp_path, OmniASRConfig().to_dict() | ARCHITECTURE)
    assert found.audio is not None
    assert found.audio == own.audio
    assert found.layers == own.layers
    assert (found.vocab_size, found.hidden_size) == (own.vocab_size, own.hidden_size)
    assert found.max_position_embeddings == own.max_position_embeddings == 8192


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("audio_config", {"model_type": "whisper"}, "supported: omniasr_audio"),
        ("audio_config", {"hidden_act": "tanh"}, "'tanh' is not supported"),
        ("audio_config", {"layer_norm_eps": 1e-6}, "layer_norm_eps 1e-06 is not supported"),
        ("audio_config", {"num_conv_pos_embeddings": 7}, r"num_conv_pos_embeddings \(7\) must be"),
        ("audio_config", {"num_conv_pos_embedding_groups": 3}, r"groups \(3\) divide hidden_size"),
        ("audio_config", {"conv_dim": [8]}, "must be lists of equal length"),
        ("audio_config", {"conv_kernel": 3}, "'conv_kernel' must be a list of sizes, not 3"),
        ("audio_config", {"conv_stride": [0] * 7}, "'conv_stride' must be a list of sizes"),
        ("text_config", {"model_type": "qwen2"}, "supported: llama"),
    ],
)
def test_what_is_not_computed_is_refused(
    part: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    found = OmniASRConfig().to_dict() | ARCHITECTURE
    found[part].update(fields)
    with pytest.raises(EngineStartError, match=rf"config\.json: .*{message}"):
        read_config(tmp_path, found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"feature_size": 2}, "feature_size 2 is not supported"),
        (
            {"feature_extractor_type": "Wav2Vec2FeatureExtractor"},
            "takes 1 features of up to",
        ),
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
