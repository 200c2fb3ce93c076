"""LFM2-VL's config.json, which the first files have with fields of the authors' own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Lfm2VlConfig

from shmllm.models.config import ModelConfig
from shmllm.models.vision.siglip2_specs import Lfm2VlTower
from shmllm.models.vision.specs import VisionSpec

LFM2_VL_1_6B: dict[str, Any] = {
    "architectures": ["Lfm2VlForConditionalGeneration"],
    "do_image_splitting": True,
    "downsample_factor": 2,
    "encoder_patch_size": 16,
    "image_token_index": 396,
    "max_image_tokens": 256,
    "max_num_patches": 1024,
    "max_pixels_tolerance": 2.0,
    "max_tiles": 10,
    "min_image_tokens": 64,
    "min_tiles": 2,
    "model_type": "lfm2-vl",
    "projector_bias": True,
    "projector_hidden_act": "gelu",
    "projector_hidden_size": 2560,
    "text_config": {
        "architectures": ["Lfm2ForCausalLM"],
        "block_auto_adjust_ff_dim": True,
        "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "conv_bias": False,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "hidden_size": 2048,
        "max_position_embeddings": 128000,
        "model_type": "lfm2",
        "norm_eps": 1e-05,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "tie_embedding": True,
        "vocab_size": 65536,
    },
    "tile_size": 512,
    "use_thumbnail": True,
    "vision_config": {
        "attention_dropout": 0.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "layer_norm_eps": 1e-06,
        "model_type": "siglip2_vision_model",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 26,
        "num_patches": 256,
        "patch_size": 16,
        "vision_use_head": False,
    },
    "vision_feature_layer": -1,
}


def read(directory: Path, whole: dict[str, Any]) -> tuple[ModelConfig, VisionSpec]:
    (directory / "config.json").write_text(json.dumps(whole))
    config = ModelConfig.from_directory(directory)
    assert config.vision is not None
    return config, config.vision


def test_lfm2_vl(tmp_path: Path) -> None:
    config, vision = read(tmp_path, LFM2_VL_1_6B)
    assert (config.num_layers, len(config.attentions), config.dense_mlps[0].inner) == (16, 6, 8192)
    assert config.tie_word_embeddings
    tower = vision.tower
    assert isinstance(tower, Lfm2VlTower)
    assert (tower.num_layers, tower.num_positions, tower.projector_inner) == (26, 256, 2560)
    assert tower.projector_norm
    assert vision.image_token == 396
    assert vision.num_embeddings((1, 32, 32)) == 256


@pytest.mark.parametrize(
    ("outer", "text", "tied"),
    [
        ({}, {}, True),
        ({"tie_word_embeddings": False}, {}, False),
        ({"tie_embedding": False}, {}, False),
        ({"tie_embedding": True, "tie_word_embeddings": False}, {}, True),
        ({}, {"tie_embedding": False, "tie_word_embeddings": False}, True),
    ],
)
def test_lfm2_vl_ties_embeddings_as_the_whole_model_says(
    outer: dict[str, Any], text: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    whole = LFM2_VL_1_6B | outer
    whole |= {"text_config": LFM2_VL_1_6B["text_config"] | text}
    assert read(tmp_path, whole)[0].tie_word_embeddings == tied
    theirs = Lfm2VlConfig(text_config=text | {"model_type": "lfm2"}, **outer)
    assert theirs.tie_word_embeddings == tied
