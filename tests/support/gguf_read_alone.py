"""Models whose GGUF files are read, and not written."""

from __future__ import annotations

from typing import Any

Options = dict[str, Any]

_EXPERTS: Options = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_QWEN35: Options = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_LATENT: Options = _EXPERTS | {
    "n_routed_experts": 6,
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
_YARN: Options = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
_GEMMA4: Options = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 7,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 9.0,  # llama.cpp caps at 30 where a file does not say it
    "tie_word_embeddings": True,
}
_GEMMA3N: Options = {
    "num_hidden_layers": 11,
    "num_kv_shared_layers": 0,
    "layer_types": (["sliding_attention", "full_attention"] * 6)[:11],
    "sliding_window": 7,
    "head_dim": 16,
    "intermediate_size": 256,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 256,  # as llama.cpp has it whatever the file says
    "laurel_rank": 64,
    "tie_word_embeddings": True,
}
_MIMO: Options = _EXPERTS | {
    "num_hidden_layers": 4,
    "n_routed_experts": 6,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": 7,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}
_GLM4: Options = _EXPERTS | {"n_routed_experts": 6, "head_dim": 16}
_FALCON_H1: Options = {
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
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
_NEMOTRON: Options = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
    "head_dim": 16,
}
READ_ALONE: dict[str, tuple[str, Options]] = {
    "internlm2": ("internlm2", {"bias": False}),
    "ling 1": (
        "bailing_moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2}
        | {"moe_intermediate_size": 24},
    ),
    "mimo v2 flash": ("mimo_v2_flash", _MIMO),
    "mimo v2 flash without a factor": (
        "mimo_v2_flash",
        _MIMO | {"attention_value_scale": None, "mlp_layer_types": ["sparse", "dense"] * 2},
    ),
    "qwen3.5": ("qwen3_5", _QWEN35 | {"linear_num_value_heads": 2}),
    "qwen3.5 with value heads in turn": ("qwen3_5", _QWEN35 | {"linear_num_value_heads": 6}),
    "qwen3.5 with experts": (
        "qwen3_5_moe",
        _QWEN35
        | _EXPERTS
        | {"linear_num_value_heads": 4, "num_experts": 6, "shared_expert_intermediate_size": 36},
    ),
    "the language model of qwen3 vl with experts": (
        "qwen3_moe",
        _EXPERTS
        | {"num_experts": 6, "head_dim": 16, "norm_topk_prob": True}
        | {"sections": [3, 3, 2, 0]},
    ),
    "qwen3 next": (
        "qwen3_next",
        _QWEN35
        | _EXPERTS
        | {"linear_num_value_heads": 4, "num_experts": 6, "shared_expert_intermediate_size": 36},
    ),
    "gemma 3n": ("gemma3n", _GEMMA3N),
    "gemma 4": ("gemma4", _GEMMA4),
    "gemma 4 with inputs of layers": (
        "gemma4",
        _GEMMA4
        | {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2}
        | {"use_double_wide_mlp": True},
    ),
    "gemma 4 with experts": (
        "gemma4",
        _GEMMA4
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 3, "enable_moe_block": True}
        | {"num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "glm4 with experts": ("glm4_moe", _GLM4 | {"use_qk_norm": True, "attention_bias": True}),
    "glm4 with experts and no norms of heads": (
        "glm4_moe",
        _GLM4 | {"n_shared_experts": 2, "routed_scaling_factor": 2.5},
    ),
    "deepseek v2": ("deepseek_v2", _LATENT | {"routed_scaling_factor": 16.0}),
    "deepseek v3": (
        "deepseek_v3",
        _LATENT | {"rope_parameters": _YARN, "n_group": 1, "topk_group": 1},
    ),
    "deepseek v3 with groups": (
        "deepseek_v3",
        _LATENT
        | {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    ),
    "glm4.7 flash": ("glm4_moe_lite", _LATENT),
    "youtu": (
        "youtu",
        {k: v for k, v in _LATENT.items() if k not in (*_EXPERTS, "n_routed_experts")},
    ),
    "falcon-h1": ("falcon_h1", _FALCON_H1),
    "falcon-h1 with norms": (
        "falcon_h1",
        _FALCON_H1 | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "nemotron-h": ("nemotron_h", _NEMOTRON),
    "nemotron-h with experts": (
        "nemotron_h",
        _NEMOTRON
        | _EXPERTS
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]}
        | {"n_routed_experts": 6, "moe_shared_expert_intermediate_size": 40}
        | {"routed_scaling_factor": 1.5},
    ),
    "nemotron-h with experts of latents": (
        "nemotron_h",
        _NEMOTRON
        | _EXPERTS
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]}
        | {"n_routed_experts": 6, "moe_shared_expert_intermediate_size": 40}
        | {"moe_latent_size": 32},
    ),
}
"""By name: the family, and the options of a small model of transformers."""
