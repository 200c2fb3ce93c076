"""What config.json says of towers for sounds: what is read, and what is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2AudioConfig

from shmllm.errors import EngineStartError
from shmllm.models.audio.specs import AudioSpec, WhisperTower
from shmllm.models.config import ModelConfig

ARCHITECTURE = {"architectures": ["Qwen2AudioForConditionalGeneration"]}
QWEN2_AUDIO: dict[str, Any] = ARCHITECTURE | {
    "audio_config": {
        "activation_dropout": 0.0,
        "d_model": 1280,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "encoder_layerdrop": 0.0,
        "encoder_layers": 32,
        "max_source_positions": 1500,
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": 128,
        "scale_embedding": False,
    },
    "audio_token_index": 151646,
    "ignore_index": -100,
    "model_type": "qwen2_audio",
    "text_config": {
        "intermediate_size": 11008,
        "max_position_embeddings": 8192,
        "model_type": "qwen2",
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "use_mrope": False,
        "vocab_size": 156032,
    },
    "vocab_size": 156032,
}
"""Fields as the files of the model's authors have them."""
TOWER = WhisperTower(
    hidden_size=1280,
    num_layers=32,
    num_heads=20,
    inner=5120,
    activation="gelu",
    num_mels=128,
    num_positions=1500,
)


def read(directory: Path, whole: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(whole))
    return ModelConfig.from_directory(directory)


def with_audio(**fields: Any) -> dict[str, Any]:
    return QWEN2_AUDIO | {"audio_config": QWEN2_AUDIO["audio_config"] | fields}


def test_files_of_qwen2_audio_are_read(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN2_AUDIO)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (4096, 32, 156032)
    (mlp,) = config.dense_mlps
    assert (mlp.inner, config.attentions[0].num_kv_heads) == (11008, 32)
    assert config.audio == AudioSpec(token=151646, tower=TOWER)
    assert config.audio.num_embeddings((3000, 1, 1)) == 750
    assert (config.audio.tower.most_frames, config.audio.tower.num_mels) == (3000, 128)
    assert config.vision is None


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = Qwen2AudioConfig()
    encoder = theirs.audio_config
    found = read(tmp_path, ARCHITECTURE | {"audio_config": {"dropout": 0.0}}).audio
    assert found == AudioSpec(token=theirs.audio_token_id, tower=TOWER)
    assert (encoder.d_model, encoder.encoder_layers) == (TOWER.hidden_size, TOWER.num_layers)
    assert (encoder.encoder_attention_heads, encoder.encoder_ffn_dim) == (20, TOWER.inner)
    assert (encoder.num_mel_bins, encoder.max_source_positions) == (128, TOWER.num_positions)
    assert encoder.activation_function == TOWER.activation


def test_newer_files_have_another_name_for_the_token(tmp_path: Path) -> None:
    found = read(tmp_path, QWEN2_AUDIO | {"audio_token_id": 9}).audio
    assert found is not None
    assert found.token == 9


def test_a_scale_that_transformers_never_uses_is_ignored(tmp_path: Path) -> None:
    scaled = read(tmp_path, with_audio(scale_embedding=True))
    assert scaled.audio == read(tmp_path, QWEN2_AUDIO).audio


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "whisper"}, "model_type 'whisper' is not supported; supported: qwen2_aud"),
        ({"activation_function": "relu"}, "activation_function 'relu' is not supported"),
        ({"encoder_attention_heads": 3}, r"encoder_attention_heads \(3\) must divide d_model"),
        ({"encoder_layers": 2**40}, "'encoder_layers' must be an integer of at most"),
        ({"encoder_layers": 0}, "'encoder_layers' must be an integer"),
        ({"d_model": "1280"}, "'d_model' must be an integer"),
        ({"encoder_ffn_dim": -1}, "'encoder_ffn_dim' must be an integer"),
        ({"num_mel_bins": 128.0}, "'num_mel_bins' must be an integer"),
        ({"max_source_positions": [1500]}, "'max_source_positions' must be an integer"),
        ({"encoder_ffn_dim": 2**31 - 1, "d_model": 20 * 2**25}, "one of them is wrong"),
    ],
)
def test_what_is_not_computed_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=rf"config\.json: .*{message}"):
        read(tmp_path, with_audio(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"audio_token_index": 156032}, r"audio_token_index \(156032\) is no token"),
        ({"audio_token_id": -1}, "'audio_token_id' must be an integer of at least 0"),
        ({"audio_config": [1]}, "'audio_config' must be an object"),
        ({"text_config": {"model_type": "llama"}}, "model_type 'llama' is not supported"),
    ],
)
def test_wrong_fields_beside_it_are_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=rf"config\.json: .*{message}"):
        read(tmp_path, QWEN2_AUDIO | fields)
