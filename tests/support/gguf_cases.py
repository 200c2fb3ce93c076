"""Models of all families in GGUF files, and what their files have beside the usual metadata."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from support.gguf_models import Change
from support.gguf_read_alone import READ_ALONE

EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 1.0}
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.2, 1.5],
    "long_factor": [1.5, 3.0, 4.5],
    "original_max_position_embeddings": 128,
}
LONG_TENSOR = "rope_factors_long.weight"
GPT_OSS = {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
GRANITE_MOE: dict[str, Any] = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.5,
}
GRANITE_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "intermediate_size": 24,
    "shared_intermediate_size": 40,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}
EXAONE_MOE = {"num_hidden_layers": 5, "sliding_window": 7, "moe_intermediate_size": 24}
AFMOE = EXAONE_MOE | {"head_dim": 16, "route_scale": 1.5, "mup_enabled": True}


def add_yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_rope_scaling_yarn_beta_fast(8.0)


def add_yarn_with_a_factor(writer: gguf.GGUFWriter) -> None:
    add_yarn(writer)
    writer.add_rope_scaling_yarn_attn_factor(1.3)


def add_longrope(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_orig_ctx_len(128)
    writer.add_rope_scaling_attn_factors((1 + np.log(2) / np.log(128)) ** 0.5)


def add_further_layer(writer: gguf.GGUFWriter) -> None:
    """As the conversion adds it to K-EXAONE, with some of its tensors."""
    writer.add_block_count(6)
    writer.add_nextn_predict_layers(1)
    writer.add_sliding_window_pattern([True, True, True, False, True, True])
    for name in ("attn_norm", "nextn.enorm", "nextn.eh_proj"):
        writer.add_tensor(f"blk.5.{name}.weight", np.ones(48, np.float32))


GROWING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "llama_4_scaling_beta": 0.5,
}
CASES: dict[str, tuple[str, dict[str, Any], Change | None]] = {
    **{name: (*case, None) for name, case in READ_ALONE.items()},
    "phi3": ("phi3", {"sliding_window": 7}, None),
    "phi3 longrope": (
        "phi3",
        {"rope_parameters": LONG, "sliding_window": None, "tie_word_embeddings": True}
        | {"original_max_position_embeddings": 128},
        add_longrope,
    ),
    "qwen2_moe": (
        "qwen2_moe",
        EXPERTS | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
        None,
    ),
    "olmoe": ("olmoe", EXPERTS, None),
    "gpt_oss": ("gpt_oss", GPT_OSS | {"rope_parameters": PLAIN}, None),
    "llama4": (
        "llama4",
        {"num_hidden_layers": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16}
        | {"intermediate_size": 24, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2},
        None,
    ),
    "gpt_oss yarn": (
        "gpt_oss",
        GPT_OSS | {"rope_parameters": YARN | {"truncate": False}},
        add_yarn,
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "attention_bias": True}, None),
    "olmo2": ("olmo2", {}, None),
    "olmo3": (
        "olmo3",
        {"num_hidden_layers": 5, "sliding_window": 7}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
        add_yarn,
    ),
    "olmo3 with a factor": (
        "olmo3",
        {"num_hidden_layers": 5, "sliding_window": 7}
        | {
            "rope_parameters": {
                "full_attention": YARN | {"attention_factor": 1.3},
                "sliding_attention": PLAIN,
            }
        },
        add_yarn_with_a_factor,
    ),
    "granite": (
        "granite",
        {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.4}
        | {"logits_scaling": 2.5},
        None,
    ),
    "glm": ("glm", {"head_dim": 16, "attention_bias": True}, None),
    "glm4": ("glm4", {"head_dim": 16, "attention_bias": True}, None),
    "cohere2": (
        "cohere2",
        {"num_hidden_layers": 5, "sliding_window": 7, "logit_scale": 0.3},
        None,
    ),
    "arcee": ("arcee", {"attention_bias": True, "mlp_bias": True}, None),
    "cohere": ("cohere", {"logit_scale": 0.3}, None),
    "ernie4.5": ("ernie4_5", {"use_bias": True, "head_dim": 16}, None),
    "exaone4": ("exaone4", {"num_hidden_layers": 5, "sliding_window": 7}, None),
    "exaone4 without windows": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
        None,
    ),
    "seed-oss": ("seed_oss", {"attention_out_bias": True, "head_dim": 16}, None),
    "stablelm": ("stablelm", {"use_qkv_bias": True}, None),
    "cohere with norms of heads": ("cohere", {"use_qk_norm": True}, None),
    "stablelm with norms of heads": (
        "stablelm",
        {"qk_layernorm": True, "use_parallel_residual": True},
        None,
    ),
    "stablelm parallel": ("stablelm", {"use_parallel_residual": True}, None),
    "starcoder2": ("starcoder2", {"sliding_window": 7}, None),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4, "norm_eps": 1e-3}
        | {"block_multiple_of": 24, "block_ffn_dim_multiplier": 1.3},
        None,
    ),
    "lfm2 with biases": (
        "lfm2",
        {"layer_types": ["full_attention", "conv", "conv"], "conv_bias": True},
        None,
    ),
    "lfm2 with experts": (
        "lfm2_moe",
        EXPERTS
        | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
        | {"moe_intermediate_size": 24},
        None,
    ),
    "lfm2 without a bias of experts": (
        "lfm2_moe",
        EXPERTS
        | {"layer_types": ["full_attention", "conv", "conv"], "num_dense_layers": 0}
        | {"moe_intermediate_size": 24, "use_expert_bias": False, "routed_scaling_factor": 2.5},
        lambda writer: writer.add_expert_weights_scale(2.5),
    ),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": GROWING}, None),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 16, "attention_bias": True}, None),
    "hunyuan with experts": (
        "hunyuan_v1_moe",
        {"head_dim": 16, "num_experts": 5, "moe_topk": 2, "tie_word_embeddings": True},
        None,
    ),
    "granite with experts": (
        "granite_moe",
        GRANITE_MOE | {"attention_multiplier": 0.3, "residual_multiplier": 0.4},
        None,
    ),
    "granite with a shared expert": (
        "granite_moe_shared",
        GRANITE_MOE | {"shared_intermediate_size": 36, "tie_word_embeddings": True},
        None,
    ),
    "granite 4 with experts": ("granite_moe_hybrid", GRANITE_HYBRID, None),
    "granite 4": (
        "granite_moe_hybrid",
        GRANITE_HYBRID | {"num_local_experts": 0, "position_embedding_type": "rope"},
        None,
    ),
    "ernie4.5 with experts": (
        "ernie4_5_moe",
        {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 24, "head_dim": 16},
        None,
    ),
    "ernie4.5 without shared experts": (
        "ernie4_5_moe",
        {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 24}
        | {"moe_num_shared_experts": 0, "moe_layer_start_index": 0},
        None,
    ),
    "exaone with experts": ("exaone_moe", EXPERTS | EXAONE_MOE, None),
    "exaone with groups of experts": (
        "exaone_moe",
        EXPERTS
        | EXAONE_MOE
        | {"num_experts": 6, "n_group": 3, "topk_group": 2}
        | {"norm_topk_prob": False, "num_shared_experts": 2},
        None,
    ),
    "exaone with a layer that predicts further tokens": (
        "exaone_moe",
        EXPERTS | EXAONE_MOE,
        add_further_layer,
    ),
    "deepseek v2 lite": ("deepseek_v2", READ_ALONE["deepseek v2"][1] | {"q_lora_rank": None}, None),
    "deepseek moe": (
        "deepseek",
        {"n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 2}
        | {"moe_intermediate_size": 24, "first_k_dense_replace": 1},
        None,
    ),
    "ling 2.0": (
        "bailing_moe_v2",
        EXPERTS
        | {"num_experts": 6, "n_group": 3, "topk_group": 2, "head_dim": 16}
        | {"routed_scaling_factor": 2.5},
        None,
    ),
    "minimax m2": (
        "minimax_m2",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
        None,
    ),
    "afmoe": ("afmoe", EXPERTS | AFMOE | {"num_shared_experts": 1}, None),
    "afmoe with experts in all layers": ("afmoe", EXPERTS | AFMOE | {"num_dense_layers": 0}, None),
    "gemma": ("gemma", {"head_dim": 16}, None),
    "gpt-neox": ("gpt_neox", {}, None),
    "gpt-neox sequential": ("gpt_neox", {"use_parallel_residual": False}, None),
    "nemotron": ("nemotron", {"attention_bias": True, "mlp_bias": True}, None),
    "olmo": ("olmo", {}, None),
    "olmo with bounds": ("olmo", {"clip_qkv": 0.25}, None),
    "phi": ("phi", {}, None),
    "gpt2": ("gpt2", {"n_inner": 72}, None),
    "falcon": ("falcon", {"ffn_hidden_size": 72}, None),
    "falcon with groups": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_attention_heads": 6},
        None,
    ),
    "falcon with one norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        None,
    ),
    "starcoder": ("gpt_bigcode", {"n_inner": 72}, None),
    "starcoder with keys of each head": ("gpt_bigcode", {"multi_query": False}, None),
    "jais2": ("jais2", {}, None),
    "bloom": ("bloom", {}, None),
    "orion": ("orion", {}, None),
    "mpt": ("mpt", {"n_heads": 6, "attn_config": {"clip_qkv": 0.5}}, None),
    "minicpm3": (
        "minicpm3",
        {"kv_lora_rank": 32, "q_lora_rank": 28, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
        | {"num_attention_heads": 3, "num_key_value_heads": 3, "v_head_dim": 16},
        None,
    ),
    "minicpm3 longrope": (
        "minicpm3",
        {"kv_lora_rank": 32, "q_lora_rank": 28, "qk_nope_head_dim": 16, "qk_rope_head_dim": 6}
        | {"num_attention_heads": 3, "num_key_value_heads": 3, "v_head_dim": 16}
        | {"rope_parameters": {k: v for k, v in LONG.items() if k != "partial_rotary_factor"}}
        | {"max_position_embeddings": 128},
        None,
    ),
    "mamba": ("mamba", {"time_step_rank": 5}, None),
    "falcon mamba": ("falcon_mamba", {"time_step_rank": 5, "mixer_rms_eps": 1e-5}, None),
    "mamba2": (
        "mamba2",
        {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 32},
        None,
    ),
    "jamba": (
        "jamba",
        {"num_hidden_layers": 5, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 5}
        | {"mamba_dt_rank": 5},
        None,
    ),
    "jamba without experts": (
        "jamba",
        {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 0, "num_experts": 1}
        | {"mamba_dt_rank": 5},
        None,
    ),
    "dots1": (
        "dots1",
        {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
        None,
    ),
}
"""By name: the family, the options of a small model of transformers, and a change of its file."""
