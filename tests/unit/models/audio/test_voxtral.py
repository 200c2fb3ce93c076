"""Voxtral's fields, and the embeddings of sounds, which are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.audio_models import RATE, SECONDS, audio_inputs, make_audio_model
from support.model_helpers import assert_logits_close, load, our_logits, reference_logits
from support.tower_checks import same_on_all_threads
from support.variants import slow
from torch import Tensor
from transformers import VoxtralConfig

from shmllm.errors import EngineStartError
from shmllm.models.audio.specs import AudioSpec, VoxtralTower
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel

ARCHITECTURE = {"architectures": ["VoxtralForConditionalGeneration"]}
MINI: dict[str, Any] = ARCHITECTURE | {
    "audio_config": {
        "activation_function": "gelu",
        "attention_dropout": 0.0,
        "head_dim": 64,
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "max_source_positions": 1500,
        "model_type": "voxtral_encoder",
        "num_attention_heads": 20,
        "num_hidden_layers": 32,
        "num_key_value_heads": 20,
        "num_mel_bins": 128,
        "scale_embedding": False,
        "vocab_size": 51866,
    },
    "audio_token_id": 24,
    "hidden_size": 3072,
    "model_type": "voxtral",
    "projector_hidden_act": "gelu",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000000.0,
        "vocab_size": 131072,
    },
    "vocab_size": 131072,
}
"""Fields as the files of the model's authors have them."""
TOWER = VoxtralTower(
    hidden_size=1280,
    num_layers=32,
    num_heads=20,
    inner=5120,
    activation="gelu",
    num_mels=128,
    num_positions=1500,
    factor=4,
    projector_activation="gelu",
)
GRID = (100 * SECONDS, 1, 1)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "other activations": (
        {"activation_function": "silu"},
        {"projector_hidden_act": "gelu_pytorch_tanh"},
    ),
    "one result for an embedding": ({"encoder_ffn_dim": 32}, {}),
    "old names": ({"d_model": 48, "encoder_ffn_dim": 48, "encoder_attention_heads": 3}, {}),
    "a scale that transformers never uses": ({"scale_embedding": True}, {}),
}


def read(directory: Path, whole: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(whole))
    return ModelConfig.from_directory(directory)


def features_of(length: int) -> Tensor:
    """[parts, mels, frames] of noise of so many samples."""
    rng = np.random.default_rng(length)
    samples = (rng.standard_normal(length) * 0.2).astype(np.float32)
    return audio_inputs([samples], "voxtral")["input_features"]


@torch.inference_mode()
def embed(model: DecoderModel, part: Tensor) -> Tensor:
    return model.towers["audio"](part.T.contiguous(), GRID)


def check(reference: Any, model: DecoderModel, features: Tensor) -> None:
    with torch.inference_mode():
        wanted = reference.get_audio_features(features).pooler_output
    ours = torch.cat([embed(model, part) for part in features])
    assert ours.shape == wanted.shape
    assert model.config.audio is not None
    assert len(ours) == len(features) * model.config.audio.num_embeddings(GRID)
    assert float((ours - wanted).abs().max() / wanted.abs().max()) < 1e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, DecoderModel]:
    """transformers' model and ours."""
    directory = tmp_path_factory.mktemp("voxtral")
    return make_audio_model(directory, "voxtral"), load(directory)


@pytest.mark.parametrize("length", [1, 12_345, SECONDS * RATE, SECONDS * RATE + 1, 100_000])
def test_embeddings_equal_transformers(length: int, models: tuple[Any, DecoderModel]) -> None:
    check(*models, features_of(length))


@pytest.mark.parametrize("variant", ["other activations", *map(slow, [*VARIANTS][1:])])
def test_variants_equal_transformers(variant: str, tmp_path: Path) -> None:
    audio, outer = VARIANTS[variant]
    reference = make_audio_model(tmp_path, "voxtral", outer=outer, **audio)
    check(reference, load(tmp_path), features_of(20_000))


@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_text_equal_transformers(tied: bool, tmp_path: Path) -> None:
    """Its class never shares the LM head with the embeddings."""
    reference = make_audio_model(tmp_path, "voxtral", outer={"tie_word_embeddings": tied})
    tokens = [int(token) for token in torch.randint(0, 440, (40,), generator=torch.manual_seed(3))]
    ours, wanted = our_logits(load(tmp_path), tokens), reference_logits(reference, tokens)
    assert_logits_close(ours, wanted, 1e-4)


def test_the_number_of_threads_changes_no_bit(models: tuple[Any, DecoderModel]) -> None:
    _, model = models
    (part,) = features_of(20_000)
    same_on_all_threads(model.towers["audio"], lambda: embed(model, part))


def test_files_of_voxtral_are_read(tmp_path: Path) -> None:
    config = read(tmp_path, MINI)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (3072, 30, 131072)
    assert config.audio == AudioSpec(token=24, tower=TOWER)
    assert config.audio.num_embeddings((3000, 1, 1)) == 375
    assert not config.tie_word_embeddings
    (rope,) = config.ropes
    assert rope.theta == 1e8


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = VoxtralConfig()
    audio, text = theirs.audio_config, theirs.text_config
    found = read(tmp_path, ARCHITECTURE | {"text_config": {"a": 1}, "audio_config": {"a": 1}})
    assert found.audio == AudioSpec(token=24, tower=TOWER)
    assert (audio.hidden_size, audio.num_hidden_layers) == (TOWER.hidden_size, TOWER.num_layers)
    assert (audio.num_attention_heads, audio.intermediate_size) == (20, TOWER.inner)
    assert (audio.num_mel_bins, audio.max_source_positions) == (128, TOWER.num_positions)
    assert (audio.activation_function, theirs.projector_hidden_act) == ("gelu", "gelu")
    assert (found.vocab_size, found.hidden_size) == (text.vocab_size, text.hidden_size)
    assert (found.num_layers, found.norm.eps) == (text.num_hidden_layers, text.rms_norm_eps)
    assert found.max_position_embeddings == text.max_position_embeddings
    (mlp,), (attention, *_) = found.dense_mlps, found.attentions
    assert mlp.inner == text.intermediate_size
    assert attention.num_heads == text.num_attention_heads
    assert attention.num_kv_heads == text.num_key_value_heads
    assert attention.head_dim == text.head_dim
    (rope,) = found.ropes
    assert rope.theta == text.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "whisper"}, "model_type 'whisper' is not supported; supported: voxtral_"),
        ({"activation_function": "relu"}, "activation_function 'relu' is not supported"),
        ({"intermediate_size": 5000}, r"intermediate_size \(5000\) must be a multiple of hidden_"),
        ({"intermediate_size": 640}, r"intermediate_size \(640\) must be a multiple of hidden_"),
        ({"max_source_positions": 1501}, r"by a factor of max_source_positions \(1501\)"),
        ({"num_attention_heads": 3}, r"encoder_attention_heads \(3\) must divide d_model"),
    ],
)
def test_what_is_not_computed_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    whole = MINI | {"audio_config": MINI["audio_config"] | fields}
    with pytest.raises(EngineStartError, match=rf"config\.json: audio_config: .*{message}"):
        read(tmp_path, whole)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"audio_token_id": 131072}, "is no token of a vocabulary of 131072"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act 'relu' is not supported"),
        ({"text_config": {"model_type": "mistral"}}, "model_type 'mistral' is not supported in Vo"),
    ],
)
def test_what_stands_around_is_checked(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=message):
        read(tmp_path, MINI | fields)
