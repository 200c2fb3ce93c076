"""The fields of config.json as the models' authors publish them: those that differ from a default,
and those that only the authors' own code reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.mixer_specs import Growth
from shmllm.models.specs import MoESpec
from shmllm.models.vision.llava_specs import LlavaNextTower, LlavaOnevisionTower
from shmllm.models.vision.projected_specs import InternVLTower, Llama4Tower
from shmllm.models.vision.specs import VisionSpec
from shmllm.models.vision.squares_specs import Glm4vTower, Qwen2_5Tower, Qwen3Tower
from shmllm_kernels.windows import Chunk

QWEN_3_VL_30B: dict[str, Any] = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl_moe",
    "text_config": {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_vl_moe_text",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
        },
        "rope_theta": 5000000,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": False,
    "video_token_id": 151656,
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_size": 1152,
        "in_channels": 3,
        "intermediate_size": 4304,
        "model_type": "qwen3_vl_moe",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
QWEN_3_5_35B: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5_moe",
    "text_config": {
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "video_token_id": 248057,
    "vision_config": {
        "deepstack_visual_indexes": [],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "intermediate_size": 4304,
        "model_type": "qwen3_5_moe",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
LLAVA_1_6: dict[str, Any] = {
    "architectures": ["LlavaNextForConditionalGeneration"],
    "ignore_index": -100,
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "image_token_index": 32000,
    "model_type": "llava_next",
    "projector_hidden_act": "gelu",
    "text_config": {
        "architectures": ["MistralForCausalLM"],
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "use_image_newline_parameter": True,
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
LLAVA_ONEVISION: dict[str, Any] = {
    "architectures": ["LlavaOnevisionForConditionalGeneration"],
    "image_token_index": 151646,
    "model_type": "llava_onevision",
    "projector_hidden_act": "gelu",
    "text_config": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 152000,
    },
    "tie_word_embeddings": False,
    "use_image_newline_parameter": True,
    "video_token_index": 151647,
    "vision_aspect_ratio": "anyres_max_9",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 384,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 26,
        "patch_size": 14,
        "vision_use_head": False,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
EXAONE_4_5: dict[str, Any] = {
    "architectures": ["Exaone4_5_ForConditionalGeneration"],
    "image_token_id": 67,
    "model_type": "exaone4_5",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 27392,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
        "max_position_embeddings": 262144,
        "model_type": "exaone4_5_text",
        "num_attention_heads": 40,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "rope_parameters": {
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 1000000,
            "rope_type": "llama3",
        },
        "sliding_window": 4096,
        "sliding_window_pattern": "LLLG",
        "vocab_size": 153600,
    },
    "tie_word_embeddings": False,
    "video_token_id": 68,
    "vision_config": {
        "depth": 28,
        "fullatt_block_indexes": [6, 13, 20, 27],
        "hidden_size": 2048,
        "in_channels": 3,
        "intermediate_size": 5120,
        "model_type": "exaone4_5_vision",
        "num_heads": 32,
        "num_key_value_heads": 8,
        "out_hidden_size": 5120,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
    },
}
INTERNVL_3: dict[str, Any] = {
    "architectures": ["InternVLForConditionalGeneration"],
    "downsample_ratio": 0.5,
    "image_seq_length": 256,
    "image_token_id": 151667,
    "model_type": "internvl",
    "projector_hidden_act": "gelu",
    "text_config": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "vocab_size": 151674,
    },
    "vision_config": {
        "attention_bias": True,
        "hidden_size": 1024,
        "image_size": [448, 448],
        "intermediate_size": 4096,
        "layer_scale_init_value": 0.1,
        "model_type": "internvl_vision",
        "norm_type": "layer_norm",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": [14, 14],
        "use_absolute_position_embeddings": True,
        "use_mask_token": False,
        "use_mean_pooling": True,
        "use_qk_norm": False,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}
GLM_4_1V: dict[str, Any] = {
    "architectures": ["Glm4vForConditionalGeneration"],
    "image_token_id": 151343,
    "model_type": "glm4v",
    "text_config": {
        "attention_bias": True,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "max_position_embeddings": 65536,
        "model_type": "glm4v_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"mrope_section": [8, 12, 12], "type": "default"},
        "rope_theta": 10000.0,
        "vocab_size": 151552,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "attention_bias": False,
        "depth": 24,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "image_size": 336,
        "in_channels": 3,
        "intermediate_size": 13696,
        "model_type": "glm4v",
        "num_heads": 12,
        "out_hidden_size": 4096,
        "patch_size": 14,
        "rms_norm_eps": 1e-05,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
GLM_4_5V: dict[str, Any] = {
    "architectures": ["Glm4vMoeForConditionalGeneration"],
    "image_token_id": 151363,
    "model_type": "glm4v_moe",
    "text_config": {
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 65536,
        "model_type": "glm4v_moe_text",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"},
        "rope_theta": 10000.0,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
    "tie_word_embeddings": False,
    "video_token_id": 151364,
    "vision_config": {
        "attention_bias": False,
        "depth": 24,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "image_size": 336,
        "in_channels": 3,
        "intermediate_size": 10944,
        "model_type": "glm4v_moe",
        "num_heads": 12,
        "out_hidden_size": 4096,
        "patch_size": 14,
        "rms_norm_eps": 1e-05,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
LLAMA_4_SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "boi_token_index": 200080,
    "eoi_token_index": 200081,
    "image_token_index": 200092,
    "model_type": "llama4",
    "text_config": {
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": 4,
        "eos_token_id": [200001, 200007, 200008],
        "floor_scale": 8192,
        "for_llm_compressor": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 262144,
        "model_type": "llama4_text",
        "moe_layers": list(range(48)),
        "no_rope_layers": [1, 1, 1, 0] * 12,
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "output_router_logits": False,
        "pad_token_id": 200018,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "use_qk_norm": True,
        "vocab_size": 202048,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "hidden_act": "gelu",
        "hidden_size": 1408,
        "image_size": 336,
        "intermediate_size": 5632,
        "model_type": "llama4_vision_model",
        "multi_modal_projector_bias": False,
        "norm_eps": 1e-05,
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 34,
        "patch_size": 14,
        "pixel_shuffle_ratio": 0.5,
        "projector_input_dim": 4096,
        "projector_output_dim": 4096,
        "rope_theta": 10000,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "vision_output_dim": 4096,
    },
}


def read(directory: Path, whole: dict[str, Any]) -> tuple[ModelConfig, VisionSpec]:
    (directory / "config.json").write_text(json.dumps(whole))
    config = ModelConfig.from_directory(directory)
    assert config.vision is not None
    return config, config.vision


def test_qwen_3_vl_with_experts(tmp_path: Path) -> None:
    config, vision = read(tmp_path, QWEN_3_VL_30B)
    mixture = config.layers[0].mlp
    assert isinstance(mixture, MoESpec)
    assert (mixture.num_experts, mixture.top_k, mixture.inner) == (128, 8, 768)
    assert (mixture.renormalize, mixture.two_layouts) == (True, True)
    assert isinstance(vision.tower, Qwen3Tower)
    assert (vision.num_levels, vision.num_embeddings((1, 32, 40))) == (3, 320)
    (rope,) = config.ropes
    assert (rope.sections, rope.mixes_axes) == ((24, 20, 20), True)


def test_qwen_3_5_with_experts(tmp_path: Path) -> None:
    config, vision = read(tmp_path, QWEN_3_5_35B)
    assert (len(config.attentions), config.num_layers) == (10, 40)
    assert isinstance(vision.tower, Qwen3Tower)
    assert (vision.num_levels, vision.num_embeddings((1, 32, 40))) == (0, 320)
    assert vision.video is not None
    assert (vision.image_token, vision.video.token) == (248056, 248057)
    (rope,) = config.ropes
    assert (rope.rotary_dim, rope.sections, rope.mixes_axes) == (64, (11, 11, 10), True)


def test_llava_next(tmp_path: Path) -> None:
    config, vision = read(tmp_path, LLAVA_1_6)
    assert (config.hidden_size, config.num_layers, config.dense_mlps[0].inner) == (4096, 32, 14336)
    assert isinstance(vision.tower, LlavaNextTower)
    assert vision.tower.encoder.num_layers == 23
    whole, larger = 576, 48 * 49
    assert vision.num_embeddings((5, 900, 900)) == whole + larger
    assert vision.num_embeddings((3, 300, 600)) == whole + 24 * 49
    assert vision.num_embeddings((5, 300, 600)) == 0


def test_llava_onevision(tmp_path: Path) -> None:
    config, vision = read(tmp_path, LLAVA_ONEVISION)
    assert config.tie_word_embeddings
    assert isinstance(vision.tower, LlavaOnevisionTower)
    assert (len(vision.tower.sizes), vision.tower.most_tiles) == (36, 9)
    assert (vision.tower.encoder.num_layers, vision.tower.encoder.side) == (26, 27)
    assert not vision.tower.encoder.final_norm
    assert vision.num_embeddings((1, 900, 700)) == 730
    assert vision.num_embeddings((10, 1152, 1152)) == 729 + 81 * 82
    assert vision.num_embeddings((37, 2304, 2304)) == 729 + 81 * 82  # of 162 x 162 patches
    assert vision.num_embeddings((11, 384 * 2, 384 * 5)) == 729 + 54 * 136
    assert vision.num_embeddings((3, 1152, 1152)) == 0
    assert vision.most_joined == 2304**2 // 14**2


def test_exaone_4_5(tmp_path: Path) -> None:
    config, vision = read(tmp_path, EXAONE_4_5)
    assert [config.attentions[layer].rope is None for layer in range(4)] == [False] * 3 + [True]
    assert config.layer_windows[:4] == (4096, 4096, 4096, None)
    assert isinstance(vision.tower, Qwen2_5Tower)
    assert (vision.tower.num_heads, vision.tower.num_kv_heads, vision.tower.window) == (32, 8, 4)
    assert (vision.image_token, vision.has_axes) == (67, False)
    assert vision.video is not None
    assert (vision.video.token, vision.video.in_one_piece) == (68, True)
    assert vision.num_embeddings((1, 24, 24)) == 144


def test_internvl(tmp_path: Path) -> None:
    config, vision = read(tmp_path, INTERNVL_3)
    assert config.tie_word_embeddings
    (rope,) = config.ropes
    assert (rope.type, rope.theta) == ("default", 1e6)
    assert isinstance(vision.tower, InternVLTower)
    assert (vision.tower.encoder.side, vision.tower.factor) == (32, 2)
    assert vision.tower.attention_bias
    assert not vision.tower.encoder.final_norm
    assert vision.num_embeddings((13, 3, 4)) == 13 * 256


def test_glm_4_1v(tmp_path: Path) -> None:
    config, vision = read(tmp_path, GLM_4_1V)
    (rope,) = config.ropes
    assert (rope.rotary_dim, rope.interleaved, rope.sections) == (64, True, (8, 12, 12))
    tower = vision.tower
    assert isinstance(tower, Glm4vTower)
    assert (tower.inner, tower.merger_inner, tower.num_positions) == (4096, 13696, 576)
    assert vision.video is not None
    assert (vision.image_token, vision.video.token) == (151343, 151343)
    assert vision.num_embeddings((1, 24, 24)) == 144


def test_glm_4_5v(tmp_path: Path) -> None:
    config, vision = read(tmp_path, GLM_4_5V)
    (rope,) = config.ropes
    assert (rope.rotary_dim, rope.interleaved, rope.sections) == (64, False, (8, 12, 12))
    assert (config.attentions[0].bias, config.attentions[0].num_heads) == (True, 96)
    (mixture,) = config.mixtures
    assert (mixture.num_experts, mixture.scoring) == (128, "sigmoid")
    tower = vision.tower
    assert isinstance(tower, Glm4vTower)
    assert (tower.inner, tower.merger_inner, vision.image_token) == (4096, 10944, 151363)


def test_llama_4_scout(tmp_path: Path) -> None:
    config, vision = read(tmp_path, LLAMA_4_SCOUT)
    mixtures = [layer.mlp for layer in config.layers]
    assert {(each.num_experts, each.inner) for each in mixtures if isinstance(each, MoESpec)} == {
        (16, 8192)
    }
    assert len(config.attentions) == len(mixtures) == 48
    assert [each.window for each in config.attentions[:4]] == [Chunk(8192)] * 3 + [None]
    assert config.attentions[3].growth == Growth(0.1, 8192, offset=1)
    tower = vision.tower
    assert isinstance(tower, Llama4Tower)
    assert (tower.encoder.side, tower.factor, tower.adapted) == (24, 2, 4096)
    assert vision.num_embeddings((17, 4, 4)) == 17 * 144
