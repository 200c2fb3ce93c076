"""Fields that config.json leaves out mean what transformers' configurations write for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.absent_fields import assert_absent_fields_agree

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FEW: dict[str, dict[str, Any]] = {
    "Blip2": {
        "text_config": {"model_type": "opt", "vocab_size": 50_304},
        "vision_config": {"model_type": "blip_2_vision_model"},
        "image_token_index": 50_265,
    },
    "DeepseekVL": {
        "text_config": SIZES | {"model_type": "llama", "vocab_size": 102_400},
        "vision_config": {"model_type": "siglip_vision_model"},
    },
    "VipLlava": {
        "text_config": SIZES | {"model_type": "llama", "vocab_size": 32_064},
        "vision_config": {"model_type": "clip_vision_model"},
    },
    "HunYuanVL": {
        "text_config": SIZES
        | {"vocab_size": 121_000, "head_dim": 16}
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        "vision_config": {"model_type": "hunyuan_vl_vision"},
    },
    "HyperCLOVAXVisionV2": {
        "text_config": SIZES | {"model_type": "hyperclovax", "vocab_size": 128_256},
        "vision_config": {"model_type": "qwen2_5_vl"},
    },
    "Ernie4_5_VLMoe": {
        "text_config": SIZES
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [3, 3, 2]}},
        "vision_config": {"model_type": "ernie4_5_vl_moe_vision"},
    },
    "VideoLlama3": {
        "text_config": SIZES | {"vocab_size": 151_936},
        "vision_config": {"model_type": "video_llama_3_vision"},
    },
    "Granite4Vision": {
        "text_config": SIZES
        | {"model_type": "granite4_vision_text", "vocab_size": 49_160, "num_hidden_layers": 24},
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 336, "patch_size": 14},
        "downsample_rate": "4/8",
        "deepstack_layer_map": [[-1, 0]],
        "vision_feature_select_strategy": "full",
    },
    "Lfm3Vl": {
        "text_config": SIZES | {"model_type": "lfm3", "vocab_size": 128_000},
        "vision_config": {"model_type": "lfm3_vl_vision"},
    },
}


@pytest.mark.parametrize("name", FEW)
def test_absent_fields_agree_with_transformers(name: str, tmp_path: Path) -> None:
    kind = getattr(transformers, f"{name}Config")
    architecture = f"{name}ForConditionalGeneration"
    assert_absent_fields_agree(tmp_path, architecture, FEW[name], kind(**FEW[name]))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("CLIP", "clip"),
        ("ChineseCLIP", "chinese_clip"),
        ("MetaClip2", "metaclip_2"),
        ("Siglip", "siglip"),
        ("Siglip2", "siglip2"),
    ],
)
def test_absent_fields_of_models_of_texts_and_images_agree(
    name: str, kind: str, tmp_path: Path
) -> None:
    few = {f"{each}_config": {"model_type": f"{kind}_{each}_model"} for each in ("text", "vision")}
    written = getattr(transformers, f"{name}Config")(**few)
    assert_absent_fields_agree(tmp_path, f"{name}Model", few, written)
