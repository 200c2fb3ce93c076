"""Compares the logits of every architecture with transformers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from support import encoder_texts, sound_encoders
from support.model_helpers import (
    assert_logits_close,
    load,
    our_logits,
    reference_logits,
    reference_model,
    save,
)
from support.pooling_models import RECIPES
from support.reference_models import BLOCKS_CHOSEN, ENTRIES, INDEXER, PHI4_TOWERS
from support.variants import diagonal, slow

from shmllm.models.architectures import ARCHITECTURES
from shmllm.models.create import create_model
from shmllm.models.text_models import TEXT_MODELS

TOKENS = [int(token) for token in torch.randint(0, 97, (40,), generator=torch.manual_seed(3))]
ROPE = {"rope_theta": 10000.0}
LLAMA3_ROPE = ROPE | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MSCALES = ROPE | {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.3, 1.7, 2.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "short_mscale": 1.2,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 256,
}
YARN_ROPE = ROPE | {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 9, "sliding_window": 7}
GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 7,
    "num_hidden_layers": 7,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 24,
}
GEMMA3N: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 7,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "vocab_size_per_layer_input": 90,
    "hidden_size_per_layer_input": 24,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.6, 0.3, 0.0, 0.0, 0.0, 0.0],
}
GPT_OSS = {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 9, "head_dim": 16}

DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
DELTA_EXPERTS = DELTA | EXPERTS | {"shared_expert_intermediate_size": 36}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
}
KIMI: dict[str, Any] = LATENT | {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "q_lora_rank": None,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 3,
}
LING3: dict[str, Any] = KIMI | {
    "linear_head_dim": 16,
    "linear_num_heads": 3,
    "num_local_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
ALL_CHOSEN: dict[str, Any] = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 2, "topk_group": 2},
    **{"first_k_dense_replace": 1, "index_topk": 2**31 - 1},
}
"""No rounding of scores changes which experts and tokens are chosen."""
STREAMS: dict[str, Any] = LATENT | INDEXER | {"num_key_value_heads": 8, "swiglu_limit": 0.1}
LONGCAT: dict[str, Any] = LATENT | {
    **{"n_routed_experts": 6, "zero_expert_num": 4, "head_dim": 8, "expert_ffn_hidden_size": 24},
    **{"ffn_hidden_size": 80, "num_hidden_layers": 4},
}
"""Layers of two halves."""
GROUPS = {"n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
GROWING = YARN_ROPE | {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 8}
"""A factor of queries that grows after each eight tokens."""
MSCALE_ROPE = YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.2}
MAMBA2: dict[str, Any] = {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 20}
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
}
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
ZAMBA2: dict[str, Any] = {
    "layers_block_type": ["hybrid"] * 3,
    "n_mamba_heads": 6,
    "mamba_ngroups": 2,
    "mamba_d_state": 20,
    "adapter_rank": 8,
    "rms_norm_eps": 1.0,
}
"""An eps so large that rounding errors stay small: without additions to a stream in front of its
norms, transformers' logits are 2e-4 from those of float64 otherwise."""
LIGHTNING: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_local_experts": 6,
    "intermediate_size": 24,
    "head_dim": 16,
    "mlp_alpha_factor": 3.5565588200778455,
    "full_attn_alpha_factor": 3.5565588200778455,
    "linear_attn_alpha_factor": 3.5565588200778455,
}
OLMO_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_num_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
}
GRANITE: dict[str, Any] = HYBRID | {
    "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
    "shared_intermediate_size": 36,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}
JAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 6,
    "mamba_dt_rank": 5,
}
FALCON_H1: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
    "mamba_d_ssm": 96,
    "head_dim": 16,
    "embedding_multiplier": 5.7,
    "lm_head_multiplier": 0.2,
    "attention_in_multiplier": 0.7,
    "attention_out_multiplier": 0.9,
    "key_multiplier": 0.4,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.35, 0.25, 0.4, 0.5, 0.3],
    "ssm_out_multiplier": 0.24,
    "mlp_multipliers": [0.88, 0.59],
}
NEMOTRON: dict[str, Any] = {
    "layers_block_type": [LINEAR, "mlp", FULL, LINEAR, "mlp"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 20,
    "head_dim": 16,
}

NEMOTRON_EXPERTS: dict[str, Any] = NEMOTRON | {
    "layers_block_type": [LINEAR, "moe", FULL, "moe", "mlp"],
    "n_routed_experts": 6,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 36,
    "routed_scaling_factor": 1.5,
}
PUZZLE = [
    {"block_type": "moe", "moe_intermediate_size": 40, "num_experts_per_tok": 4},
    {"block_type": "mamba"},
    {"block_type": "moe", "n_routed_experts": 4, "num_experts_per_tok": 1, "moe_latent_size": 20},
    {"block_type": "attention"},
    {"block_type": "mlp", "intermediate_size": 48},
]
LFM2: dict[str, Any] = {
    "layer_types": ["conv", FULL, "conv"],
    "block_ffn_dim_multiplier": 1.3,
    "block_multiple_of": 24,
}
LARA: dict[str, Any] = DELTA_EXPERTS | {
    "layer_types": [LINEAR, SLIDING, FULL, LINEAR],
    "sliding_window": 7,
}
LFM3: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", FULL, "conv", SLIDING],
    "head_dim": 16,
    "sliding_window": 7,
    "intermediate_size": 80,
}
LFM2_EXPERTS: dict[str, Any] = {
    "layer_types": ["conv", FULL, "conv"],
    "num_dense_layers": 1,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}

FACTORS = {
    name: GRANITE[name]
    for name in (
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    )
}
GRANITE_MOE = FACTORS | {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}
AFMOE: dict[str, Any] = EXPERTS | {
    "num_hidden_layers": 5,
    "head_dim": 16,
    "sliding_window": 7,
    "route_scale": 2.5,
    "mup_enabled": True,
}
HALF_YARN = YARN_ROPE | {"partial_rotary_factor": 0.5}
BAILING: dict[str, Any] = {
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "head_dim": 16,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
LAGUNA: dict[str, Any] = EXPERTS | {
    "head_dim": 16,
    "num_attention_heads_per_layer": [6, 4, 8],
    "layer_types": [FULL, SLIDING, SLIDING],
    "sliding_window": 7,
    "shared_expert_intermediate_size": 36,
    "moe_routed_scaling_factor": 2.5,
}
STEP: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": [FULL, SLIDING, SLIDING],
    "sliding_window": 7,
    "attention_other_setting": {"attention_type": SLIDING, "num_attention_heads": 4},
    "moe_num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "share_expert_dim": 36,
    "moe_layers_enum": "1,2",
    "moe_router_scaling_factor": 3.0,
    "swiglu_limits": [0, 0, 0.04],
    "swiglu_limits_shared": [0.05, 0, 0.02],
    "rope_theta": [5e5, 1e4, 1e4],
    "partial_rotary_factors": [0.5, 1.0, 1.0],
    "rope_scaling": {name: LLAMA3_ROPE[name] for name in LLAMA3_ROPE if name != "rope_theta"},
}
SARVAM: dict[str, Any] = GROUPS | {"head_dim": 16, "moe_intermediate_size": 24}
MIMO: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": 7,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
MINIMAX: dict[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
    "head_dim": 16,
    "rotary_dim": 8,
}
M3: dict[str, Any] = BLOCKS_CHOSEN | {
    **{"num_local_experts": 6, "num_experts_per_tok": 2, "index_block_size": 16},
    **{"layer_types": [FULL, *["minimax_m3_sparse"] * 2], "index_topk_blocks": 2},
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
ERNIE = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24}
COHERE_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "intermediate_size": 24,
    "head_dim": 16,
    "sliding_window": 7,
}
LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "head_dim": 16,
    "attention_chunk_size": 7,
    "floor_scale": 5,
}
EXAONE = {"num_hidden_layers": 5, "sliding_window": 7}

BLOCKS = [
    {
        "attention": {"n_heads_in_group": size, "no_op": size is None, "window_length": None},
        "ffn": {"ffn_mult": factor, "no_op": factor is None, "sparsify": None},
    }
    for size, factor in ((3, 5.25), (None, 10.5), (2, None))
]
KOLIBRI: dict[str, Any] = EXPERTS | {
    "head_dim": 16,
    "layer_types": [SLIDING, FULL, SLIDING],
    "sliding_window": 7,
    "shared_expert_intermediate_size": 36,
}
FLINT = KOLIBRI | {"mlp_only_layers": [0]}
ARIA = {"moe_num_experts": 6, "moe_topk": 2, "intermediate_size": 24}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-all-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-multi-query": ("llama", {"num_key_value_heads": 1}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 6}),
    "llama-wide-heads": ("llama", {"head_dim": 20}),
    "llama-one-layer": ("llama", {"num_hidden_layers": 1}),
    "llama-eps": ("llama", {"rms_norm_eps": 0.1}),
    "llama-linear": ("llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-yarn": ("llama", {"rope_parameters": YARN_ROPE}),
    "mamba2": ("mamba2", MAMBA2),
    "mamba2-limits": (
        "mamba2",
        MAMBA2
        | {"num_heads": 3, "head_dim": 32, "n_groups": 1, "conv_kernel": 3, "use_bias": True}
        | {"state_size": 24}
        | {"time_step_limit": [0.25, 0.75], "use_conv_bias": False, "tie_word_embeddings": True},
    ),
    "mamba": ("mamba", {"state_size": 5}),
    "mamba-biases": (
        "mamba",
        {"use_bias": True, "use_conv_bias": False, "time_step_rank": 7, "conv_kernel": 2}
        | {"tie_word_embeddings": False, "layer_norm_epsilon": 0.1},
    ),
    "falcon-h1": ("falcon_h1", FALCON_H1),
    "falcon-h1-norm": (
        "falcon_h1",
        FALCON_H1
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "projectors_bias": True}
        | {"mamba_d_ssm": None, "mamba_conv_bias": False, "tie_word_embeddings": True},
    ),
    "falcon-h1-norm-before-gates": (
        "falcon_h1",
        FALCON_H1
        | {"mamba_rms_norm": True, "attention_in_multiplier": 1.0, "ssm_in_multiplier": 1.0}
        | {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True}
        | {"mlp_multipliers": [1.0, 0.59], "num_key_value_heads": None},
    ),
    "falcon-mamba": ("falcon_mamba", {"mixer_rms_eps": 0.01}),
    "minimax": ("minimax", LIGHTNING),
    "minimax-all-experts": (
        "minimax",
        LIGHTNING
        | {"num_experts_per_tok": 6, "layer_types": [LINEAR, LINEAR, FULL, LINEAR]}
        | {"full_attn_alpha_factor": 1.5, "full_attn_beta_factor": 0.8, "block_size": 7}
        | {"linear_attn_beta_factor": 0.6, "mlp_alpha_factor": 2.5, "mlp_beta_factor": 1.2}
        | {"head_dim": 32, "sliding_window": 7, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}
        | {"rope_parameters": YARN_ROPE},
    ),
    "olmo-hybrid": ("olmo_hybrid", OLMO_HYBRID),
    "olmo-hybrid-rotated": (
        "olmo_hybrid",
        OLMO_HYBRID
        | {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 16}
        | {"linear_value_head_dim": 48, "linear_allow_neg_eigval": False, "rms_norm_eps": 1e-3}
        | {"linear_conv_kernel_dim": 3, "rope_parameters": YARN_ROPE, "attention_bias": True}
        | {"layer_types": [FULL, LINEAR, FULL, LINEAR], "tie_word_embeddings": True},
    ),
    "kimi-linear": ("kimi_linear", KIMI),
    "kimi-linear-groups": (
        "kimi_linear",
        KIMI
        | {"num_local_experts": 12, "n_group": 4, "topk_group": 2, "q_lora_rank": 28}
        | {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "n_shared_experts": 2}
        | {"norm_topk_prob": False, "attention_bias": True, "linear_conv_kernel_dim": 3}
        | {"linear_num_heads": 1, "linear_head_dim": 32}
        | {"layer_types": ["full_attention", "linear_attention", *["linear_attention"] * 2]},
    ),
    "kimi-linear-all-experts": ("kimi_linear", KIMI | {"num_experts_per_tok": 6}),
    "ling-3": ("bailing_moe_v3", LING3),
    "ling-3-queries-of-latents": (
        "bailing_moe_v3",
        LING3
        | {"q_lora_rank": 28, "kda_lower_bound": -2.5, "linear_conv_kernel_dim": 3}
        | {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "n_shared_experts": 2}
        | {"layer_types": [FULL, LINEAR, LINEAR, LINEAR], "norm_topk_prob": False}
        | {"rope_parameters": MSCALE_ROPE},
    ),
    "ling-3-all-experts": (
        "bailing_moe_v3",
        LING3
        | {"num_local_experts": 4, "num_experts_per_tok": 4, "n_group": 2}
        | {"kda_safe_gate": False},
    ),
    "jamba": ("jamba", JAMBA),
    "jamba-dense": ("jamba", JAMBA | {"num_experts": 1, "mamba_proj_bias": True}),
    "jamba-all-experts": ("jamba", JAMBA | {"num_experts_per_tok": 6}),
    "zamba2": (
        "zamba2",
        ZAMBA2
        | {"use_shared_attention_adapter": True, "use_mem_rope": True, "num_mem_blocks": 2}
        | {"num_key_value_heads": None},
    ),
    "zamba2-biases": (
        "zamba2",
        ZAMBA2
        | {"layers_block_type": ["hybrid", LINEAR, "hybrid"], "add_bias_linear": True}
        | {"hidden_act": "silu", "time_step_min": 0.5},
    ),
    "bamba": ("bamba", HYBRID | {"attn_layer_indices": [1, 3]}),
    "bamba-biases": (
        "bamba",
        HYBRID
        | {"attn_layer_indices": [2], "mamba_proj_bias": True, "mamba_conv_bias": False}
        | {"attention_bias": True, "mlp_bias": True, "time_step_limit": (0.1, 1.5)},
    ),
    "granite-hybrid": ("granite_moe_hybrid", GRANITE),
    "granite-hybrid-dense": (
        "granite_moe_hybrid",
        GRANITE | {"num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "granite-hybrid-all-experts": ("granite_moe_hybrid", GRANITE | {"num_experts_per_tok": 6}),
    "apertus1p5": ("apertus1p5", {}),
    "aria": ("aria", ARIA),
    "aria-all-experts": (
        "aria",
        ARIA
        | {"moe_topk": 6, "moe_num_shared_experts": 1, "attention_bias": True, "mlp_bias": True}
        | {"tie_word_embeddings": True, "num_key_value_heads": None},
    ),
    "axk1": ("axk1", LATENT | GROUPS),
    "axk1-all-experts": (
        "axk1",
        LATENT
        | {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "n_shared_experts": 2}
        | {"rope_interleave": False, "norm_topk_prob": False, "attention_bias": True}
        | {"rope_parameters": MSCALE_ROPE},
    ),
    "axk2": ("axk2", LATENT | GROUPS | INDEXER | {"gated_norm_rank": 5}),
    "axk2-all-experts": (
        "axk2",
        LATENT
        | INDEXER
        | ALL_CHOSEN
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True}
        | {"n_group": 2, "topk_group": 2, "rope_parameters": MSCALE_ROPE},
    ),
    "persimmon": ("persimmon", {}),
    "persimmon-plain": (
        "persimmon",
        {"qk_layernorm": False, "hidden_act": "gelu", "tie_word_embeddings": True}
        | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}, "layer_norm_eps": 0.1},
    ),
    "biogpt": ("biogpt", {}),
    "biogpt-untied": (
        "biogpt",
        {"scale_embedding": False, "tie_word_embeddings": False, "hidden_act": "relu"},
    ),
    "bitnet": ("bitnet", {}),
    "bitnet-biases": (
        "bitnet",
        {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": None}
        | {"hidden_act": "silu", "rms_norm_eps": 0.1},
    ),
    "bloom": ("bloom", {}),
    "bailing-moe": (
        "bailing_moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 2}
        | {"moe_intermediate_size": 24},
    ),
    "bailing-moe-all-experts": (
        "bailing_moe",
        {"num_experts": 4, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "head_dim": 16}
        | {"norm_topk_prob": False, "moe_intermediate_size": 24, "tie_word_embeddings": True},
    ),
    "internlm": ("internlm", {}),
    "domyn-edge": (
        "domyn_edge",
        {"position_layers": ["nope", "rope", "rope", "nope"], "head_sizes": [16, 8, 8, 24]}
        | {"window_sizes": [[-1, 0], [5, 0], [5, 0], [-1, 0]], "num_hidden_layers": 4},
    ),
    "pangu-embedded": ("pangu_embedded", {}),
    "pangu-embedded-plain": ("pangu_embedded", {"bias": False, "tie_word_embeddings": True}),
    "teleflm": ("teleflm", {"input_mult": 2.0, "output_mult": 3.0, "mup_scale_factor": 4.0}),
    "teleflm-plain": ("teleflm", {"use_mup": False, "input_mult": 2.0, "mup_scale_factor": 4.0}),
    "telechat2": ("telechat2", {"tie_word_embeddings": False}),
    "telechat2-long": (
        "telechat2",
        {"training_seqlen": 32768, "layer_norm_epsilon": 0.1, "num_key_value_heads": 6}
        | {"tie_word_embeddings": True},
    ),
    "internlm2": ("internlm2", {"bias": False}),
    "orion": ("orion", {}),
    "orion-tied": ("orion", {"tie_word_embeddings": True, "rms_norm_eps": 0.1}),
    "baichuan": ("baichuan", {}),
    "baichuan-biases": ("baichuan", {"model_max_length": 64}),
    "internlm2-biases": (
        "internlm2",
        {"num_key_value_heads": None, "tie_word_embeddings": True}
        | {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0}},
    ),
    "bloom-untied": ("bloom", {"tie_word_embeddings": False, "layer_norm_epsilon": 0.1}),
    "mpt": ("mpt", {"n_heads": 6}),
    "mpt-bounds": (
        "mpt",
        {"tie_word_embeddings": False, "n_heads": 4, "layer_norm_epsilon": 0.1}
        | {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}},
    ),
    "nemotron-h": ("nemotron_h", NEMOTRON),
    "nemotron-h-experts": ("nemotron_h", NEMOTRON_EXPERTS),
    "nemotron-h-groups": (
        "nemotron_h",
        NEMOTRON_EXPERTS | {"n_group": 3, "topk_group": 2, "norm_topk_prob": False},
    ),
    "nemotron-h-all-experts": ("nemotron_h", NEMOTRON_EXPERTS | {"num_experts_per_tok": 6}),
    "nemotron-h-puzzle": ("nemotron_h_puzzle", NEMOTRON_EXPERTS | {"block_configs": PUZZLE}),
    "nemotron-h-latent": ("nemotron_h", NEMOTRON_EXPERTS | {"moe_latent_size": 20}),
    "nemotron-h-latent-biases": (
        "nemotron_h",
        NEMOTRON_EXPERTS | {"moe_latent_size": 24, "mlp_bias": True, "num_experts_per_tok": 6},
    ),
    "nemotron-h-biases": (
        "nemotron_h",
        NEMOTRON
        | {"layers_block_type": ["mlp", FULL, LINEAR, LINEAR, "mlp", FULL], "use_bias": True}
        | {"mlp_bias": True},
    ),
    "laguna": ("laguna", LAGUNA),
    "laguna-all-experts": (
        "laguna",
        LAGUNA
        | {"num_experts_per_tok": 6, "gating": "per-element", "num_attention_heads_per_layer": None}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "tie_word_embeddings": True}
        | {"rope_parameters": {FULL: HALF_YARN, SLIDING: ROPE}},
    ),
    "lara-mini": ("lara_mini", LARA),
    "lara-mini-all-experts": (
        "lara_mini",
        LARA
        | {"num_experts_per_tok": 6, "tie_word_embeddings": False, "attention_bias": True}
        | {"linear_conv_kernel_dim": 3, "norm_topk_prob": False, "rope_parameters": YARN_ROPE},
    ),
    "lfm2": ("lfm2", LFM2),
    "lfm2-biases": (
        "lfm2",
        LFM2
        | {"conv_L_cache": 4, "conv_bias": True, "tie_word_embeddings": False, "head_dim": 12}
        | {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "conv", FULL]},
    ),
    "lfm2-moe": ("lfm2_moe", LFM2_EXPERTS),
    "lfm2-moe-all-experts": (
        "lfm2_moe",
        LFM2_EXPERTS
        | {"num_experts_per_tok": 6, "num_dense_layers": 0, "routed_scaling_factor": 2.5}
        | {"use_expert_bias": False, "norm_topk_prob": False},
    ),
    "lfm3": ("lfm3", LFM3),
    "lfm3-biases": (
        "lfm3",
        LFM3
        | {"conv_L_cache": 4, "conv_bias": True, "use_sandwich_norm": False, "norm_eps": 0.1}
        | {"use_attention_gate": False, "tie_word_embeddings": False, "num_key_value_heads": 6}
        | {"rope_parameters": {FULL: YARN_ROPE, SLIDING: LLAMA3_ROPE}},
    ),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 16}),
    "hunyuan-alpha": (
        "hunyuan_v1_dense",
        {"head_dim": 12, "attention_bias": True, "num_key_value_heads": None}
        | {"rope_parameters": ROPE | {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    ),
    "hunyuan-moe": (
        "hunyuan_v1_moe",
        {"head_dim": 16, "num_experts": 6, "moe_topk": 2, "intermediate_size": 24},
    ),
    "hunyuan-moe-all-experts": (
        "hunyuan_v1_moe",
        {"head_dim": 8, "num_experts": 3, "moe_topk": [3, 3, 3], "intermediate_size": 24}
        | {"tie_word_embeddings": True},
    ),
    "ministral": (
        "ministral",
        {"sliding_window": 7, "head_dim": 16}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": GROWING}),
    "ministral3-window": (
        "ministral3",
        {"head_dim": 8, "sliding_window": 7, "tie_word_embeddings": True}
        | {"rope_parameters": GROWING | {"mscale_all_dim": 1.2}},
    ),
    "mistral4": (
        "mistral4",
        LATENT
        | {"n_routed_experts": 12, "num_experts_per_tok": 3, "first_k_dense_replace": 1}
        | {"rope_parameters": GROWING | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "mistral4-all-experts": (
        "mistral4",
        LATENT
        | {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_shared_experts": 2}
        | {"q_lora_rank": None, "norm_topk_prob": False, "routed_scaling_factor": 1.5}
        | {"rope_interleave": False, "rope_parameters": GROWING | {"beta_fast": 16.0}}
        | {"attention_bias": True},
    ),
    "nanochat": ("nanochat", {}),
    "nanochat-biases": (
        "nanochat",
        {"attention_bias": True, "final_logit_softcapping": None, "rms_norm_eps": 0.1}
        | {"num_key_value_heads": 6, "tie_word_embeddings": True},
    ),
    "step3.5": ("step3p5", STEP),
    "step3.5-all-experts": (
        "step3p5",
        STEP
        | {"num_experts_per_tok": 6, "mlp_bias": True}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "swiglu_limits": [0.5, None, 0]}
        | {"layer_types": None, "partial_rotary_factors": None, "rope_theta": 1e5}
        | {"query_pre_attn_scalar": 9, "tie_word_embeddings": True},
    ),
    "sarvam-moe": ("sarvam_moe", SARVAM),
    "sarvam-moe-all-experts": (
        "sarvam_moe",
        SARVAM
        | {"n_routed_experts": 4, "num_experts_per_tok": 4, "use_qk_norm": False}
        | {"n_shared_experts": 2, "norm_topk_prob": False, "attention_bias": True}
        | {"n_group": 2, "topk_group": 2},
    ),
    "sarvam-mla": ("sarvam_mla", LATENT | GROUPS | {"q_lora_rank": None}),
    "sarvam-mla-all-experts": (
        "sarvam_mla",
        LATENT
        | {"n_routed_experts": 4, "num_experts_per_tok": 4, "rope_interleave": False}
        | {"first_k_dense_replace": 0, "rope_parameters": MSCALE_ROPE, "attention_bias": True},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-head-dim": ("mistral", {"sliding_window": 16, "head_dim": 12}),
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "mixtral-all-experts": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "eos_token_id": 5}),
    "olmoe-divided": (
        "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "eos_token_id": 5}
        | {"attention_bias": True, "num_key_value_heads": 6},
    ),
    "mixtral-window": ("mixtral", {"sliding_window": 7, "tie_word_embeddings": True}),
    "afmoe": ("afmoe", AFMOE),
    "afmoe-all-experts": (
        "afmoe",
        AFMOE
        | {"num_experts_per_tok": 6, "num_shared_experts": 1, "num_dense_layers": 0}
        | {"mup_enabled": False, "global_attn_every_n_layers": 2, "num_key_value_heads": None},
    ),
    "apertus": ("apertus", {}),
    "apertus-plain": (
        "apertus",
        {"hidden_act": "relu2", "attention_bias": True, "head_dim": 16, "rope_parameters": ROPE},
    ),
    "arcee": ("arcee", {}),
    "bailing-moe-v2": ("bailing_moe_v2", BAILING),
    "bailing-moe-v2-all-experts": (
        "bailing_moe_v2",
        BAILING
        | {"num_experts_per_tok": 12, "num_shared_experts": 2, "first_k_dense_replace": 0}
        | {"use_qk_norm": False, "topk_group": 4, "routed_scaling_factor": 1.0}
        | {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}},
    ),
    "decilm": ("decilm", {"block_configs": BLOCKS}),
    "mimo": ("mimo", {"head_dim": 16}),
    "minicpm": ("minicpm", {"scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 8}),
    "minicpm-untied": (
        "minicpm",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}
        | {"rope_parameters": YARN_ROPE},
    ),
    "exaone": ("exaone", {}),
    "exaone-bias": (
        "exaone",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "internlm3": ("internlm3", {"head_dim": 16}),
    "internlm3-bias": ("internlm3", {"attention_bias": True, "mlp_bias": True, "head_dim": None}),
    "iquestcoder": ("iquestcoder", {"head_dim": 16}),
    "arcee-bias": ("arcee", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "cohere": ("cohere", {"logit_scale": 0.3}),
    "stablelm-qk-norm": (
        "stablelm",
        {"qk_layernorm": True, "use_parallel_residual": True, "layer_norm_eps": 0.01},
    ),
    "cohere-qk-norm": ("cohere", {"use_qk_norm": True, "layer_norm_eps": 0.01}),
    "cohere-bias": ("cohere", {"attention_bias": True, "num_key_value_heads": 6}),
    "cohere2": ("cohere2", {"sliding_window": 7, "num_hidden_layers": 5, "head_dim": 16}),
    "cohere2-moe": (
        "cohere2_moe",
        COHERE_EXPERTS
        | {"num_hidden_layers": 6, "first_k_dense_replace": 1, "expert_selection_fn": "sigmoid"}
        | {"prefix_dense_intermediate_size": 40},
    ),
    "cohere2-moe-all-experts": (
        "cohere2_moe",
        COHERE_EXPERTS
        | {"num_experts_per_tok": 6, "attention_bias": True, "tie_word_embeddings": False}
        | {"shared_expert_combination_strategy": "sum", "rms_norm_eps": 1e-3}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "sliding_window_pattern": 2}
        | {"prefix_dense_sliding_window_pattern": 2},
    ),
    "cohere2-moe-undivided": (
        "cohere2_moe",
        COHERE_EXPERTS
        | {"num_shared_experts": 0, "expert_selection_fn": "sigmoid", "norm_topk_prob": False},
    ),
    "cohere2-bias": ("cohere2", {"sliding_window": 7, "attention_bias": True, "head_dim": 8}),
    "cwm": ("cwm", {"head_dim": 16, "sliding_window": 7, "num_hidden_layers": 5}),
    "cwm-bias": (
        "cwm",
        {"head_dim": 8, "layer_types": ["full_attention"] * 3}
        | {"mlp_bias": True, "tie_word_embeddings": True, "rope_parameters": ROPE},
    ),
    "hyperclovax": ("hyperclovax", FACTORS | {"logits_scaling": 0.2, "attention_bias": True}),
    "hyperclovax-no-post-norms": (
        "hyperclovax",
        {"use_post_norm": False, "head_dim": 12, "mlp_bias": True, "embedding_multiplier": 3.0},
    ),
    "jais2": ("jais2", {}),
    "jais2-no-biases": (
        "jais2",
        {"attention_bias": False, "mlp_bias": False, "hidden_act": "gelu", "head_dim": 16}
        | {"layer_norm_eps": 0.1, "tie_word_embeddings": True},
    ),
    "vaultgemma": ("vaultgemma", GEMMA),
    "vaultgemma-no-caps": (
        "vaultgemma",
        GEMMA
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "deepseek": (
        "deepseek",
        {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2}
        | {"moe_intermediate_size": 24, "first_k_dense_replace": 1},
    ),
    "deepseek-all-experts": (
        "deepseek",
        {"n_routed_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": True}
        | {"moe_intermediate_size": 24, "attention_bias": True, "num_key_value_heads": 6},
    ),
    "deepseek-v2": (
        "deepseek_v2",
        LATENT
        | {"n_routed_experts": 6, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
        | {"q_lora_rank": None, "routed_scaling_factor": 16.0, "rope_parameters": MSCALE_ROPE},
    ),
    "deepseek-v2-groups": (
        "deepseek_v2",
        LATENT
        | GROUPS
        | {"topk_method": "group_limited_greedy", "rms_norm_eps": 0.1, "attention_bias": True}
        | {"n_shared_experts": 1, "mlp_bias": True, "first_k_dense_replace": 1},
    ),
    "deepseek-v2-all-experts": (
        "deepseek_v2",
        LATENT | {"n_routed_experts": 4, "num_experts_per_tok": 4, "num_hidden_layers": 2},
    ),
    "deepseek-v3": (
        "deepseek_v3",
        LATENT | GROUPS | {"first_k_dense_replace": 1, "rope_parameters": MSCALE_ROPE},
    ),
    "deepseek-v32": (
        "deepseek_v32",
        LATENT | GROUPS | INDEXER | {"rope_parameters": MSCALE_ROPE, "first_k_dense_replace": 1},
    ),
    "deepseek-v32-all-experts": ("deepseek_v32", LATENT | INDEXER | ALL_CHOSEN),
    "glm-5-all-experts": ("glm_moe_dsa", LATENT | INDEXER | ALL_CHOSEN),
    "glm-5": (
        "glm_moe_dsa",
        LATENT
        | GROUPS
        | INDEXER
        | {"num_hidden_layers": 4, "indexer_types": ["full", "shared"] * 2},
    ),
    "glm-5-every-third": (
        "glm_moe_dsa",
        LATENT
        | GROUPS
        | INDEXER
        | {"num_hidden_layers": 4, "index_topk_freq": 3, "mlp_layer_types": ["sparse"] * 4},
    ),
    "deepseek-v3-other-groups": (
        "deepseek_v3",
        LATENT
        | GROUPS
        | {"n_group": 6, "topk_group": 5, "norm_topk_prob": False, "rope_interleave": False}
        | {"q_lora_rank": None, "attention_bias": True, "n_shared_experts": 2},
    ),
    "deepseek-v3-no-groups": (
        "deepseek_v3",
        LATENT
        | GROUPS
        | {"n_group": 1, "topk_group": 1, "kv_lora_rank": 33, "qk_rope_head_dim": 2},
    ),
    "deepseek-v3-all-experts": (
        "deepseek_v3",
        LATENT
        | {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 2, "topk_group": 2}
        | {"first_k_dense_replace": 1},
    ),
    "ernie4.5": ("ernie4_5", {"head_dim": 16}),
    "ernie4.5-bias": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "ernie4.5-moe": ("ernie4_5_moe", ERNIE),
    "ernie4.5-moe-some-layers": (
        "ernie4_5_moe",
        ERNIE
        | {"num_hidden_layers": 5, "moe_layer_end_index": 3, "moe_layer_interval": 2}
        | {"moe_num_shared_experts": 0, "tie_word_embeddings": False},
    ),
    "ernie4.5-moe-all-experts": ("ernie4_5_moe", ERNIE | {"moe_k": 6, "head_dim": 16}),
    "exaone-moe": ("exaone_moe", EXPERTS | EXAONE),
    "exaone-moe-all-experts": (
        "exaone_moe",
        EXPERTS
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "num_experts_per_tok": 6}
        | {"sliding_window": 7, "n_group": 2, "topk_group": 2, "num_shared_experts": 2}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "exaone4": ("exaone4", {"sliding_window": 7, "num_hidden_layers": 5}),
    "exaone4-no-window": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True}
        | {"rope_parameters": LLAMA3_ROPE},
    ),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma-untied": (
        "gemma",
        {"head_dim": 12, "tie_word_embeddings": False, "attention_bias": True}
        | {"hidden_act": "gelu"},
    ),
    "glm": ("glm", {"head_dim": 16}),
    "glm-no-bias": (
        "glm",
        {"head_dim": 16, "attention_bias": False}
        | {"rope_parameters": ROPE | {"rope_type": "default", "partial_rotary_factor": 0.25}},
    ),
    "glm4": ("glm4", {"head_dim": 16}),
    "glm4-moe": (
        "glm4_moe",
        GROUPS | {"moe_intermediate_size": 24, "head_dim": 16, "use_qk_norm": True},
    ),
    "glm4-moe-bias": (
        "glm4_moe",
        {"n_routed_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
        | {"head_dim": 8, "attention_bias": True, "first_k_dense_replace": 2},
    ),
    "glm4-moe-lite": ("glm4_moe_lite", LATENT | {"n_routed_experts": 6, "num_experts_per_tok": 2}),
    "glm4-moe-lite-all-experts": (
        "glm4_moe_lite",
        LATENT
        | {"n_routed_experts": 4, "num_experts_per_tok": 4, "attention_bias": True}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "glm4-quarter": (
        "glm4",
        {"head_dim": 16, "attention_bias": False}
        | {"rope_parameters": ROPE | {"rope_type": "default", "partial_rotary_factor": 0.25}},
    ),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "olmo3": ("olmo3", {"sliding_window": 7, "num_hidden_layers": 5}),
    "olmo3-yarn": (
        "olmo3",
        {"sliding_window": 7, "num_hidden_layers": 4}
        | {
            "rope_parameters": {
                "sliding_attention": ROPE | {"rope_type": "default"},
                "full_attention": YARN_ROPE,
            }
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 7}),
    "phi3-partial": (
        "phi3",
        {"rope_parameters": ROPE | {"rope_type": "default", "partial_rotary_factor": 0.75}},
    ),
    "phimoe": (
        "phimoe",
        {"num_local_experts": 6, "intermediate_size": 40, "router_jitter_noise": 0.3}
        | {"attention_bias": True, "lm_head_bias": True, "sliding_window": 7},
    ),
    "phimoe-longrope": (
        "phimoe",
        {"num_local_experts": 5, "intermediate_size": 40, "rope_parameters": MSCALES},
    ),
    "phimoe-all-experts": (
        "phimoe",
        {"num_local_experts": 2, "intermediate_size": 40, "router_jitter_noise": 9.0},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3-all-biases": (
        "smollm3",
        {"no_rope_layers": [0, 1, 0], "attention_bias": True}
        | {"mlp_bias": True, "tie_word_embeddings": False},
    ),
    "dbrx": (
        "dbrx",
        {"d_model": 48}
        | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 0.25, "rope_theta": 500.0}}
        | {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 2}},
    ),
    "dbrx-all-experts": (
        "dbrx",
        {
            "d_model": 48,
            "attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 3, "moe_top_k": 3}
            | {"moe_normalize_expert_weights": None},
        },
    ),
    "dots1": (
        "dots1",
        GROUPS
        | {"n_group": 1, "topk_group": 1, "n_shared_experts": 2, "moe_intermediate_size": 24}
        | {"sliding_window": 7, "max_window_layers": 1, "attention_bias": True}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
    ),
    "dots1-all-experts": (
        "dots1",
        {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_shared_experts": 1}
        | {"moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "solar-open": (
        "solar_open",
        GROUPS | {"moe_intermediate_size": 24, "head_dim": 16, "attention_bias": True},
    ),
    "solar-open-all-experts": (
        "solar_open",
        {"n_routed_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
        | {"head_dim": 8, "num_hidden_layers": 2},
    ),
    "youtu": ("youtu", {name: LATENT[name] for name in LATENT if "moe" not in name}),
    "flex-olmo": ("flex_olmo", {"num_experts": 6, "num_experts_per_tok": 2}),
    "flex-olmo-all-experts": (
        "flex_olmo",
        {"num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": True}
        | {"attention_bias": True, "num_key_value_heads": None},
    ),
    "flint": ("flint", FLINT),
    "flint-all-experts": (
        "flint",
        FLINT
        | {"num_experts_per_tok": 6, "norm_topk_prob": False, "attention_bias": True}
        | {"mlp_only_layers": [], "tie_word_embeddings": True, "rope_parameters": YARN_ROPE},
    ),
    "gemma2": ("gemma2", GEMMA),
    "gemma2-no-caps": (
        "gemma2",
        GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma2-low-caps": (
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.25},
    ),
    "gemma3": ("gemma3", GEMMA | {"num_hidden_layers": 7}),
    "gemma3-two-ropes": (
        "gemma3",
        GEMMA
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": {"sliding_attention": ROPE, "full_attention": LLAMA3_ROPE}}
        | {"tie_word_embeddings": False, "attention_bias": True},
    ),
    "gemma3n": ("gemma3n", GEMMA3N),
    "gemma3n-streams": (
        "gemma3n",
        GEMMA3N
        | {"altup_num_inputs": 3, "altup_active_idx": 1, "altup_correct_scale": False}
        | {"hidden_size_per_layer_input": 48}  # as wide as the stream
        | {"num_kv_shared_layers": 0, "intermediate_size": [40, 80, 80, 48, 80, 80]}
        | {"attention_bias": True, "tie_word_embeddings": False, "final_logit_softcapping": 0.5}
        | {"rope_parameters": {"sliding_attention": ROPE, "full_attention": LLAMA3_ROPE}},
    ),
    "gemma4": ("gemma4", GEMMA4 | {"hidden_size_per_layer_input": 0}),
    "gemma4-per-layer": (
        "gemma4",
        GEMMA4
        | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "num_hidden_layers": 6}
        | {"layer_types": ["sliding_attention", "full_attention"] * 3},
    ),
    "gemma4-two-digits": (
        "gemma4",
        GEMMA4
        | {"num_hidden_layers": 11, "num_kv_shared_layers": 4}
        | {
            "layer_types": ["sliding_attention"] * 2
            + ["full_attention"]
            + ["sliding_attention"] * 7
            + ["full_attention"]
        },
    ),
    "gemma4-experts": (
        "gemma4",
        GEMMA4
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
        | {"num_global_key_value_heads": 1, "enable_moe_block": True, "attention_bias": True}
        | {"num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "gemma4-all-experts": (
        "gemma4",
        GEMMA4
        | {"enable_moe_block": True, "num_experts": 3, "top_k_experts": 3}
        | {"moe_intermediate_size": 24, "final_logit_softcapping": 0.5},
    ),
    "gemma4-unified": (
        "gemma4_unified",
        GEMMA4
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0}
        | {"hidden_size_per_layer_input": 0, "num_hidden_layers": 2}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "granite-moe": ("granite_moe", GRANITE_MOE),
    "granite-moe-all-experts": (
        "granite_moe",
        GRANITE_MOE | {"num_experts_per_tok": 6, "attention_bias": True},
    ),
    "granite-moe-shared": ("granite_moe_shared", GRANITE_MOE | {"shared_intermediate_size": 36}),
    "granite-moe-shared-all-experts": (
        "granite_moe_shared",
        GRANITE_MOE | {"num_experts_per_tok": 6, "shared_intermediate_size": 20},
    ),
    "granite-moe-shared-none": ("granite_moe_shared", GRANITE_MOE | {"tie_word_embeddings": True}),
    "granite-swa": (
        "granite_swa",
        FACTORS
        | {"num_hidden_layers": 5, "sliding_window": 7, "layer_rope_theta": [0, 1e4, 50, 1e4, 0]},
    ),
    "granite-swa-biases": (
        "granite_swa",
        {"sliding_window": 7, "attention_bias": True, "mlp_bias": True}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
        | {"tie_word_embeddings": False},
    ),
    "granite-moe-swa": (
        "granite_moe_swa",
        GRANITE_MOE | {"sliding_window": 7, "shared_intermediate_size": 36},
    ),
    "granite-moe-swa-all-experts": (
        "granite_moe_swa",
        GRANITE_MOE
        | {"num_experts_per_tok": 6, "sliding_window": 7, "layer_rope_theta": [50, 0, 1e4]},
    ),
    "hy-v3": ("hy_v3", EXPERTS | {"head_dim": 16}),
    "beam": (
        "beam",
        EXPERTS
        | {"num_hidden_layers": 7, "num_experts": 12, "n_group": 4, "topk_group": 2}
        | {"sliding_window": 7, "head_dim": 16, "rms_norm_eps": 0.01, "num_experts_per_tok": 3},
    ),
    "beam-all-experts": (
        "beam",
        EXPERTS
        | {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "attention_bias": True}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "final_logit_softcapping": None}
        | {"rope_parameters": {"sliding_attention": None, "full_attention": {"rope_theta": 1e3}}},
    ),
    "deepseek-v4": ("deepseek_v4", ENTRIES | {"n_routed_experts": 6, "num_experts_per_tok": 2}),
    "deepseek-v4-all-experts": (
        "deepseek_v4",
        ENTRIES
        | {"n_routed_experts": 4, "num_experts_per_tok": 4, "index_topk": 200, "hc_mult": 3}
        | {"rope_parameters": YARN_ROPE, "scoring_func": "sigmoid", "mlp_bias": True},
    ),
    "longcat-flash": ("longcat_flash", LONGCAT | {"moe_topk": 4}),
    "longcat-flash-all-experts": ("longcat_flash", LONGCAT | {"moe_topk": 10}),
    "hy-v4": (
        "hy_v4",
        STREAMS
        | GROUPS
        | {"num_hidden_layers": 5, "indexer_types": [*["full", "shared"] * 2, "full"]},
    ),
    "hy-v4-all-experts": ("hy_v4", STREAMS | ALL_CHOSEN | {"hc_mult": 2, "hc_magnitude": 1.5}),
    "hy-v3-all-experts": (
        "hy_v3",
        EXPERTS
        | {"num_experts_per_tok": 6, "head_dim": 8, "num_shared_experts": 2, "mlp_bias": True}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True}
        | {"enable_moe_fp32_combine": False, "router_scaling_factor": 0.5},
    ),
    "mellum": (
        "mellum",
        EXPERTS
        | {"head_dim": 16, "sliding_window": 7, "mlp_layer_types": ["sparse", "sparse", "dense"]}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "mellum-all-experts": (
        "mellum",
        EXPERTS
        | {"num_experts_per_tok": 6, "head_dim": 16, "norm_topk_prob": False}
        | {"attention_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": {"full_attention": YARN_ROPE | {"rope_theta": 5e5}}},
    ),
    "minicpm3": (
        "minicpm3",
        {name: LATENT[name] for name in LATENT if "moe" not in name},
    ),
    "minicpm3-no-factors": (
        "minicpm3",
        {name: LATENT[name] for name in LATENT if "moe" not in name and "v_head" not in name}
        | {"q_lora_rank": None, "scale_depth": None, "dim_model_base": None, "scale_emb": 1}
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
        | {"rope_parameters": MSCALE_ROPE},
    ),
    "mimo-v2-flash": ("mimo_v2_flash", MIMO),
    "mimo-v2-flash-all-experts": (
        "mimo_v2_flash",
        MIMO
        | {"num_experts_per_tok": 6, "n_group": 2, "topk_group": 2, "norm_topk_prob": False}
        | {"attention_value_scale": None, "attention_bias": True, "routed_scaling_factor": 2.5}
        | {"mlp_layer_types": ["sparse", "dense"] * 2, "head_dim": 8, "v_head_dim": 14}
        | {"num_key_value_heads": 1, "rope_parameters": {FULL: ROPE, SLIDING: HALF_YARN}},
    ),
    "minimax-m2": ("minimax_m2", MINIMAX),
    "minimax-m2-all-experts": (
        "minimax_m2",
        MINIMAX | {"num_experts_per_tok": 6, "rotary_dim": 16},
    ),
    "minimax-m3": ("minimax_m3", M3),
    "minimax-m3-all-experts": (
        "minimax_m3",
        M3
        | {"num_experts_per_tok": 6, "index_topk_blocks": 4, "index_local_blocks": 2}
        | {"layer_types": None, "mlp_layer_types": None, "moe_layer_freq": [0, 1, 0]}
        | {"sparse_attention_config": {"sparse_attention_freq": [1, 1, 0]}, "swiglu_limit": 0.2}
        | {"tie_word_embeddings": True, "rope_parameters": YARN_ROPE},
    ),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4}
        | {"logits_scaling": 5.0, "attention_bias": True, "mlp_bias": True},
    ),
    "gpt2": ("gpt2", {}),
    "gpt2-untied": ("gpt2", {"n_inner": 72, "tie_word_embeddings": False, "n_head": 4}),
    "gpt-bigcode": ("gpt_bigcode", {}),
    "gpt-bigcode-all-heads": (
        "gpt_bigcode",
        {"n_inner": 72, "num_attention_heads": 4, "multi_query": False, "scale_attn_weights": False}
        | {"tie_word_embeddings": False},
    ),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-one-norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1}
        | {"ffn_hidden_size": 72, "bias": True, "tie_word_embeddings": False},
    ),
    "falcon-one-key": ("falcon", {"layer_norm_epsilon": 0.1}),
    "falcon-sequential": (
        "falcon",
        {"multi_query": False, "parallel_attn": False, "bias": True, "num_attention_heads": 4}
        | {"activation": "relu", "rope_parameters": ROPE | {"rope_theta": 500.0}},
    ),
    "cohere-compass": (
        "cohere_compass",
        {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 7}
        | {"rope_parameters": {FULL: None, SLIDING: {**ROPE, "mrope_section": [2, 1, 1]}}},
    ),
    "cohere-compass-ropes": (
        "cohere_compass",
        {"layer_types": [SLIDING, FULL, FULL], "sliding_window": 7, "attention_bias": True}
        | {"rope_parameters": {FULL: YARN_ROPE, SLIDING: ROPE}, "logit_scale": 0.3}
        | {"num_key_value_heads": None, "tie_word_embeddings": False},
    ),
    "codegen": ("codegen", {"n_inner": 80, "rotary_dim": 4}),
    "codegen-tied": (
        "codegen",
        {"rotary_dim": 12, "num_attention_heads": 4, "tie_word_embeddings": True},
    ),
    "gpt-neo": (
        "gpt_neo",
        {"window_size": 7, "attention_types": [[["global", "local"], 1], [["local"], 1]]},
    ),
    "gpt-neo-global": (
        "gpt_neo",
        {"attention_types": [[["global"], 3]], "tie_word_embeddings": False}
        | {"intermediate_size": None, "activation_function": "silu"},
    ),
    "gpt-neox": ("gpt_neox", {"num_attention_heads": 3}),
    "gpt-neox-sequential": (
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True}
        | {"hidden_act": "gelu_fast"}
        | {"rope_parameters": ROPE | {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "gpt-neox-japanese": ("gpt_neox_japanese", {}),
    "gpt-neox-japanese-untied": (
        "gpt_neox_japanese",
        {"tie_word_embeddings": False, "num_attention_heads": 3, "intermediate_multiple_size": 2}
        | {"hidden_act": "relu", "layer_norm_eps": 0.1}
        | {"rope_parameters": ROPE | {"rope_type": "default", "partial_rotary_factor": 0.25}},
    ),
    "gptj": ("gptj", {"n_inner": 80, "rotary_dim": 4}),
    "gptj-tied": ("gptj", {"rotary_dim": 8, "tie_word_embeddings": True}),
    "helium": ("helium", {"head_dim": 8}),
    "helium-bias": (
        "helium",
        {"head_dim": 8, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "nemotron": ("nemotron", {}),
    "nemotron-bias": (
        "nemotron",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "hidden_act": "silu"}
        | {"rope_parameters": ROPE | {"rope_type": "default", "partial_rotary_factor": 1.0}},
    ),
    "olmo": ("olmo", {}),
    "olmo-clip": ("olmo", {"clip_qkv": 0.25}),
    "olmo-bias": ("olmo", {"attention_bias": True, "tie_word_embeddings": True}),
    "phi4-multimodal": ("phi4_multimodal", PHI4_TOWERS),
    "phi4-multimodal-window": (
        "phi4_multimodal",
        PHI4_TOWERS
        | {"sliding_window": 7, "num_key_value_heads": None, "tie_word_embeddings": True}
        | {"original_max_position_embeddings": 256}
        | {
            "rope_parameters": ROPE
            | {"rope_type": "longrope", "partial_rotary_factor": 0.5}
            | {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
        },
    ),
    "phi": ("phi", {}),
    "phi-norms": ("phi", {"qk_layernorm": True}),
    "phi-tied": (
        "phi",
        {"tie_word_embeddings": True, "num_key_value_heads": 6}
        | {"rope_parameters": ROPE | {"rope_type": "default", "partial_rotary_factor": 0.25}},
    ),
    "kolibri1": ("kolibri1", KOLIBRI),
    "kolibri1-all-experts": (
        "kolibri1",
        KOLIBRI
        | {"num_experts_per_tok": 6, "norm_topk_prob": True, "layer_types": [FULL, SLIDING, FULL]}
        | {"tie_word_embeddings": True, "rope_parameters": YARN_ROPE},
    ),
    "modernbert-decoder": (
        "modernbert_decoder",
        {"local_attention": 12, "layer_types": [FULL, SLIDING, SLIDING]},
    ),
    "modernbert-decoder-biases": (
        "modernbert_decoder",
        {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True}
        | {"decoder_bias": False, "tie_word_embeddings": False, "classifier_activation": "silu"}
        | {"hidden_activation": "relu", "norm_eps": 0.1, "local_attention": 8},
    ),
    "openai-gpt": ("openai_gpt", {}),
    "openai-gpt-untied": (
        "openai_gpt",
        {"afn": "silu", "tie_word_embeddings": False, "layer_norm_epsilon": 0.1, "n_head": 4},
    ),
    "opt": ("opt", {"ffn_dim": 80}),
    "opt-untied": (
        "opt",
        {"ffn_dim": 72, "tie_word_embeddings": False, "enable_bias": False}
        | {"activation_function": "gelu"},
    ),
    "seed-oss": ("seed_oss", {"head_dim": 16}),
    "seed-oss-bias": (
        "seed_oss",
        {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "head_dim": 16},
    ),
    "stablelm": ("stablelm", {}),
    "stablelm-parallel": (
        "stablelm",
        {"use_parallel_residual": True, "use_qkv_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": ROPE | {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "xglm": ("xglm", {"ffn_dim": 80}),
    "xglm-untied": (
        "xglm",
        {"ffn_dim": 72, "scale_embedding": False, "tie_word_embeddings": False, "pad_token_id": 1}
        | {"activation_function": "relu", "attention_heads": 4},
    ),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-window": (
        "starcoder2",
        {"sliding_window": 7, "use_bias": False, "tie_word_embeddings": False},
    ),
    "llama4": (
        "llama4",
        LLAMA4
        | {"interleave_moe_layer_step": 2, "attn_scale": 0.7, "rope_parameters": LLAMA3_ROPE},
    ),
    "llama4-all-experts": (
        "llama4",
        LLAMA4
        | {"num_experts_per_tok": 6, "attention_bias": True, "use_qk_norm": False}
        | {"attn_temperature_tuning": False, "no_rope_layers": [0, 1, 1, 0], "moe_layers": [1, 3]}
        | {"layer_types": ["chunked_attention", "full_attention"] * 2, "rms_norm_eps": 1e-3},
    ),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "gpt-oss-all-experts": (
        "gpt_oss",
        GPT_OSS | {"num_experts_per_tok": 6, "rope_parameters": YARN_ROPE | {"truncate": False}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3-next": ("qwen3_next", DELTA_EXPERTS),
    "qwen3-next-dense": (
        "qwen3_next",
        DELTA_EXPERTS
        | {"mlp_only_layers": [1], "norm_topk_prob": False, "attention_bias": True}
        | {"linear_conv_kernel_dim": 3, "linear_num_value_heads": 2},
    ),
    "qwen3.5": ("qwen3_5", DELTA),
    "qwen3.5-wide": (
        "qwen3_5",
        DELTA
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention"]}
        | {"num_hidden_layers": 3, "linear_key_head_dim": 32, "linear_value_head_dim": 128}
        | {"linear_num_key_heads": 1, "tie_word_embeddings": True, "linear_conv_kernel_dim": 2}
        | {"rope_parameters": ROPE | {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "qwen3.5-moe": ("qwen3_5_moe", DELTA_EXPERTS),
    "qwen3.5-moe-all-experts": ("qwen3_5_moe", DELTA_EXPERTS | {"num_experts_per_tok": 6}),
    "qwen3-next-all-experts": ("qwen3_next", DELTA_EXPERTS | {"num_experts_per_tok": 6}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN_ROPE | {"rope_theta": 1e6}}),
    "qwen2-moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 36}),
    "qwen2-moe-window": (
        "qwen2_moe",
        EXPERTS
        | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
        | {"norm_topk_prob": True, "shared_expert_intermediate_size": 4, "qkv_bias": False},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "qwen3-moe": ("qwen3_moe", EXPERTS),
    "qwen3-moe-some-layers": (
        "qwen3_moe",
        EXPERTS
        | {"norm_topk_prob": True, "head_dim": 16, "decoder_sparse_step": 2}
        | {"mlp_only_layers": [1], "num_hidden_layers": 4, "attention_bias": True},
    ),
    "qwen3-moe-window": (
        "qwen3_moe",
        EXPERTS | {"use_sliding_window": True, "sliding_window": 9, "num_experts_per_tok": 6},
    ),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


VARIANTS_OF_ROUTERS = {
    "step3.5-all-experts",
    "sarvam-mla-all-experts",
    "sarvam-moe-all-experts",
    "laguna-all-experts",
    "aria-all-experts",
    "axk1-all-experts",
    "axk2-all-experts",
    "kolibri1-all-experts",
    "flint-all-experts",
    "deepseek-all-experts",
    "ling-3-all-experts",
    "lara-mini-all-experts",
    "bailing-moe-v2-all-experts",
    "bailing-moe-all-experts",
    "afmoe-all-experts",
    "dbrx-all-experts",
    "cohere2-moe-all-experts",
    "cohere2-moe-undivided",
    "deepseek-v2",
    "deepseek-v2-all-experts",
    "deepseek-v3-all-experts",
    "deepseek-v3-no-groups",
    "dots1-all-experts",
    "ernie4.5-moe-all-experts",
    "exaone-moe-all-experts",
    "flex-olmo-all-experts",
    "glm4-moe-bias",
    "glm4-moe-lite-all-experts",
    "llama4-all-experts",
    "granite-moe-all-experts",
    "granite-moe-shared-all-experts",
    "granite-moe-shared-none",
    "granite-moe-swa-all-experts",
    "hy-v3-all-experts",
    "beam-all-experts",
    "hy-v4-all-experts",
    "deepseek-v4-all-experts",
    "mellum-all-experts",
    "hunyuan-moe-all-experts",
    "mimo-v2-flash-all-experts",
    "minimax-m2-all-experts",
    "minimax-m3-all-experts",
    "longcat-flash-all-experts",
    "mistral4-all-experts",
    "phimoe-all-experts",
    "solar-open-all-experts",
}
"""Cases that repeat what others show of latent attention and of routers in groups."""


SAME_MODULE = {"ministral": "mistral", "nemotron_h_puzzle": "nemotron_h"}
"""Families of transformers, and recipes, that are one here."""
PUBLISHED = {
    *("Contriever", "DPRContextEncoder", "DPRQuestionEncoder", "HF_ColBERT"),
    *("GteNewModel", "NewModel", "VoyageQwen3BidirectionalEmbedModel", "BgeM3EmbeddingModel"),
    *("ColBERTJinaRobertaModel", "ColBERTLfm2Model", "ColBERTModernBertModel"),
    *("Lfm2BidirP2ForTokenClassification", "JinaEmbeddingsV5Model"),
}
"""Encoders under names that transformers has not, or without a suffix."""
HEADS = {"dflash", "eagle", "medusa"}
"""The families of models that draft for others."""
OTHER_NAMES = {"chatglm"}
"""A family of transformers with its authors' names of fields and weights, of test_chatglm.py."""


def test_every_architecture_has_a_case() -> None:
    """Those that generate have one here, the others in tests/e2e/test_pooling_models.py and
    test_published_encoders.py, those with an encoder in tests/conformance/gpu_whisper.py and
    tests/support/encoder_texts.py and sound_encoders.py, and those that draft for others in
    tests/e2e/test_draft_heads.py."""
    others = TEXT_MODELS.keys() | PUBLISHED
    others |= {name for name, family in ARCHITECTURES.items() if family in HEADS}
    plain = {name: family for name, family in ARCHITECTURES.items() if name not in others}
    encoders = {name for name in plain if name.endswith("Model")}
    encoders = {name for name in encoders if not name.endswith(("LMHeadModel", "MTModel"))}
    generating = {family for name, family in plain.items() if name not in encoders}
    generating -= {"whisper", *(kind for kind, _ in encoder_texts.RECIPES.values())}
    generating -= {recipe.kind for recipe in sound_encoders.RECIPES.values()}
    generating -= OTHER_NAMES
    assert generating == {SAME_MODULE.get(family, family) for family, _ in CASES.values()}
    assert encoders <= {f"{family}Model" for family, _ in RECIPES.values()}


@pytest.mark.parametrize(
    ("case", "scale"),
    diagonal([case for case in CASES if case not in VARIANTS_OF_ROUTERS], [1.0, 4.0])
    + [slow(*each) for each in itertools.product(sorted(VARIANTS_OF_ROUTERS), [1.0, 4.0])],
)
def test_float32_logits_equal_transformers(case: str, scale: float, tmp_path: Path) -> None:
    family, options = CASES[case]
    reference = reference_model(family, scale, **options)
    model = load(save(reference, tmp_path))
    expected = reference_logits(reference, TOKENS)
    ours = our_logits(model, TOKENS)
    assert_logits_close(ours, expected, 1e-4)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


BFLOAT16 = [
    "deepseek-v32-all-experts",
    "deepseek-v4-all-experts",
    "glm-5-all-experts",
    "laguna-all-experts",
    "aria-all-experts",
    "axk1-all-experts",
    "axk2-all-experts",
    "kolibri1-all-experts",
    "flint-all-experts",
    "deepseek-all-experts",
    "bailing-moe-v2-all-experts",
    "afmoe-all-experts",
    "cohere2-moe-all-experts",
    "apertus",
    "apertus1p5",
    "arcee",
    "persimmon",
    "biogpt",
    "cohere-compass",
    "modernbert-decoder",
    "phi4-multimodal",
    "xglm",
    "gpt-neox-japanese",
    "openai-gpt",
    "bitnet",
    "bloom",
    "mpt",
    "bailing-moe-all-experts",
    "domyn-edge",
    "pangu-embedded",
    "teleflm",
    "telechat2",
    "internlm",
    "internlm2",
    "orion",
    "baichuan",
    "decilm",
    "mimo",
    "minicpm",
    "exaone",
    "internlm3",
    "iquestcoder",
    "zamba2",
    "bamba",
    "falcon-h1",
    "falcon-mamba",
    "granite-hybrid-all-experts",
    "granite-moe-all-experts",
    "granite-moe-shared-all-experts",
    "hunyuan-alpha",
    "hunyuan-moe-all-experts",
    "granite-swa",
    "granite-moe-swa-all-experts",
    "hy-v3-all-experts",
    "beam-all-experts",
    "hy-v4-all-experts",
    "llama4-all-experts",
    "mellum-all-experts",
    "minicpm3",
    "mimo-v2-flash-all-experts",
    "minimax-all-experts",
    "minimax-m2-all-experts",
    "minimax-m3-all-experts",
    "ministral",
    "ministral3",
    "mistral4-all-experts",
    "nanochat",
    "jamba-all-experts",
    "kimi-linear-all-experts",
    "ling-3-all-experts",
    "mamba",
    "mamba2",
    "nemotron-h-all-experts",
    "nemotron-h-latent-biases",
    "cohere",
    "cohere2",
    "cwm",
    "hyperclovax",
    "jais2",
    "vaultgemma",
    "deepseek-v2-all-experts",
    "deepseek-v3-all-experts",
    "dbrx-all-experts",
    "dots1-all-experts",
    "ernie4.5",
    "ernie4.5-moe-all-experts",
    "exaone-moe-all-experts",
    "exaone4",
    "flex-olmo-all-experts",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4-per-layer",
    "gemma4-unified",
    "glm",
    "glm4",
    "glm4-moe-bias",
    "glm4-moe-lite-all-experts",
    "gpt-oss-all-experts",  # near-ties of a router would choose other experts
    "gpt2",
    "falcon",
    "gpt-bigcode",
    "codegen",
    "gpt-neo",
    "gpt-neox",
    "gptj",
    "granite",
    "lfm2",
    "lfm2-moe-all-experts",
    "lfm3",
    "lara-mini-all-experts",
    "longcat-flash-all-experts",
    "helium",
    "llama-yarn",
    "mistral-window",
    "mixtral-all-experts",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmo-hybrid",
    "olmoe",
    "opt",
    "phi",
    "phi3",
    "phimoe-all-experts",
    "qwen2-tied",
    "qwen3-next-all-experts",
    "qwen3.5",
    "qwen3.5-moe-all-experts",
    "qwen2-moe",
    "qwen3-tied",
    "qwen3-moe",
    "sarvam-mla-all-experts",
    "sarvam-moe-all-experts",
    "seed-oss",
    "smollm3",
    "solar-open-all-experts",
    "stablelm",
    "starcoder2",
    "step3.5-all-experts",
    "youtu",
]


def test_every_family_has_a_case_in_bfloat16() -> None:
    families = {family for family, _ in CASES.values()} - {"nemotron_h_puzzle"}  # is Nemotron-H
    assert {CASES[case][0] for case in BFLOAT16} == families


SLOW_IN_BFLOAT16 = {*VARIANTS_OF_ROUTERS, "youtu"} - {
    "deepseek-v2-all-experts",
    "deepseek-v3-all-experts",
    "glm4-moe-lite-all-experts",
}


@pytest.mark.parametrize(
    "case", [slow(case) if case in SLOW_IN_BFLOAT16 else case for case in BFLOAT16]
)
def test_bfloat16_logits_are_nearer_to_float32_than_transformers(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    reference = reference_model(family, 1.0, "bfloat16", **options)
    model = load(save(reference, tmp_path), torch.bfloat16)
    rounded = reference_logits(reference, TOKENS).float()
    exact = reference_logits(reference.float(), TOKENS)
    error = (our_logits(model, TOKENS).float() - exact).abs().max()
    assert 0 < error <= (rounded - exact).abs().max()
    assert_logits_close(rounded, exact, 0.2)


def test_one_token_runs(tmp_path: Path) -> None:
    reference = reference_model("qwen3")
    model = load(save(reference, tmp_path))
    assert_logits_close(our_logits(model, [5]), reference_logits(reference, [5]), 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_all_storage_comes_from_the_allocator(
    tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = load(save(reference_model("qwen2", tie_word_embeddings=tied), tmp_path), dtype)
    shapes: list[tuple[int, ...]] = []

    def count(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        shapes.append(shape)
        return torch.empty(shape, dtype=dtype, device="meta")

    create_model(model.config, dtype, count)
    storages = {
        view.untyped_storage().data_ptr(): view.untyped_storage().nbytes()
        for views in model.named_weights().values()
        for view in views
    }
    num_values = sum(torch.Size(shape).numel() for shape in shapes)
    assert sum(storages.values()) == num_values * dtype.itemsize
    assert len(storages) == len(shapes)
    assert sum(97 in shape for shape in shapes) == (1 if tied else 2)


def test_weights_can_be_updated_in_place(tmp_path: Path) -> None:
    first, second = reference_model("qwen3"), reference_model("qwen3", 2.0)
    model = load(save(first, tmp_path))
    updated = dict(second.state_dict())
    for name, views in model.named_weights().items():
        for view in views:
            view.copy_(updated[name])
    assert_logits_close(our_logits(model, TOKENS), reference_logits(second, TOKENS), 1e-4)
