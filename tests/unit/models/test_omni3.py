"""Qwen 3 Omni: the thinker's part of a published config.json, and of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.audio_models import make_omni
from support.model_helpers import load
from transformers import Qwen3OmniMoeThinkerConfig

from shmllm.errors import EngineStartError
from shmllm.models.audio.omni_specs import Qwen3OmniAudioTower
from shmllm.models.audio.specs import AudioSpec
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.rope_config import VideoTimes
from shmllm.models.specs import MoESpec
from shmllm.models.vision.specs import VideoSpec
from shmllm.models.vision.squares_specs import Qwen3Tower

THINKER = "Qwen3OmniMoeThinkerForConditionalGeneration"
OMNI_30B: dict[str, Any] = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "code2wav_config": {"codebook_size": 2048},
    "dtype": "bfloat16",
    "enable_audio_output": True,
    "im_end_token_id": 151645,
    "im_start_token_id": 151644,
    "model_type": "qwen3_omni_moe",
    "talker_config": {"model_type": "qwen3_omni_moe_talker"},
    "thinker_config": {
        "audio_config": {
            "activation_function": "gelu",
            "conv_chunksize": 500,
            "d_model": 1280,
            "downsample_hidden_size": 480,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "encoder_layers": 32,
            "max_source_positions": 1500,
            "model_type": "qwen3_omni_moe_audio_encoder",
            "n_window": 50,
            "n_window_infer": 800,
            "num_hidden_layers": 32,
            "num_mel_bins": 128,
            "output_dim": 2048,
            "scale_embedding": False,
        },
        "audio_end_token_id": 151670,
        "audio_start_token_id": 151669,
        "audio_token_id": 151675,
        "image_token_id": 151655,
        "model_type": "qwen3_omni_moe_thinker",
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
        "text_config": {
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 768,
            "max_position_embeddings": 65536,
            "mlp_only_layers": [],
            "model_type": "qwen3_omni_moe_text",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "interleaved": True,
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
                "type": "default",
            },
            "rope_theta": 1000000,
            "shared_expert_intermediate_size": 0,
            "sliding_window": None,
            "use_qk_norm": True,
            "use_sliding_window": False,
            "vocab_size": 152064,
        },
        "user_token_id": 872,
        "video_token_id": 151656,
        "vision_config": {
            "apply_vit_abs_pos_embed": True,
            "deepstack_visual_indexes": [8, 16, 24],
            "depth": 27,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "image_size": 768,
            "in_channels": 3,
            "in_chans": 3,
            "intermediate_size": 4304,
            "model_type": "qwen3_omni_moe_vision_encoder",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 2048,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "spatial_patch_size": 16,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
        },
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    },
}
"""Fields as the files of the model's authors have them."""
TOWER = Qwen3OmniAudioTower(
    hidden_size=1280,
    num_layers=32,
    num_heads=20,
    inner=5120,
    activation="gelu",
    num_mels=128,
    num_positions=1500,
    window=50,
    chunks_together=8,
    channels=480,
)


def read(directory: Path, whole: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(whole))
    return ModelConfig.from_directory(directory)


def changed(part: str, **fields: Any) -> dict[str, Any]:
    """OMNI_30B with other fields of a part of its thinker."""
    whole = json.loads(json.dumps(OMNI_30B))
    whole["thinker_config"][part].update(fields)
    return whole


def values_of(model: DecoderModel) -> dict[str, torch.Tensor]:
    return {name: views[0].clone() for name, views in model.named_weights().items()}


def test_files_of_qwen_3_omni_are_read(tmp_path: Path) -> None:
    config = read(tmp_path, OMNI_30B)
    assert config.architecture == THINKER
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (2048, 48, 152064)
    assert (config.lm_head, config.tie_word_embeddings) == (True, False)
    assert config.dtype == "bfloat16"
    (rope,) = config.ropes
    assert (rope.sections, rope.mixes_axes, rope.theta) == ((24, 20, 20), True, 1e6)
    experts = MoESpec(num_experts=128, top_k=8, inner=768, renormalize=True)
    assert set(config.feed_forwards) == {experts}
    assert config.audio == AudioSpec(token=151675, tower=TOWER)
    assert config.vision is not None
    assert (config.vision.image_token, config.num_levels) == (151655, 3)
    assert isinstance(config.vision.tower, Qwen3Tower)
    assert config.vision.tower.is_omni
    assert config.vision.video == VideoSpec(
        token=151656,
        processors=("Qwen2VLVideoProcessor",),
        in_one_piece=True,
        times=VideoTimes(13, is_aligned=True),
    )


@pytest.mark.parametrize(("frames", "count"), [(1, 1), (99, 13), (100, 13), (108, 14), (3000, 390)])
def test_a_second_of_a_sound_has_thirteen_embeddings(frames: int, count: int) -> None:
    assert TOWER.num_embeddings(frames) == count


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 3584, "vocab_size": 152064}
    theirs = Qwen3OmniMoeThinkerConfig(text_config=sizes)
    whole = {"architectures": [THINKER], "text_config": sizes}
    whole |= {"vision_config": {"a": 1}, "audio_config": {"a": 1}}
    found = read(tmp_path, whole)
    assert found == read(tmp_path, theirs.to_dict() | {"architectures": [THINKER]})
    assert found.num_layers == theirs.text_config.num_hidden_layers
    assert found.audio == AudioSpec(token=theirs.audio_token_id, tower=TOWER)
    assert found.video_times.per_second == theirs.position_id_per_seconds


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("audio_config", {"model_type": "whisper"}, "'whisper' is not supported; supported: qwen3"),
        ("audio_config", {"output_dim": 64}, r"output_dim \(64\) differs from .* \(2048\)"),
        ("audio_config", {"n_window": 100}, "n_window 100 is not supported; supported: 49 to 52"),
        ("audio_config", {"n_window_infer": 99}, "'n_window_infer' must be an integer of at least"),
        ("audio_config", {"downsample_hidden_size": 0}, "'downsample_hidden_size' must be an int"),
        ("vision_config", {"model_type": "qwen3_vl"}, "supported: qwen3_omni_moe_vision_encoder"),
        ("text_config", {"use_sliding_window": True}, "use_sliding_window true is not supported"),
        ("text_config", {"model_type": "qwen3"}, "'qwen3' is not supported in Qwen3OmniMoeThinker"),
    ],
)
def test_what_is_not_computed_is_refused(
    part: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=rf"config\.json: .*{message}"):
        read(tmp_path, changed(part, **fields))


@pytest.mark.parametrize("newer", [False, True])
def test_the_other_parts_of_a_checkpoint_are_left_out(newer: bool, tmp_path: Path) -> None:
    """Names are those of published files, or of transformers' modules."""
    reference = make_omni(tmp_path, name="qwen3_omni_moe")
    before = values_of(load(tmp_path))
    path = tmp_path / "model.safetensors"
    tensors = reference.state_dict() if newer else load_file(path)
    others = {"talker.model.norm.weight", "code2wav.decoder.0.bias"}
    save_file(
        {f"thinker.{name}": tensor for name, tensor in tensors.items()}
        | {name: torch.ones(3) for name in others},
        path,
    )
    thinker = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": OMNI_30B["architectures"], "thinker_config": thinker}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    found = values_of(load(tmp_path))
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], before[name]) for name in before)
