"""What config.json says of towers: what is read, and what is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.vision_families import FAMILIES
from support.vision_models import ANY_SIZE, EACH_FAMILY, JOINED, TWO_SIZES, make_vision_model

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.rope_config import VideoTimes
from shmllm.models.vision.encoder_spec import EncoderSpec
from shmllm.models.vision.llava_specs import LlavaTower
from shmllm.models.vision.projected_specs import Gemma3Tower, Idefics3Tower
from shmllm.models.vision.specs import VideoSpec, VisionSpec
from shmllm.models.vision.squares_specs import (
    Gemma4Tower,
    PixtralTower,
    Qwen2_5Tower,
    Qwen2Tower,
    Qwen3Tower,
)

IMAGE_TOKENS = dict.fromkeys(("smolvlm", "idefics3", "llama4", "aya_vision"), 443)
LLAVA_1_5: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 32000,
    "model_type": "llava",
    "projector_hidden_act": "gelu",
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "vocab_size": 32064,
    },
    "torch_dtype": "float16",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
QWEN_2_VL: dict[str, Any] = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "image_token_id": 151655,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2_vl",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 1536,
        "in_chans": 3,
        "mlp_ratio": 4,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
    "vocab_size": 151936,
}
QWEN_2_5_VL: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "image_token_id": 151655,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "hidden_size": 1280,
        "in_chans": 3,
        "intermediate_size": 3420,
        "model_type": "qwen2_5_vl",
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
    },
    "vocab_size": 151936,
}
MISTRAL_SMALL_3_1: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "vision_config": {
        "head_dim": 64,
        "hidden_act": "gelu",
        "hidden_size": 1024,
        "image_size": 1540,
        "intermediate_size": 4096,
        "model_type": "pixtral",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "rope_theta": 10000.0,
    },
    "vision_feature_layer": -1,
}
"""Fields as the files of the models' authors have them: those that differ from a default."""

VISION, OUTER, TEXT = "vision_config", "", "text_config"
QFORMER = "qformer_config"
SAM, READER = f"{VISION}.sam_config", f"{VISION}.encoder_config"
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "llava",
        VISION,
        {"model_type": "aimv2"},
        "vision_config: model_type 'aimv2' is not supported",
    ),
    ("llava", VISION, {"hidden_act": "relu"}, "vision_config: hidden_act 'relu' is not supported"),
    ("llava", VISION, {"num_channels": 1}, "num_channels 1 is not supported; supported: 3"),
    ("llava", VISION, {"image_size": [64, 64]}, "'image_size' must be an integer"),
    ("llava", VISION, {"patch_size": 65}, r"patch_size \(65\) exceeds image_size \(64\)"),
    (
        "llava",
        VISION,
        {"num_attention_heads": 3},
        r"num_attention_heads \(3\) must divide hidden_size",
    ),
    ("llava", OUTER, {"vision_feature_layer": [-2, -1]}, r"vision_feature_layer \[-2, -1\] is not"),
    (
        "llava",
        OUTER,
        {"vision_feature_layer": -4},
        "vision_feature_layer -4 is none of the 3 layers",
    ),
    ("llava", OUTER, {"vision_feature_layer": 4}, "vision_feature_layer 4 is none of the 3 layers"),
    ("llava", OUTER, {"vision_feature_select_strategy": "cls"}, "select_strategy 'cls' is not"),
    (
        "llava",
        OUTER,
        {"projector_hidden_act": "tanh"},
        "projector_hidden_act 'tanh' is not supported",
    ),
    ("llava", OUTER, {"image_token_index": 512}, r"image_token_index \(512\) is no token"),
    ("llava", TEXT, {"model_type": "phi3"}, "model_type 'phi3' is not supported.*: llama, mistral"),
    ("llava_next", OUTER, {"image_grid_pinpoints": [[64, 100]]}, r"multiples of image_size \(64\)"),
    ("llava_next", OUTER, {"image_grid_pinpoints": []}, "'image_grid_pinpoints' must list heights"),
    ("llava_next", OUTER, {"image_grid_pinpoints": 3}, "'image_grid_pinpoints' must list heights"),
    (
        "llava_next",
        OUTER,
        {"vision_feature_select_strategy": "full"},
        "vision_feature_select_strategy 'full' is not supported with a clip tower",
    ),
    (
        "llava_next",
        OUTER,
        {"vision_feature_layer": [-2, -1]},
        r"vision_feature_layer \[-2, -1\] is",
    ),
    ("llava_next", OUTER, {"use_image_newline_parameter": False}, "newline_parameter false is not"),
    ("llava_next", VISION, {"model_type": "pixtral"}, "model_type 'pixtral' is not supported"),
    ("llava_next", TEXT, {"model_type": "phi3"}, "model_type 'phi3' is not supported.*: llama, mi"),
    ("llava_onevision", OUTER, {"vision_aspect_ratio": "pad"}, "vision_aspect_ratio 'pad' is not"),
    ("llava_onevision", OUTER, {"vision_aspect_ratio": "anyres_max_0"}, "supported: anyres_max_N"),
    ("llava_onevision", OUTER, {"image_grid_pinpoints": [[64]]}, r"multiples of image_size \(64\)"),
    (
        "llava_onevision",
        OUTER,
        {"vision_feature_select_strategy": "default"},
        "vision_feature_select_strategy 'default' is not supported with a siglip tower",
    ),
    ("aya_vision", VISION, {"model_type": "clip_vision_model"}, "supported: siglip_vision_model"),
    ("aya_vision", OUTER, {"vision_feature_select_strategy": "default"}, "supported: full"),
    ("aya_vision", OUTER, {"vision_feature_layer": [-1, -2]}, "only one layer is"),
    ("aya_vision", OUTER, {"vision_feature_layer": 3}, "is none of the 2 layers"),
    ("aya_vision", OUTER, {"downsample_factor": 3}, r"downsample_factor \(3\) must divide the 4"),
    ("aya_vision", OUTER, {"alignment_intermediate_size": 7}, r"size \(7\) must be even"),
    ("aya_vision", OUTER, {"image_token_index": 512}, "is no token of a vocabulary of 512"),
    ("aya_vision", TEXT, {"model_type": "llama"}, "model_type 'llama' is not supported in AyaVis"),
    ("cohere2_vision", VISION, {"patch_size": 80}, r"patch_size \(80\) exceeds image_size"),
    ("cohere2_vision", OUTER, {"downsample_factor": 3}, r"must divide the 4 patches"),
    ("cohere2_vision", OUTER, {"image_token_id": 512}, "is no token of a vocabulary of 512"),
    ("cohere2_vision", TEXT, {"model_type": "cohere"}, "model_type 'cohere' is not supported in"),
    ("exaone4_5", VISION, {"model_type": "qwen2_5_vl"}, "supported: exaone4_5_vision"),
    ("exaone4_5", VISION, {"num_key_value_heads": 3}, r"heads \(3\) must divide num_heads \(4\)"),
    ("exaone4_5", VISION, {"out_hidden_size": 32}, r"out_hidden_size \(32\) differs from the lang"),
    ("exaone4_5", OUTER, {"image_token_id": 512}, "is no token of a vocabulary of 512"),
    ("exaone4_5", TEXT, {"model_type": "exaone_moe"}, "model_type 'exaone_moe' is not supported"),
    ("blip_2", VISION, {"model_type": "siglip_vision_model"}, "supported: blip_2_vision_model"),
    ("blip_2", VISION, {"qkv_bias": False}, "qkv_bias false is not supported; supported: true"),
    ("blip_2", VISION, {"image_size": [64, 64]}, "'image_size' must be an integer"),
    ("blip_2", VISION, {"patch_size": 65}, "'patch_size' must be an integer of at most 64"),
    ("blip_2", VISION, {"num_attention_heads": 3}, r"num_attention_heads \(3\) must divide"),
    ("blip_2", VISION, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("blip_2", OUTER, {"image_token_index": None}, "image_token_index is missing"),
    ("blip_2", OUTER, {"image_token_index": 512}, "is no token of a vocabulary of 512"),
    ("blip_2", OUTER, {"num_query_tokens": 0}, "'num_query_tokens' must be an integer of at least"),
    ("blip_2", TEXT, {"model_type": "t5"}, "model_type 't5' is not supported"),
    ("blip_2", QFORMER, {"use_qformer_text_input": True}, "use_qformer_text_input true is not"),
    ("blip_2", QFORMER, {"model_type": "bert"}, "supported: blip_2_qformer"),
    ("hunyuan_vl", VISION, {"model_type": "siglip"}, "supported: hunyuan_vl_vision, hunyuan_vl"),
    (
        "hunyuan_vl",
        VISION,
        {"interpolate_mode": "area"},
        "interpolate_mode 'area' is not supported",
    ),
    ("hunyuan_vl", VISION, {"temporal_patch_size": 2}, "temporal_patch_size 2 is not supported"),
    ("hunyuan_vl", VISION, {"num_attention_heads": 3}, r"num_attention_heads \(3\) must divide"),
    ("hunyuan_vl", VISION, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("hunyuan_vl", VISION, {"max_image_size": 8}, "'max_image_size' must be an integer of at leas"),
    ("hunyuan_vl", OUTER, {"image_token_id": 512}, "is no token of a vocabulary of 512"),
    ("hunyuan_vl", TEXT, {"rope_parameters": {"mrope_section": [8]}}, "3 or 4 positive integers"),
    ("hunyuan_vl", TEXT, {"rope_parameters": {"mrope_section": 8}}, "must list positive integers"),
    ("hunyuan_vl", TEXT, {"rope_parameters": {"mrope_section": ["a"]}}, "must list positive int"),
    ("hunyuan_vl", TEXT, {"rope_parameters": {}}, r"that add up to 8, not \[\]"),
    (
        "hunyuan_vl",
        TEXT,
        {"rope_parameters": {"mrope_section": [2] * 4, "xdrope_section": [4, 4]}},
        "mrope_section and xdrope_section differ",
    ),
    ("hunyuan_vl", TEXT, {"use_cla": True}, "use_cla true is not supported"),
    ("dots_ocr", VISION, {"model_type": "qwen2_vl"}, "supported: dots_vit"),
    ("dots_ocr", VISION, {"temporal_patch_size": 2}, "temporal_patch_size 2 is not supported"),
    ("dots_ocr", VISION, {"hidden_size": 32}, "hidden_size 32 is not supported; supported: 64"),
    ("dots_ocr", VISION, {"is_causal": True}, "is_causal true is not supported"),
    ("dots_ocr", VISION, {"num_attention_heads": 3}, r"heads \(3\) must divide embed_dim \(32\)"),
    ("dots_ocr", VISION, {"num_attention_heads": 16}, "heads of 2 elements cannot be rotated"),
    ("dots_ocr", OUTER, {"attention_bias": False}, "attention_bias false is not supported"),
    ("dots_ocr", OUTER, {"image_token_id": 512}, "is no token of a vocabulary of 512"),
    ("ernie4_5_vl_moe", VISION, {"model_type": "qwen2_vl"}, "supported: ernie4_5_vl_moe_vision"),
    ("ernie4_5_vl_moe", VISION, {"temporal_merge_size": 3}, "temporal_merge_size 3 is not"),
    ("ernie4_5_vl_moe", TEXT, {"use_bias": True}, "'use_bias' is not supported"),
    ("ernie4_5_vl_moe", TEXT, {"moe_norm_min": 1e-6}, "moe_norm_min 1e-06 is not supported"),
    ("ernie4_5_vl_moe", TEXT, {"moe_intermediate_size": 32}, "must list the widths of the experts"),
    ("ernie4_5_vl_moe", TEXT, {"moe_intermediate_size": [32, "a"]}, "must be an integer"),
    ("ernie4_5_vl_moe", TEXT, {"mlp_layer_types": ["dense"]}, "one type for each of 3 layers"),
    (
        "ernie4_5_vl_moe",
        TEXT,
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        "as many pairs of rows as of columns",
    ),
    ("ernie4_5_vl_moe", OUTER, {"image_token_id": 512}, "is no token of a vocabulary of 512"),
    ("ernie4_5_vl_moe", OUTER, {"video_end_token_id": "x"}, "must be an integer"),
    ("video_llama_3", VISION, {"model_type": "siglip"}, "supported: video_llama_3_vision"),
    ("video_llama_3", VISION, {"num_attention_heads": 16}, "heads of 2 elements cannot be rotated"),
    ("video_llama_3", VISION, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    (
        "video_llama_3",
        VISION,
        {"rope_parameters": {"rope_type": "yarn"}},
        "rope type 'yarn' is not",
    ),
    ("video_llama_3", OUTER, {"image_token_id": 512}, "is no token of a vocabulary of 512"),
    ("video_llama_3", TEXT, {"model_type": "llama"}, "model_type 'llama' is not supported"),
    ("minimax_m3", VISION, {"model_type": "qwen2_vl"}, "supported: minimax_m3_vl_vision"),
    ("minimax_m3", VISION, {"num_attention_heads": 8}, "heads of 4 elements cannot be rotated"),
    ("minimax_m3", VISION, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("minimax_m3", VISION, {"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' is not"),
    ("minimax_m3", OUTER, {"image_token_index": 512}, "is no token of a vocabulary of 512"),
    ("minimax_m3", TEXT, {"model_type": "llama"}, "model_type 'llama' is not supported"),
    ("hyperclovax_vision_v2", VISION, {"model_type": "qwen2_vl"}, "supported: qwen2_5_vl_vision"),
    ("hyperclovax_vision_v2", OUTER, {"image_token_id": 512}, "is no token of a vocabulary of 512"),
    ("hyperclovax_vision_v2", TEXT, {"model_type": "llama"}, "model_type 'llama' is not supported"),
    ("vipllava", VISION, {"model_type": "siglip_vision_model"}, "supported: clip_vision_model"),
    ("vipllava", OUTER, {"vision_feature_layer": [-2, 4]}, "layer 4 is none of the 3 layers"),
    ("vipllava", OUTER, {"vision_feature_layer": [0]}, "layer 0 is none of the 3 layers"),
    ("vipllava", OUTER, {"vision_feature_layer": []}, "must list layers"),
    ("vipllava", OUTER, {"vision_feature_layer": ["x"]}, "vision_feature_layer 'x' is not"),
    ("vipllava", OUTER, {"projector_hidden_act": "x"}, "projector_hidden_act 'x' is not supported"),
    ("vipllava", OUTER, {"image_token_index": 512}, "is no token of a vocabulary of 512"),
    ("deepseek_vl", VISION, {"model_type": "janus_vision_model"}, "supported: siglip_vision_model"),
    ("deepseek_vl", VISION, {"hidden_act": "x"}, "hidden_act 'x' is not supported"),
    ("deepseek_vl", OUTER, {"image_token_id": 512}, "is no token of a vocabulary of 512"),
    ("deepseek_vl", TEXT, {"model_type": "qwen2"}, "model_type 'qwen2' is not supported"),
    ("janus", VISION, {"model_type": "siglip_vision_model"}, "supported: janus_vision_model"),
    ("janus", VISION, {"use_qk_norm": True}, "use_qk_norm True is not supported"),
    ("janus", VISION, {"attention_bias": False}, "attention_bias False is not supported"),
    ("janus", VISION, {"projection_dim": 32}, r"projection_dim \(32\) differs from the language"),
    ("janus", VISION, {"mlp_ratio": 0.001}, "mlp_ratio leaves no MLP"),
    ("janus", OUTER, {"image_token_id": 512}, r"image_token_id \(512\) is no token"),
    ("kimi_k25", VISION, {"model_type": "siglip_vision_model"}, "supported: kimi_k25_vision"),
    ("kimi_k25", VISION, {"num_attention_heads": 3}, r"num_attention_heads \(3\) must divide"),
    ("kimi_k25", VISION, {"num_attention_heads": 16}, "heads of 2 elements cannot be rotated"),
    ("kimi_k25", VISION, {"pos_emb_width": 5}, r"pos_emb_width \(5\) differs from pos_emb_height"),
    ("kimi_k25", VISION, {"merge_kernel_size": [2, 1]}, r"merge_kernel_size \[2, 1\] is not"),
    ("kimi_k25", VISION, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("kimi_k25", VISION, {"mm_projector_type": "mlp"}, "'mlp' is not supported; supported: patchm"),
    ("kimi_k25", OUTER, {"projection_hidden_size": 64}, r"size \(64\) differs from hidden_size"),
    ("kimi_k25", OUTER, {"image_token_id": 512}, "is no token of a vocabulary of 512"),
    ("kimi_k25", TEXT, {"model_type": "deepseek_v2"}, "model_type 'deepseek_v2' is not supported"),
    ("minicpmv4_6", VISION, {"model_type": "siglip_vision_model"}, "supported: minicpmv4_6_visio"),
    ("minicpmv4_6", VISION, {"window_kernel_size": [4, 4]}, r"window_kernel_size \[4, 4\] is not"),
    ("minicpmv4_6", OUTER, {"merge_kernel_size": [4, 4]}, r"merge_kernel_size \[4, 4\] is not"),
    ("minicpmv4_6", OUTER, {"merger_times": 2}, "merger_times 2 is not supported; supported: 1"),
    ("minicpmv4_6", OUTER, {"downsample_mode": "2x"}, "downsample_mode '2x' is not supported"),
    ("minicpm_ocr", VISION, {"model_type": "minicpmv4_6_vision"}, "supported: minicpm_ocr_vision"),
    ("minicpm_ocr", OUTER, {"downsample_mode": 4}, "'downsample_mode' must be a string"),
    ("minicpm_ocr", OUTER, {"merger_times": 2}, "merger_times 2 is not supported; supported: 1"),
    ("minicpm_ocr", OUTER, {"image_token_id": None}, "image_token_id is missing"),
    ("minicpm_ocr", TEXT, {"model_type": "qwen3"}, "model_type 'qwen3' is not supported"),
    ("minicpmv4_6", OUTER, {"insert_layer_id": 3}, r"insert_layer_id \(3\) is none of the 3"),
    ("minicpmv4_6", OUTER, {"image_token_id": None}, "image_token_id is missing"),
    ("minicpmv4_6", OUTER, {"image_token_id": 512}, "is no token of a vocabulary of 512"),
    ("minicpmv4_7", VISION, {"model_type": "minicpmv4_6_vision"}, "supported: minicpmv4_7_visio"),
    ("minicpmv4_7", OUTER, {"newline_id": None}, "newline_id is missing: images need the token"),
    ("minicpmv4_7", OUTER, {"slice_end_id": 512}, r"slice_end_id \(512\) is no token of a vocab"),
    ("minicpmv4_7", OUTER, {"drop_vision_last_layer": True}, "drop_vision_last_layer True is not"),
    ("minicpmv4_6", TEXT, {"model_type": "qwen3"}, "model_type 'qwen3' is not supported"),
    ("lfm2_vl", VISION, {"model_type": "siglip_vision_model"}, "supported: siglip2_vision_model"),
    ("lfm2_vl", VISION, {"num_patches": 35}, r"num_patches \(35\) must be a square number"),
    ("lfm2_vl", VISION, {"patch_size": [16, 8]}, r"patch_size \[16, 8\] is not supported, only a"),
    ("lfm2_vl", VISION, {"num_attention_heads": 3}, r"num_attention_heads \(3\) must divide"),
    ("lfm2_vl", VISION, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("lfm2_vl", VISION, {"num_channels": 1}, "num_channels 1 is not supported"),
    ("lfm2_vl", OUTER, {"projector_hidden_act": "relu"}, "projector_hidden_act 'relu' is not"),
    ("lfm2_vl", OUTER, {"vision_feature_layer": -2}, "vision_feature_layer -2 is not supported"),
    ("lfm2_vl", OUTER, {"image_token_id": 512}, "is no token of a vocabulary of 512"),
    ("lfm3_vl", VISION, {"model_type": "qwen3_vl_vision"}, "supported: lfm3_vl_vision"),
    ("lfm3_vl", VISION, {"conv_kernel_size": 4}, "conv_kernel_size 4 is not supported"),
    ("lfm3_vl", VISION, {"num_key_value_heads": 3}, r"num_key_value_heads \(3\) must divide"),
    ("lfm3_vl", VISION, {"num_attention_heads": 16}, "heads of 2 elements cannot be rotated"),
    ("lfm3_vl", VISION, {"layer_types": ["conv"]}, "must list one type for each of 3 layers"),
    ("lfm3_vl", VISION, {"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' is not"),
    ("lfm3_vl", OUTER, {"projector_hidden_act": "relu"}, "projector_hidden_act 'relu' is not"),
    ("lfm3_vl", OUTER, {"image_token_id": 512}, "is no token of a vocabulary of 512"),
    ("lfm3_vl", TEXT, {"model_type": "lfm2"}, "model_type 'lfm2' is not supported"),
    ("lfm2_vl", TEXT, {"model_type": "lfm2_moe"}, "model_type 'lfm2_moe' is not supported"),
    ("llama4", VISION, {"model_type": "siglip_vision_model"}, "supported: llama4_vision_model"),
    ("llama4", VISION, {"hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
    ("llama4", VISION, {"multi_modal_projector_bias": True}, "projector_bias True is not"),
    ("llama4", VISION, {"norm_eps": 1e-6}, "norm_eps 1e-06 is not supported; supported: 1e-05"),
    ("llama4", VISION, {"vision_feature_layer": -2}, "vision_feature_layer -2 is not supported"),
    ("llama4", VISION, {"vision_output_dim": 40}, "vision_output_dim 40 does not fit .*, 48 does"),
    ("llama4", VISION, {"intermediate_size": 64}, "intermediate_size 64 does not .*, 128 does"),
    ("llama4", VISION, {"pixel_shuffle_ratio": 0.3}, "pixel_shuffle_ratio 0.3 is not supported"),
    ("llama4", VISION, {"num_attention_heads": 16}, "heads of 2 elements cannot be rotated by two"),
    ("llama4", VISION, {"patch_size": 80}, r"patch_size \(80\) exceeds image_size \(64\)"),
    ("llama4", OUTER, {"image_token_index": 512}, "is no token of a vocabulary of 512"),
    ("got_ocr2", VISION, {"model_type": "sam"}, "supported: got_ocr2_vision"),
    ("got_ocr2", VISION, {"global_attn_indexes": [1.5]}, "'global_attn_indexes' must be a list"),
    ("got_ocr2", VISION, {"num_attention_heads": 3}, r"\(3\) must divide hidden_size \(32\)"),
    ("got_ocr2", VISION, {"image_size": 3}, "'image_size' must be an integer of at least 4"),
    ("got_ocr2", VISION, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("got_ocr2", OUTER, {"image_token_index": 512}, r"image_token_index \(512\) is no token"),
    ("got_ocr2", TEXT, {"model_type": "llama"}, "model_type 'llama' is not supported"),
    ("internvl", VISION, {"model_type": "siglip_vision_model"}, "supported: internvl_vision"),
    ("internvl", VISION, {"image_size": [64, 48]}, r"image_size \[64, 48\] is not supported, only"),
    ("internvl", VISION, {"image_size": [8, 8]}, r"patch_size \(16\) exceeds image_size \(8\)"),
    ("internvl", VISION, {"norm_type": "batch_norm"}, "norm_type 'batch_norm' is not supported"),
    ("internvl", VISION, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("internvl", VISION, {"num_attention_heads": 3}, r"\(3\) must divide hidden_size \(32\)"),
    (
        "internvl",
        VISION,
        {"use_absolute_position_embeddings": False},
        "use_absolute_position_embeddings false is not supported",
    ),
    ("internvl", OUTER, {"downsample_ratio": 0.3}, "downsample_ratio 0.3 is not supported"),
    ("internvl", OUTER, {"downsample_ratio": 0.125}, "where n divides the 4 patches of a row"),
    ("internvl", OUTER, {"vision_feature_select_strategy": "full"}, "'full' is not supported"),
    ("internvl", OUTER, {"vision_feature_layer": [-1]}, r"vision_feature_layer \[-1\] is not"),
    ("internvl", OUTER, {"projector_hidden_act": "tanh"}, "projector_hidden_act 'tanh' is not"),
    ("qianfan_ocr", VISION, {"model_type": "internvl_vision"}, "supported: qianfan_ocr_vision"),
    ("qianfan_ocr", VISION, {"use_qk_norm": True}, "use_qk_norm true is not supported"),
    ("qianfan_ocr", VISION, {"norm_type": "batch_norm"}, "norm_type 'batch_norm' is not supported"),
    ("qianfan_ocr", OUTER, {"downsample_ratio": 0.3}, "downsample_ratio 0.3 is not supported"),
    ("qianfan_ocr", OUTER, {"image_token_id": 512}, r"image_token_id \(512\) is no token"),
    ("qianfan_ocr", TEXT, {"model_type": "qwen2"}, "model_type 'qwen2' is not supported"),
    ("deepseek_ocr2", VISION, {"model_type": "sam"}, "supported: deepseek_ocr2_vision"),
    ("deepseek_ocr2", SAM, {"model_type": "sam"}, "supported: deepseek_ocr2_sam_vision_model"),
    ("deepseek_ocr2", SAM, {"image_size": 64}, "image_size 64 is not supported; supported: 128"),
    ("deepseek_ocr2", SAM, {"downsample_channels": [8]}, "'downsample_channels' must be two"),
    ("deepseek_ocr2", SAM, {"downsample_channels": [8, 8]}, "the second one 32, the hidden_size"),
    ("deepseek_ocr2", SAM, {"downsample_channels": ["a", 32]}, "must be an integer of at least 1"),
    ("deepseek_ocr2", READER, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ("deepseek_ocr2", READER, {"use_sliding_window": True}, "use_sliding_window True is not"),
    ("deepseek_ocr2", READER, {"layer_types": ["sliding_attention"] * 2}, "'sliding_attention'"),
    ("deepseek_ocr2", READER, {"layer_types": 3}, "'layer_types' must list one type for each of 2"),
    ("deepseek_ocr2", READER, {"num_key_value_heads": 3}, r"\(3\) must divide num_attention_heads"),
    ("deepseek_ocr2", READER, {"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' is"),
    ("deepseek_ocr2", READER, {"head_dim": 16}, "head_dim must be hidden_size / num_attention_he"),
    ("deepseek_ocr2", OUTER, {"image_token_id": 512}, r"image_token_id \(512\) is no token"),
    ("deepseek_ocr2", TEXT, {"model_type": "deepseek_v2"}, "supported: deepseek_ocr2_text"),
    ("deepseek_ocr2", TEXT, {"mlp_layer_types": None}, "'first_k_dense_replace' is missing"),
    ("deepseek_ocr2", TEXT, {"mlp_layer_types": ["dense"]}, "must list one type for each of 3"),
    ("deepseek_ocr2", TEXT, {"norm_topk_prob": True}, "norm_topk_prob true is not supported"),
    ("deepseek_ocr2", TEXT, {"num_experts_per_tok": None}, "'num_experts_per_tok' is missing"),
    ("ovis2", VISION, {"model_type": "aimv2"}, "supported: ovis2_vision"),
    ("ovis2", VISION, {"tokenize_function": "st_argmax"}, "'st_argmax' is not supported; supp"),
    ("ovis2", VISION, {"num_visual_indicator_tokens": 4}, "num_visual_indicator_tokens 4 is not"),
    ("ovis2", VISION, {"hidden_stride": 3}, r"\(3\) must divide the 4 patches of a row"),
    ("ovis2", VISION, {"vocab_size": 5}, "'vocab_size' must be an integer of at least 6"),
    ("ovis2", VISION, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("ovis2", VISION, {"image_size": 8}, "'image_size' must be an integer of at least 16"),
    ("ovis2", OUTER, {"visual_indicator_token_ids": [1, 2, 3, 4]}, "must be 5 tokens of a voc"),
    ("ovis2", OUTER, {"visual_indicator_token_ids": [1, 2, 3, 4, 512]}, "of a vocabulary of 512"),
    ("ovis2", OUTER, {"vocab_size": 300}, r"vocab_size \(300\) differs from that of text_config"),
    ("ovis2", OUTER, {"hidden_size": 32}, r"hidden_size \(32\) differs from that of text_config"),
    ("ovis2", OUTER, {"image_token_id": 512}, r"image_token_id \(512\) is no token"),
    ("ovis2", TEXT, {"model_type": "llama"}, "model_type 'llama' is not supported"),
    ("granite4_vision", VISION, {"model_type": "siglip2"}, "supported: clip_vision_model, siglip_"),
    ("granite4_vision", OUTER, {"downsample_rate": None}, "downsample_rate '' is not supported"),
    ("granite4_vision", OUTER, {"downsample_rate": "1/4"}, "downsample_rate '1/4' is not"),
    ("granite4_vision", OUTER, {"downsample_rate": "3/6"}, "which divides the 4 patches of a row"),
    ("granite4_vision", OUTER, {"deepstack_layer_map": None}, "must list pairs of layers, not"),
    ("granite4_vision", OUTER, {"deepstack_layer_map": [[1, "x"]]}, "must list pairs of layers"),
    ("granite4_vision", OUTER, {"deepstack_layer_map": [[5, 1]]}, "layer 5 is none of the 3"),
    ("granite4_vision", OUTER, {"deepstack_layer_map": [[1, 5]]}, r"different layers below 7, not"),
    ("granite4_vision", OUTER, {"spatial_target_layers": [1, 2, 3, 7]}, "different layers below 7"),
    ("granite4_vision", OUTER, {"spatial_target_layers": [1, 2]}, "must list 4 layers"),
    ("granite4_vision", OUTER, {"spatial_vision_layer": 0}, "layer 0 is none of the 3 layers"),
    ("granite4_vision", OUTER, {"qformer_config": {"model_type": "x"}}, "supported: blip_2_qfor"),
    (
        "granite4_vision",
        OUTER,
        {"qformer_config": {"use_qformer_text_input": True}},
        "use_qformer_text_input true is not supported",
    ),
    ("granite4_vision", VISION, {"hidden_size": 32}, r"\(32\) must be a multiple of 64"),
    ("granite4_vision", TEXT, {"model_type": "llama"}, "model_type 'llama' is not supported"),
    ("granite_docling", VISION, {"model_type": "siglip"}, "supported: granite_docling_vision"),
    ("granite_docling", VISION, {"out_hidden_size": 32}, r"out_hidden_size \(32\) differs from 64"),
    ("granite_docling", VISION, {"scale_factor": 3}, r"\(3\) must divide the 4 patches of a row"),
    ("granite_docling", VISION, {"image_size": [64, 64]}, "'image_size' must be an integer"),
    ("granite_docling", VISION, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("granite_docling", VISION, {"deepstack_visual_indexes": [3]}, "must list layers below 3"),
    ("granite_docling", OUTER, {"image_token_id": 512}, r"image_token_id \(512\) is no token"),
    ("granite_docling", TEXT, {"hidden_act": "xielu"}, "'xielu' is not"),
    ("granite_docling", TEXT, {"model_type": "granite"}, "supported: granite_docling_text"),
    ("granite_docling", TEXT, {"num_hidden_layers": 1}, "lists 2 layers, and the language"),
    ("internvl", TEXT, {"model_type": "gpt_oss"}, "'gpt_oss' is not supported.*: qwen2, llama, qw"),
    (
        "smolvlm",
        OUTER,
        {"scale_factor": 3},
        r"scale_factor \(3\) must divide the 4 patches of a row",
    ),
    ("smolvlm", VISION, {"model_type": "siglip2"}, "vision_config: model_type 'siglip2' is not"),
    ("smolvlm", TEXT, {"model_type": "qwen2"}, "model_type 'qwen2' is not supported"),
    (
        "gemma3",
        VISION,
        {"model_type": "gemma4_vision"},
        "model_type 'gemma4_vision' is not supported",
    ),
    ("gemma3", OUTER, {"mm_tokens_per_image": 15}, r"mm_tokens_per_image \(15\) is not possible"),
    ("gemma3", OUTER, {"mm_tokens_per_image": 81}, r"mm_tokens_per_image \(81\) is not possible"),
    ("gemma4", VISION, {"model_type": "gemma3n_vision"}, "supported: gemma4_vision"),
    ("gemma4", VISION, {"attention_bias": True}, "attention_bias True is not supported"),
    ("gemma4", VISION, {"num_key_value_heads": 3}, r"\(3\) must divide num_attention_heads \(2\)"),
    ("gemma4", VISION, {"head_dim": 6}, "heads of 6 elements cannot be rotated by two axes"),
    ("gemma4", VISION, {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
    ("gemma4", VISION, {"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' is not"),
    ("gemma4", TEXT, {"use_bidirectional_attention": "all"}, "attention 'all' is not supported"),
    ("gemma4", OUTER, {"image_token_id": 512}, r"image_token_id \(512\) is no token"),
    ("gemma4_unified", VISION, {"model_type": "gemma4_vision"}, "supported: gemma4_unified_vision"),
    ("gemma4_unified", VISION, {"output_proj_dims": 9}, r"output_proj_dims \(9\) differs from mm_"),
    ("gemma4_unified", VISION, {"mm_posemb_size": 0}, "'mm_posemb_size' must be an integer"),
    ("gemma4_unified", OUTER, {"audio_config": {"model_type": "x"}}, "supported: gemma4_unified_a"),
    ("gemma4_unified", OUTER, {"video_token_id": 512}, r"video_token_id \(512\) is no token"),
    ("gemma4_unified", TEXT, {"use_bidirectional_attention": "all"}, "'all' is not supported"),
    ("glm4v", VISION, {"model_type": "qwen2_vl"}, "supported: glm4v_vision, glm4v"),
    ("glm4v", VISION, {"in_channels": 1}, "in_channels 1 is not supported; supported: 3"),
    ("glm4v", VISION, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("glm4v", VISION, {"out_hidden_size": 32}, r"out_hidden_size \(32\) differs from"),
    ("glm4v", VISION, {"image_size": 13}, "'image_size' must be an integer of at least 14"),
    ("glm4v", VISION, {"num_heads": 16}, "heads of 2 elements cannot be rotated by two axes"),
    ("glm4v", VISION, {"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' is not"),
    ("glm4v", TEXT, {"attention_bias": False}, "attention_bias false is not supported"),
    ("glm4v", TEXT, {"head_dim": 32}, "head_dim 32 is not supported; supported: 16"),
    ("glm4v_moe", VISION, {"model_type": "glm4v"}, "supported: glm4v_moe_vision, glm4v_moe"),
    ("glm4v_moe", TEXT, {"use_qk_norm": True}, "use_qk_norm true is not supported"),
    ("glm46v", TEXT, {"model_type": "glm4"}, "supported: glm4v_text, glm4v_moe_text"),
    ("glm_ocr", TEXT, {"model_type": "glm4v_text"}, "supported: glm_ocr_text"),
    ("glm_ocr", TEXT, {"attention_bias": True}, "attention_bias true is not supported"),
    ("glm_ocr", TEXT, {"num_nextn_predict_layers": 10**6}, "'num_nextn_predict_layers' must be"),
    ("glm_ocr", TEXT, {"rope_parameters": {"mrope_section": [1, 2, 3]}}, "must add up to the 16"),
    ("glm_ocr", VISION, {"model_type": "glm4v_vision"}, "supported: glm_ocr_vision, glm_ocr"),
    ("glm_ocr", VISION, {"out_hidden_size": 32}, r"out_hidden_size \(32\) differs from"),
    ("glm_ocr", VISION, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("glm_ocr", OUTER, {"image_token_id": 512}, r"image_token_id \(512\) is no token"),
    ("glm4v", TEXT, {"model_type": "glm4"}, "model_type 'glm4' is not supported"),
    ("lighton_ocr", VISION, {"model_type": "clip_vision_model"}, "supported: pixtral"),
    ("lighton_ocr", VISION, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("lighton_ocr", OUTER, {"vision_feature_layer": -2}, "vision_feature_layer -2 is not"),
    ("lighton_ocr", OUTER, {"projector_hidden_act": "silu"}, "projector_hidden_act 'silu' is"),
    ("lighton_ocr", OUTER, {"multimodal_projector_bias": True}, "projector_bias True is not"),
    ("lighton_ocr", OUTER, {"image_token_id": 512}, r"image_token_id \(512\) is no token"),
    ("lighton_ocr", OUTER, {"spatial_merge_size": 0}, "'spatial_merge_size' must be an integer"),
    ("lighton_ocr", TEXT, {"model_type": "qwen2"}, "model_type 'qwen2' is not supported"),
    ("paddleocr_vl", VISION, {"model_type": "siglip_vision_model"}, "supported: paddleocr_vl_v"),
    ("paddleocr_vl", VISION, {"num_attention_heads": 16}, "heads of 2 elements cannot be rotated"),
    ("paddleocr_vl", VISION, {"image_size": 13}, "'image_size' must be an integer of at least 14"),
    ("paddleocr_vl", VISION, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("paddleocr_vl", VISION, {"num_channels": 1}, "num_channels 1 is not supported"),
    ("paddleocr_vl", TEXT, {"model_type": "ernie4_5"}, "supported: paddleocr_vl_text"),
    ("paddleocr_vl", TEXT, {"rope_is_neox_style": False}, "rope_is_neox_style false is not"),
    ("paddleocr_vl", TEXT, {"rope_parameters": {"mrope_section": [3, 3, 3]}}, "must add up to"),
    ("paddleocr_vl", TEXT, {"layer_types": ["sliding_attention"] * 3}, "'sliding_attention' is"),
    ("paddleocr_vl", OUTER, {"image_token_id": 512}, r"image_token_id \(512\) is no token"),
    ("muse_glimmer", VISION, {"model_type": "kimi_k25_vision"}, "supported: muse_glimmer_vision"),
    ("muse_glimmer", VISION, {"num_attention_heads": 16}, "heads of 2 elements cannot be rotated"),
    ("muse_glimmer", VISION, {"pos_emb_width": 5}, r"pos_emb_width \(5\) differs from pos_emb_h"),
    ("muse_glimmer", VISION, {"pos_emb_height": 7, "pos_emb_width": 7}, "must be a multiple of"),
    ("muse_glimmer", VISION, {"layer_types": ["x"] * 3}, "layer type 'x' is not supported"),
    ("muse_glimmer", VISION, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("muse_glimmer", VISION, {"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' is not"),
    ("muse_glimmer", OUTER, {"out_hidden_size": 64}, r"out_hidden_size \(64\) is not that of 4"),
    ("muse_glimmer", OUTER, {"projector_hidden_act": "x"}, "projector_hidden_act 'x' is not"),
    ("muse_glimmer", OUTER, {"image_token_id": 512}, r"image_token_id \(512\) is no token"),
    ("muse_glimmer", TEXT, {"attention_bias": True}, "attention_bias True is not supported"),
    ("muse_glimmer", TEXT, {"layer_rope_theta": [1e4, 0, 5.0, 0]}, "layer_rope_theta 5.0 is not"),
    ("muse_glimmer", TEXT, {"layer_rope_theta": [0]}, "must have a number for each of 4 layers"),
    ("muse_glimmer", TEXT, {"hidden_activation": "x"}, "hidden_activation 'x' is not supported"),
    ("pixtral", OUTER, {"vision_feature_select_strategy": "default"}, "with Pixtral's tower"),
    ("pixtral", OUTER, {"spatial_merge_size": 2}, "spatial_merge_size 2 is not supported"),
    ("pixtral", OUTER, {"vision_feature_layer": 3}, "layer 3 is none of the 2 layers"),
    ("pixtral", OUTER, {"image_token_index": 512}, r"image_token_index \(512\) is no token"),
    ("pixtral", VISION, {"head_dim": 8}, "head_dim 8 is not supported; supported: 16"),
    ("mistral3", VISION, {"model_type": "clip_vision_model"}, "supported: pixtral"),
    ("mistral3", VISION, {"num_attention_heads": 16}, "heads of 2 elements cannot be rotated"),
    ("mistral3", VISION, {"head_dim": 8}, "head_dim 8 is not supported; supported: 16"),
    ("mistral3", VISION, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("mistral3", VISION, {"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' is not"),
    ("mistral3", OUTER, {"vision_feature_layer": [-1]}, r"vision_feature_layer \[-1\] is not"),
    ("mistral3", OUTER, {"vision_feature_layer": 3}, "layer 3 is none of the 2 layers"),
    ("mistral3", OUTER, {"image_token_index": 512}, r"image_token_index \(512\) is no token"),
    ("qwen2_vl", VISION, {"model_type": "qwen2_5_vl"}, "supported: qwen2_vl_vision, qwen2_vl"),
    ("qwen2_vl", VISION, {"in_channels": 4}, "in_channels 4 is not supported; supported: 3"),
    ("qwen2_vl", VISION, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("qwen2_vl", VISION, {"hidden_size": 32}, r"hidden_size \(32\) differs from the language"),
    ("qwen2_vl", VISION, {"embed_dim": 33}, r"num_heads \(2\) must divide embed_dim \(33\)"),
    ("qwen2_vl", VISION, {"mlp_ratio": 2.5}, "'mlp_ratio' must be an integer of at least 1"),
    ("qwen2_vl", VISION, {"num_heads": 16}, "heads of 2 elements cannot be rotated by two axes"),
    ("qwen2_vl", VISION, {"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' is not"),
    ("qwen2_vl", OUTER, {"image_token_id": 512}, r"image_token_id \(512\) is no token"),
    ("qwen2_5_vl", VISION, {"in_channels": 4}, "in_channels 4 is not supported; supported: 3"),
    ("qwen2_5_vl", VISION, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("qwen2_5_vl", VISION, {"out_hidden_size": 32}, r"out_hidden_size \(32\) differs from"),
    ("qwen2_5_vl", VISION, {"window_size": 14}, "'window_size' must be an integer of at least 28"),
    ("qwen2_5_vl", VISION, {"fullatt_block_indexes": [4]}, "must list layers below 4"),
    ("qwen2_5_vl", VISION, {"fullatt_block_indexes": 1}, "'fullatt_block_indexes' must be a list"),
    (
        "qwen2_5_vl",
        VISION,
        {"temporal_patch_size": [2]},
        "'temporal_patch_size' must be an integer",
    ),
    ("qwen2_5_vl", VISION, {"num_heads": 16}, "heads of 2 elements cannot be rotated by two axes"),
    ("qwen2_5_vl", VISION, {"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' is not"),
    ("qwen3_vl", VISION, {"num_position_embeddings": 200}, r"\(200\) must be a square number"),
    ("qwen3_vl", VISION, {"deepstack_visual_indexes": [2, 1]}, "in ascending order, not .2, 1."),
    (
        "qwen3_vl",
        VISION,
        {"deepstack_visual_indexes": [0, 1, 2, 3]},
        "lists 4 layers, and the language",
    ),
    (
        "qwen3_vl",
        OUTER,
        {"image_token_id": -1},
        "'image_token_id' must be an integer of at least 0",
    ),
    ("qwen3_vl_moe", VISION, {"model_type": "qwen3_vl"}, "supported: qwen3_vl_moe_vision, qwen3_v"),
    ("qwen3_vl_moe", VISION, {"num_position_embeddings": 200}, r"\(200\) must be a square number"),
    ("qwen3_vl_moe", TEXT, {"norm_topk_prob": False}, "norm_topk_prob false is not supported"),
    ("qwen3_vl_moe", TEXT, {"num_experts_per_tok": 5}, r"\(5\) is more than num_local_experts"),
    ("qwen3_vl_moe", TEXT, {"hidden_act": "gelu"}, "experts with hidden_act 'gelu' are not"),
    ("qwen3_vl_moe", TEXT, {"model_type": "qwen3_moe"}, "supported: qwen3_vl_moe_text"),
    ("qwen3_5", VISION, {"deepstack_visual_indexes": [1]}, "deepstack_visual_indexes is not supp"),
    ("qwen3_5", VISION, {"model_type": "qwen3_vl"}, "supported: qwen3_5_vision, qwen3_5"),
    ("qwen3_5_moe", VISION, {"model_type": "qwen3_5"}, "supported: qwen3_5_moe_vision, qwen3_5_m"),
    ("qwen3_vl", VISION, {"depth": 2**40}, "'depth' must be an integer of at most"),
    (
        "qwen3_vl",
        VISION,
        {"intermediate_size": 2**31 - 1, "hidden_size": 2**30},
        "one of them is wrong",
    ),
]


def change(directory: Path, place: str, fields: dict[str, Any]) -> None:
    whole = json.loads((directory / "config.json").read_text())
    part = whole
    for name in filter(None, place.split(".")):
        part = part[name]
    part.update(fields)
    (directory / "config.json").write_text(json.dumps(whole))


def read(directory: Path, whole: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(whole))
    return ModelConfig.from_directory(directory)


Configs = Callable[[str], str]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Configs:
    """The config.json of each family."""

    @cache
    def made(name: str) -> str:
        directory = tmp_path_factory.mktemp(name)
        make_vision_model(name, directory)
        return (directory / "config.json").read_text()

    return made


@pytest.mark.parametrize(("name", "place", "fields", "message"), REFUSED)
def test_what_is_not_computed_is_refused(
    name: str,
    place: str,
    fields: dict[str, Any],
    message: str,
    configs: Configs,
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(configs(name))
    ModelConfig.from_directory(tmp_path)
    change(tmp_path, place, fields)
    with pytest.raises(EngineStartError, match=rf"config\.json: .*{message}"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_every_family_says_what_a_prompt_needs(name: str, configs: Configs, tmp_path: Path) -> None:
    config = read(tmp_path, json.loads(configs(name)))
    vision = config.vision
    assert vision is not None
    assert vision.image_token == IMAGE_TOKENS.get(name, 442)
    assert vision.both_ways == (name.startswith(("gemma3", "gemma4")))
    assert vision.longest_span == {"gemma3": 16, "gemma4": 1120}.get(name[:6], 0)
    levels = dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe"), 3)
    levels |= {"granite_docling": 2, "granite4_vision": 5}
    assert vision.num_levels == levels.get(name, 0)
    assert vision.level_layers == ((0, 1, 2, 4, 5) if name == "granite4_vision" else ())
    any_size = name in ANY_SIZE
    with_axes = ("ernie", "glm", "hunyuan", "minicpmv4_7", "paddle", "qwen")
    assert vision.has_axes == name.startswith(with_axes)
    assert vision.grid_axes == (4 if name == "hunyuan_vl" else 0)
    merged = {"minicpmv4_6": 4, "minicpmv4_7": 4, "video_llama_3": 1, "pixtral": 1}
    assert vision.merge_size == (merged.get(name, 2) if any_size else 0)
    of_images: dict[str, Any] = FAMILIES[name].vision
    assert vision.patch_size == of_images.get("sam_config", of_images)["patch_size"]
    assert vision.tile_size == (0 if any_size else 128 if name in TWO_SIZES else 64)
    counts = {"smolvlm": 28, "idefics3": 28, "internvl": 28, "llama4": 28}
    counts |= dict.fromkeys(JOINED, 16 + 8 * 5)
    counts |= dict.fromkeys(("aya_vision", "cohere2_vision", "granite_docling", "qianfan_ocr"), 28)
    counts |= {"deepseek_ocr": 20 * 31, "deepseek_ocr2": 6 * 144}
    counts |= {"deepseek_vl2": 3 * 4 + 1 + 6 * 10, "ovis2": 7 * 4 + 8, "granite4_vision": 4 + 4 * 3}
    of_any = {"hunyuan_vl": 2 * (5 + 1) + 2}.get(name, 10)
    grid = (3, 128, 64) if name in JOINED else (6 if name in TWO_SIZES else 7, 2, 3)
    if any_size:
        grid = (1, 2 * vision.merge_size, 5 * vision.merge_size)
    assert vision.num_embeddings(grid) == (of_any if any_size else counts.get(name, 7 * 16))


def test_files_of_llava_leave_sizes_out(tmp_path: Path) -> None:
    config = read(tmp_path, LLAVA_1_5)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (4096, 32, 32064)
    (mlp,) = config.dense_mlps
    assert (mlp.inner, config.attentions[0].num_kv_heads) == (11008, 32)
    assert config.vision is not None
    assert isinstance(config.vision.tower, LlavaTower)
    assert config.vision.tower.encoder == EncoderSpec(
        kind="clip",
        hidden_size=1024,
        num_layers=23,
        num_heads=16,
        inner=4096,
        image_size=336,
        patch_size=14,
        activation="quick_gelu",
        eps=1e-5,
        final_norm=False,
    )
    assert config.vision.num_embeddings((1, 1, 1)) == 576
    assert config.dtype == "float16"


def test_files_of_qwen_2_have_the_width_of_embeddings_as_hidden_size(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN_2_VL)
    assert (config.hidden_size, config.tie_word_embeddings) == (1536, True)
    assert [rope.sections for rope in config.ropes] == [(16, 24, 24)]
    assert config.vision == VisionSpec(
        image_token=151655,
        tower=Qwen2Tower(
            hidden_size=1280,
            num_layers=32,
            num_heads=16,
            inner=5120,
            patch_size=14,
            num_frames=2,
            merge_size=2,
            activation="quick_gelu",
            theta=10000.0,
        ),
        merge_size=2,
        has_axes=True,
        video=VideoSpec(token=151656, processors=("Qwen2VLVideoProcessor",), in_one_piece=True),
    )


def test_files_of_qwen_2_5_have_the_language_model_beside_vision_config(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN_2_5_VL)
    assert (config.hidden_size, config.tie_word_embeddings) == (2048, True)
    assert set(config.layer_windows) == {None}
    assert config.vision == VisionSpec(
        image_token=151655,
        tower=Qwen2_5Tower(
            hidden_size=1280,
            num_layers=32,
            num_heads=16,
            inner=3420,
            patch_size=14,
            num_frames=2,
            merge_size=2,
            activation="silu",
            theta=10000.0,
            window=4,
            full_layers=(7, 15, 23, 31),
        ),
        merge_size=2,
        has_axes=True,
        video=VideoSpec(
            token=151656,
            processors=("Qwen2VLVideoProcessor",),
            in_one_piece=True,
            times=VideoTimes(2.0),
        ),
    )


@pytest.mark.parametrize("newer", [False, True])
def test_files_of_mistral_3_say_how_the_tower_rotates(newer: bool, tmp_path: Path) -> None:
    whole = json.loads(json.dumps(MISTRAL_SMALL_3_1))
    if newer:
        rope = {"rope_theta": whole["vision_config"].pop("rope_theta"), "rope_type": "default"}
        whole["vision_config"]["rope_parameters"] = rope
    assert read(tmp_path, whole).vision == VisionSpec(
        image_token=10,
        tower=PixtralTower(
            hidden_size=1024,
            num_layers=24,
            num_stored=24,
            num_heads=16,
            inner=4096,
            patch_size=14,
            merge_size=2,
            activation="gelu",
            theta=10000.0,
            eps=1e-5,
            projector_activation="gelu",
            bias=False,
        ),
        merge_size=2,
    )


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    import transformers

    fields = {"architectures": ["Qwen3VLForConditionalGeneration"]}
    config = transformers.Qwen3VLConfig(text_config={"hidden_size": 3584, "intermediate_size": 64})
    text = {name: getattr(config.text_config, name) for name in ("num_hidden_layers", "head_dim")}
    whole = fields | {"text_config": config.text_config.to_dict() | text, "vision_config": {"a": 1}}
    found = read(tmp_path, whole).vision
    assert found is not None
    assert isinstance(found.tower, Qwen3Tower)
    theirs = config.vision_config
    assert (found.tower.hidden_size, found.tower.num_layers) == (theirs.hidden_size, theirs.depth)
    assert (found.tower.inner, found.tower.num_heads) == (4304, theirs.num_heads)
    assert found.tower.level_layers == tuple(theirs.deepstack_visual_indexes)
    assert found.tower.num_positions == theirs.num_position_embeddings
    assert found.image_token == config.image_token_id

    gemma = transformers.Gemma4Config(vision_config={})
    whole = {"text_config": gemma.text_config.to_dict(), "vision_config": {"a": 1}}
    found = read(tmp_path, whole | {"architectures": ["Gemma4ForConditionalGeneration"]}).vision
    assert found is not None
    assert isinstance(found.tower, Gemma4Tower)
    tower, theirs = found.tower, gemma.vision_config
    assert (tower.hidden_size, tower.num_layers) == (theirs.hidden_size, theirs.num_hidden_layers)
    assert (tower.num_heads, tower.num_kv_heads, tower.head_dim, tower.inner) == (
        theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim,
        theirs.intermediate_size,
    )  # fmt: skip
    assert (tower.patch_size, found.merge_size) == (theirs.patch_size, theirs.pooling_kernel_size)
    assert (tower.eps, tower.theta) == (theirs.rms_norm_eps, theirs.default_theta)
    assert (tower.clips, tower.standardizes) == (theirs.use_clipped_linears, theirs.standardize)
    assert tower.longest_side == theirs.position_embedding_size
    assert (found.image_token, found.both_ways) == (gemma.image_token_id, False)

    name = {"architectures": ["Gemma4UnifiedForConditionalGeneration"]}
    parts = ("text_config", "vision_config", "audio_config")
    unified = transformers.Gemma4UnifiedConfig(**{part: {} for part in parts}).to_dict() | name
    unified["text_config"]["eos_token_id"] = None
    given = read(tmp_path, name | {part: {"a": 1} for part in parts})
    assert read(tmp_path, unified) == given
    assert given.audio is not None

    name = {"architectures": ["MuseGlimmerForConditionalGeneration"]}
    of_muse = {"text_config": {"a": 1}, "vision_config": {"a": 1}}
    muse = transformers.MuseGlimmerConfig().to_dict() | name
    muse["text_config"]["eos_token_id"] = None
    assert read(tmp_path, muse) == read(tmp_path, name | of_muse)

    smol = transformers.SmolVLMConfig(text_config={"model_type": "llama"})
    whole = smol.to_dict() | {"architectures": ["SmolVLMForConditionalGeneration"]}
    whole |= {"vision_config": {"a": 1}, "image_token_id": 5, "scale_factor": 1}
    found = read(tmp_path, whole).vision
    assert found is not None
    assert isinstance(found.tower, Idefics3Tower)
    encoder, theirs = found.tower.encoder, smol.vision_config
    assert (encoder.hidden_size, encoder.inner) == (theirs.hidden_size, theirs.intermediate_size)
    assert (encoder.num_layers, encoder.num_heads) == (12, theirs.num_attention_heads)
    assert (encoder.image_size, encoder.patch_size) == (theirs.image_size, theirs.patch_size)


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("qwen2_vl", (16, 24, 24)),
        ("qwen2_5_vl", (16, 24, 24)),
        ("qwen3_vl", (24, 20, 20)),
        ("qwen3_vl_moe", (24, 20, 20)),
        ("qwen3_5", (11, 11, 10)),
        ("qwen3_5_moe", (11, 11, 10)),
        ("glm4v", (8, 12, 12)),
    ],
)
def test_sections_that_are_left_out_are_those_of_transformers(
    name: str, sections: tuple[int, ...], configs: Configs, tmp_path: Path
) -> None:
    whole = json.loads(configs(name))
    text = whole["text_config"]
    del text["rope_parameters"]
    with pytest.raises(EngineStartError, match=r"an mrope_section that adds up to [82];"):
        read(tmp_path, whole)
    head_dim = 256 if name.startswith("qwen3_5") else 64 if name == "glm4v" else 128
    text |= {"head_dim": head_dim, "hidden_size": 128, "num_attention_heads": 128 // head_dim or 1}
    text["num_key_value_heads"] = 1
    width = "hidden_size" if name == "qwen2_vl" else "out_hidden_size"
    whole["vision_config"][width] = 128
    (rope,) = read(tmp_path, whole).ropes
    assert (rope.sections, rope.mixes_axes) == (sections, name.startswith("qwen3"))


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_without_vision_config_a_model_sees_nothing(
    name: str, configs: Configs, tmp_path: Path
) -> None:
    whole = json.loads(configs(name))
    del whole["vision_config"]
    assert read(tmp_path, whole).vision is None


def test_families_whose_towers_do_not_run_load_without(configs: Configs, tmp_path: Path) -> None:
    whole = json.loads(configs("llava"))
    whole["architectures"] = ["Gemma3nForConditionalGeneration"]
    whole["text_config"] |= {"model_type": "gemma3n_text", "num_kv_shared_layers": 0}
    whole["text_config"] |= {"laurel_rank": 16, "activation_sparsity_pattern": None}
    whole["vision_config"]["model_type"] = "gemma3n_vision"
    assert read(tmp_path, whole).vision is None


@pytest.mark.parametrize("name", ["llava", "mistral3"])
def test_null_in_text_config_keeps_its_meaning(name: str, configs: Configs, tmp_path: Path) -> None:
    """A window that is null is none; one that is absent is Mistral's default."""
    whole = json.loads(configs(name))
    whole["text_config"]["model_type"] = "mistral"
    whole["text_config"].pop("sliding_window", None)
    assert set(read(tmp_path, whole).layer_windows) == {4096}
    whole["text_config"]["sliding_window"] = None
    assert set(read(tmp_path, whole).layer_windows) == {None}


def test_files_of_gemma_3_leave_sizes_out(tmp_path: Path) -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    vision = {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    }
    whole = {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 256}
    whole |= {"architectures": ["Gemma3ForConditionalGeneration"], "image_token_index": 262144}
    config = read(tmp_path, whole)
    attention = config.attentions[0]
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.layer_windows[:6]) == (262208, (1024,) * 5 + (None,))
    assert config.vision is not None
    assert isinstance(config.vision.tower, Gemma3Tower)
    assert config.vision.tower.size == 4
    assert config.vision.num_embeddings((3, 1, 1)) == 768
