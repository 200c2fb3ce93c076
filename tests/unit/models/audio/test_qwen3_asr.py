"""Qwen 3 ASR: its embeddings of sounds, compared with transformers, its fields and its names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.audio_models import audio_inputs, make_audio_model
from support.model_helpers import assert_logits_close, load, our_logits, reference_logits
from torch import Tensor
from transformers import Qwen3ASRConfig

from shmllm.errors import EngineStartError
from shmllm.frontend.items.registry import processors_of_model
from shmllm.models.audio.omni_specs import Qwen3OmniAudioTower
from shmllm.models.audio.specs import AudioSpec
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel

ARCHITECTURE = {"architectures": ["Qwen3ASRForConditionalGeneration"]}
ASR_1_7B: dict[str, Any] = ARCHITECTURE | {
    "model_type": "qwen3_asr",
    "support_languages": ["Chinese", "English"],
    "thinker_config": {
        "audio_config": {
            "activation_function": "gelu",
            "conv_chunksize": 500,
            "d_model": 1024,
            "downsample_hidden_size": 480,
            "encoder_attention_heads": 16,
            "encoder_ffn_dim": 4096,
            "encoder_layers": 24,
            "max_source_positions": 1500,
            "model_type": "qwen3_asr_audio_encoder",
            "n_window": 50,
            "n_window_infer": 800,
            "num_mel_bins": 128,
            "output_dim": 2048,
        },
        "audio_end_token_id": 151670,
        "audio_start_token_id": 151669,
        "audio_token_id": 151676,
        "dtype": "bfloat16",
        "model_type": "qwen3_asr_thinker",
        "text_config": {
            "attention_bias": False,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 65536,
            "model_type": "qwen3_asr_text",
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "interleaved": True,
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
                "type": "default",
            },
            "rope_theta": 1000000,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
    },
}
"""Fields as the files of the model's authors have them."""
TOWER = Qwen3OmniAudioTower(
    hidden_size=1024,
    num_layers=24,
    num_heads=16,
    inner=4096,
    activation="gelu",
    num_mels=128,
    num_positions=1500,
    fills=True,
)
SECONDS = [0.004, 0.31, 0.5, 0.77, 1.0, 1.013, 2.0, 3.2]
TOKENS = [int(token) for token in torch.randint(0, 440, (40,), generator=torch.manual_seed(3))]


def read(directory: Path, whole: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(whole))
    return ModelConfig.from_directory(directory)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen3_asr")


@pytest.fixture(scope="module")
def models(directory: Path) -> tuple[Any, DecoderModel]:
    """transformers' model and ours."""
    return make_audio_model(directory, "qwen3_asr"), load(directory)


@pytest.mark.parametrize("seconds", SECONDS)
@torch.inference_mode()
def test_embeddings_equal_transformers(
    seconds: float, directory: Path, models: tuple[Any, DecoderModel]
) -> None:
    """From samples on. Silence fills sounds of less than half a second."""
    samples = np.random.default_rng(3).standard_normal(int(16_000 * seconds)) * 0.1
    sound = samples.astype(np.float32)
    audio = processors_of_model(directory, json.loads((directory / "config.json").read_text()))
    item = audio["audio"].prepare(audio["audio"].open("a sound", (sound, 16_000)))
    inputs = audio_inputs([sound], "qwen3_asr")
    frames = int(inputs["input_features_mask"].sum())
    assert item.grid == (frames, 1, 1)
    theirs: Tensor = models[0].get_audio_features(**inputs).pooler_output
    ours = models[1].towers["audio"](torch.from_numpy(item.data.copy()), item.grid)
    assert len(ours) == item.num_tokens
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 2e-5


def test_logits_of_text_equal_transformers(models: tuple[Any, DecoderModel]) -> None:
    expected, ours = reference_logits(models[0], TOKENS), our_logits(models[1], TOKENS)
    assert_logits_close(ours, expected, 1e-4)


def test_files_of_the_authors_are_read(tmp_path: Path) -> None:
    config = read(tmp_path, ASR_1_7B)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (2048, 28, 151936)
    assert (config.lm_head, config.tie_word_embeddings, config.dtype) == (True, True, "bfloat16")
    (rope,) = config.ropes
    assert (rope.sections, rope.mixes_axes, rope.theta) == ((), False, 1e6)
    assert config.attentions[0].qk_norm == "head"
    assert config.audio == AudioSpec(token=151676, tower=TOWER)
    assert config.vision is None


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = Qwen3ASRConfig(audio_config={"output_dim": 2048})
    whole = {"audio_config": {"output_dim": 2048}, "text_config": {"model_type": "qwen3"}}
    found = read(tmp_path, ARCHITECTURE | whole)
    own = read(tmp_path, theirs.to_dict() | ARCHITECTURE)
    assert (found.audio, found.layers) == (own.audio, own.layers)
    assert (found.vocab_size, found.tie_word_embeddings) == (own.vocab_size, True)
    assert own.eos_token_ids == theirs.eos_token_id
    assert found.audio is not None
    assert found.audio.token == theirs.audio_token_id


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        (
            "audio_config",
            {"model_type": "whisper"},
            "supported: qwen3_asr_encoder, ",
        ),
        ("audio_config", {"n_window": 60}, "n_window 60 is not supported; supported: 49 to 52"),
        ("text_config", {"model_type": "qwen2"}, "supported: qwen3, qwen3_asr_text"),
        (None, {"model_type": "qwen3_forced_aligner"}, "field 'classify_num' is missing"),
    ],
)
def test_what_is_not_computed_is_refused(
    part: str | None, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    whole = json.loads(json.dumps(ASR_1_7B))
    thinker = whole["thinker_config"]
    (thinker if part is None else thinker[part]).update(fields)
    with pytest.raises(EngineStartError, match=rf"config\.json: .*{message}"):
        read(tmp_path, whole)


def test_names_are_those_of_the_authors_too(tmp_path: Path) -> None:
    make_audio_model(tmp_path, "qwen3_asr")
    before = {n: v[0].clone() for n, v in load(tmp_path).named_weights().items()}
    path = tmp_path / "model.safetensors"
    others = {
        "multi_modal_projector.linear_": "audio_tower.proj",
        "model.audio_tower.": "audio_tower.",
        "model.language_model.": "model.",
        "model.audio_tower.proj": "audio_tower.proj",
    }
    renamed = {}
    for name, tensor in load_file(path).items():
        for part, own in others.items():
            name = name.replace(part, own)
        renamed[f"thinker.{name}"] = tensor
    assert {"thinker.audio_tower.proj1.bias", "thinker.model.norm.weight"} <= renamed.keys()
    save_file(renamed, path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["audio_config"]["model_type"] = "qwen3_asr_audio_encoder"
    fields["text_config"]["model_type"] = "qwen3_asr_text"
    read(tmp_path, ARCHITECTURE | {"thinker_config": fields})
    model = load(tmp_path)
    for name, views in model.named_weights().items():
        theirs = name.replace("audio_tower.proj", "multi_modal_projector.linear_")
        assert torch.equal(views[0], before.pop(theirs))
    assert not before
