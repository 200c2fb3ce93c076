"""Small real models, made by transformers, and what transformers says they generate."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from support.auto_model import model_of
from support.one_thread import one_thread
from support.remote_decoders import (
    BaichuanConfig,
    DomynEdgeConfig,
    InternLM2Config,
    InternLMConfig,
    OrionConfig,
    PanguEmbeddedConfig,
    TeleChat2Config,
    TeleFLMConfig,
)
from support.remote_mixtures import BailingMoeConfig, BailingMoeV2Config, DeepseekConfig
from support.scoring import choices
from support.variants import diagonal, slow

from shmllm.frontend.model_files import resolve_model

NUM_PROMPTS = 32
EOS = 0
MAX_TOKENS = 24
"""More than a block: the sequence of each prompt grows into another one."""
WEIGHT_SCALE = 4.0
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
INDEXER: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 24, "index_topk": 7}
"""So many heads that no score is a sum of zeros, which others would equal."""
BLOCKS_CHOSEN: dict[str, Any] = {
    "head_dim": 16,
    "num_key_value_heads": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "intermediate_size": 24,
    "dense_intermediate_size": 40,
    "shared_intermediate_size": 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
"""A small MiniMax M3, but for the numbers of layers, experts and blocks."""
PHI4_TOWERS: dict[str, Any] = {
    "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    | {"num_attention_heads": 2, "image_size": 28, "crop_size": 28},
    "audio_config": {"hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "input_size": 16}
    | {"num_attention_heads": 2, "ext_pw_out_channel": 16, "nemo_conv_channels": 16}
    | {"depthwise_separable_out_channel": 16, "bias_max_distance": 10},
    "bos_token_id": 0,
}
ENTRIES: dict[str, Any] = {
    **{"num_key_value_heads": 1, "head_dim": 10, "q_lora_rank": 28, "partial_rotary_factor": 0.4},
    "layer_types": [
        *("sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"),
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    **{"sliding_window": 7, "o_groups": 2, "o_lora_rank": 12, "num_hash_layers": 1},
    **{"index_n_heads": 16, "index_head_dim": 6, "index_topk": 5, "swiglu_limit": 0.1},
}
"""A layer of each kind that DeepSeek V4 has."""
"""Small towers of Phi-4 Multimodal, which are not computed."""
ROUTER: dict[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
}
GRANITE_MOE: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
GROWING: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.3,
}
LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
MAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": 48, "head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", SHARED_EXPERT),
    "qwen3_next": ("Qwen3Next", DELTA_NET | SHARED_EXPERT),
    "qwen3_5": ("Qwen3_5Text", DELTA_NET),
    "qwen3_5_moe": ("Qwen3_5MoeText", DELTA_NET | SHARED_EXPERT),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "head_dim": 32,
        },
    ),
    "deepseek_v2": ("DeepseekV2", LATENT | {"topk_method": "greedy", "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3", LATENT | {"n_group": 4, "topk_group": 2}),
    "deepseek_v32": ("DeepseekV32", LATENT | INDEXER | {"n_group": 4, "topk_group": 2}),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        LATENT | INDEXER | {"index_topk_freq": 2, "index_skip_topk_offset": 1},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "use_qk_norm": True,
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLite", LATENT),
    "dots1": (
        "Dots1",
        {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
        | {"n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
    ),
    "cohere2": ("Cohere2", {"sliding_window": 48, "num_hidden_layers": 4}),
    "cohere2_moe": (
        "Cohere2Moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 2, "head_dim": 16}
        | {"expert_selection_fn": "sigmoid", "sliding_window": 48, "num_hidden_layers": 5}
        | {"first_k_dense_replace": 1, "intermediate_size": 32},
    ),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 48}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "deepseek": (
        "Deepseek",
        {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2}
        | {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    ),
    "bailing_moe_v2": (
        "BailingMoeV2",
        ROUTER | {"head_dim": 16, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    ),
    "afmoe": (
        "Afmoe",
        ROUTER
        | {"num_hidden_layers": 5, "head_dim": 16, "sliding_window": 48}
        | {"mup_enabled": True, "route_scale": 1.5},
    ),
    "apertus": ("Apertus", {}),
    "apertus1p5": ("Apertus1p5Text", {"output_vocab_size": 3000}),
    "arcee": ("Arcee", {}),
    "aria": ("AriaText", {"moe_num_experts": 16, "moe_topk": 4, "intermediate_size": 32}),
    "axk1": ("AXK1", LATENT | {"n_group": 4, "topk_group": 2}),
    "axk2": ("AXK2", LATENT | INDEXER),
    "persimmon": ("Persimmon", {}),
    "biogpt": ("BioGpt", {}),
    "cohere_compass": (
        "CohereCompassText",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"sliding_window": 48}
        | {"rope_parameters": {"full_attention": None, "sliding_attention": dict(ROPE)}},
    ),
    "xglm": ("XGLM", {"ffn_dim": 96}),
    "gpt_neox_japanese": ("GPTNeoXJapanese", {"intermediate_multiple_size": 2}),
    "kolibri1": (
        "Kolibri1",
        ROUTER
        | {"head_dim": 16, "sliding_window": 48, "shared_expert_intermediate_size": 48}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "flint": (
        "Flint",
        ROUTER
        | {"head_dim": 16, "sliding_window": 48, "shared_expert_intermediate_size": 48}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"mlp_only_layers": [0]},
    ),
    "modernbert_decoder": (
        "ModernBertDecoder",
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {"local_attention": 96},
    ),
    "phi4_multimodal": ("Phi4Multimodal", PHI4_TOWERS),
    "openai_gpt": ("OpenAIGPT", {}),
    "bitnet": ("BitNet", {}),
    "bloom": ("Bloom", {"intermediate_size": 256}),
    "mpt": ("Mpt", {"intermediate_size": 256}),
    "exaone": ("Exaone", {}),
    "domyn_edge": (
        "DomynEdge",
        {"position_layers": ["nope", "rope", "rope"], "head_sizes": [32, 16, 16]}
        | {"window_sizes": [[-1, 0], [48, 0], [48, 0]]},
    ),
    "pangu_embedded": ("PanguEmbedded", {}),
    "telechat2": ("TeleChat2", {"ffn_hidden_size": 96}),
    "teleflm": ("TeleFLM", {"input_mult": 2.0, "output_mult": 3.0, "mup_scale_factor": 4.0}),
    "internlm": ("InternLM", {"num_key_value_heads": 4}),
    "internlm2": ("InternLM2", {"bias": False}),
    "bailing_moe": (
        "BailingMoe",
        {"num_experts": 16, "num_experts_per_tok": 4, "num_shared_experts": 2}
        | {"moe_intermediate_size": 32, "first_k_dense_replace": 1},
    ),
    "orion": ("Orion", {}),
    "baichuan": ("Baichuan", {"num_key_value_heads": 4}),
    "baichuan_13b": ("Baichuan", {"num_key_value_heads": 4, "model_max_length": 2048}),
    "internlm3": ("InternLM3", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "cwm": ("Cwm", {"head_dim": 16, "sliding_window": 48, "num_hidden_layers": 5}),
    "hyperclovax": (
        "HyperCLOVAX",
        {"residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 0.5},
    ),
    "jais2": ("Jais2", {}),
    "vaultgemma": ("VaultGemma", {"head_dim": 16, "sliding_window": 48}),
    "cohere": ("Cohere", {"attention_bias": True, "use_qk_norm": True}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 16, "moe_k": 4, "moe_intermediate_size": 32},
    ),
    "exaone_moe": ("ExaoneMoe", ROUTER | {"num_hidden_layers": 5, "sliding_window": 48}),
    "flex_olmo": ("FlexOlmo", {"num_experts": 8, "num_experts_per_tok": 3}),
    "exaone4": ("Exaone4", {"sliding_window": 48, "num_hidden_layers": 5}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "glm": ("Glm", {"head_dim": 16}),
    "falcon": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon_7b": ("Falcon", {"ffn_hidden_size": 96}),
    "gpt_bigcode": ("GPTBigCode", {"n_inner": 96}),
    "codegen": ("CodeGen", {"n_inner": 96, "rotary_dim": 8}),
    "gpt_neo": (
        "GPTNeo",
        {"window_size": 48, "attention_types": [[["global", "local"], 1], [["local"], 1]]},
    ),
    "gpt_neox": ("GPTNeoX", {}),
    "gptj": ("GPTJ", {"n_inner": 96, "rotary_dim": 8}),
    "helium": ("Helium", {"head_dim": 16}),
    "nemotron": ("Nemotron", {}),
    "olmo": ("Olmo", {"clip_qkv": 1.0}),
    "phi": ("Phi", {"num_key_value_heads": 4}),
    "opt": ("OPT", {"ffn_dim": 96}),
    "seed_oss": ("SeedOss", {"head_dim": 16, "attention_out_bias": True}),
    "stablelm": ("StableLm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": 48}),
    "gpt2": ("GPT2", {"n_inner": 96}),
    "granite": ("Granite", {"residual_multiplier": 0.4, "attention_multiplier": 0.3}),
    "granite_moe": ("GraniteMoe", GRANITE_MOE),
    "granite_moe_shared": ("GraniteMoeShared", GRANITE_MOE | {"shared_intermediate_size": 48}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"head_dim": 16}),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        {"head_dim": 16, "num_experts": 8, "moe_topk": 3, "intermediate_size": 32},
    ),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": GROWING}),
    "mistral4": (
        "Mistral4",
        LATENT | {"kv_lora_rank": 24, "first_k_dense_replace": 0, "rope_parameters": dict(GROWING)},
    ),
    "nanochat": ("NanoChat", {}),
    "granite_moe_swa": (
        "GraniteMoeSWA",
        GRANITE_MOE
        | {"shared_intermediate_size": 48, "sliding_window": 48, "num_hidden_layers": 4}
        | {"layer_rope_theta": [0, 1e4, 5e4, 1e4]},
    ),
    "granite_swa": ("GraniteSWA", {"sliding_window": 48, "num_hidden_layers": 5}),
    "dbrx": (
        "Dbrx",
        {"d_model": 64}
        | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 1e4}}
        | {"ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 3}},
    ),
    "phimoe": (
        "Phimoe",
        {"num_local_experts": 8, "intermediate_size": 32, "router_jitter_noise": 0.3}
        | {"attention_bias": True},
    ),
    "hy_v3": ("HYV3", ROUTER | {"head_dim": 16}),
    "beam": (
        "Beam",
        ROUTER
        | {"n_group": 4, "topk_group": 2, "head_dim": 16}
        | {"sliding_window": 48, "num_hidden_layers": 5},
    ),
    "hy_v4": (
        "HYV4",
        LATENT | INDEXER | {"indexer_types": ["full", "shared", "full"], "swiglu_limit": 2.0},
    ),
    "deepseek_v4": ("DeepseekV4", ROUTER | ENTRIES | {"hc_sinkhorn_iters": 6}),
    "longcat_flash": (
        "LongcatFlash",
        {name: value for name, value in LATENT.items() if name != "first_k_dense_replace"}
        | {"zero_expert_num": 8, "head_dim": 8, "num_hidden_layers": 4},
    ),
    "mellum": (
        "Mellum",
        ROUTER
        | {"head_dim": 16, "sliding_window": 48}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "laguna": (
        "Laguna",
        ROUTER
        | {"head_dim": 16, "sliding_window": 48, "shared_expert_intermediate_size": 48}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
        | {"num_attention_heads_per_layer": [2, 4, 6]},
    ),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {
            "num_key_value_heads": 1,
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": 48,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
        },
    ),
    "step3p5": (
        "Step3p7Text",
        {"head_dim": 16, "sliding_window": 48, "num_sliding_attention_heads": 6}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
        | {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
        | {"share_expert_dim": 48, "moe_layers_enum": "1,2", "swiglu_limits": [0, 0, 0.3]}
        | {"swiglu_limits_shared": [0, 0, 0.2]},
    ),
    "sarvam_moe": (
        "SarvamMoE",
        {"head_dim": 16, "n_routed_experts": 16, "num_experts_per_tok": 4}
        | {"moe_intermediate_size": 32, "n_group": 4, "topk_group": 2},
    ),
    "sarvam_mla": ("SarvamMLA", LATENT | {"q_lora_rank": None}),
    "minicpm3": (
        "MiniCPM3",
        {name: LATENT[name] for name in LATENT if name.endswith(("rank", "dim", "heads"))},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {"num_local_experts": 16, "num_experts_per_tok": 4, "head_dim": 16, "rotary_dim": 8},
    ),
    "minimax_m3": (
        "MiniMaxM3VLText",
        BLOCKS_CHOSEN
        | {"num_local_experts": 16, "num_experts_per_tok": 4, "index_block_size": 32}
        | {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 2], "index_topk_blocks": 4}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "olmo2": ("Olmo2", {"num_key_value_heads": 4}),
    "olmo3": ("Olmo3", {"sliding_window": 48, "num_hidden_layers": 5}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "phi3": ("Phi3", {"sliding_window": 48}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 48, "num_hidden_layers": 7}),
    "gemma3n": (
        "Gemma3nText",
        {
            "head_dim": 16,
            "sliding_window": 48,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 4000,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.0, 0.0],
        },
    ),
    "gemma4": (
        "Gemma4Text",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 48,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 4096,
            "hidden_size_per_layer_input": 16,
        },
    ),
    "bamba": ("Bamba", MAMBA | {"attn_layer_indices": [1]}),
    "falcon_h1": (
        "FalconH1",
        MAMBA
        | {"num_hidden_layers": 2, "mamba_d_state": 16, "mamba_d_ssm": 128, "head_dim": 32}
        | {"embedding_multiplier": 3.0, "key_multiplier": 0.4}
        | {"attention_in_multiplier": 0.7, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6}
        | {"ssm_multipliers": [0.9, 0.7, 0.8, 1.1, 0.6], "mlp_multipliers": [0.88, 0.59]},
    ),
    "falcon_mamba": ("FalconMamba", {"intermediate_size": 128, "mixer_rms_eps": 0.01}),
    "granite_moe_hybrid": (
        "GraniteMoeHybrid",
        MAMBA
        | {"layer_types": LAYERS, "num_local_experts": 8, "residual_multiplier": 0.4}
        | {"intermediate_size": 32, "shared_intermediate_size": 48, "attention_multiplier": 0.3},
    ),
    "jamba": (
        "Jamba",
        {"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 8},
    ),
    "kimi_linear": (
        "KimiLinear",
        {name: LATENT[name] for name in LATENT if name.endswith(("rank", "dim", "heads"))}
        | {"layer_types": LAYERS, "num_hidden_layers": 4, "q_lora_rank": None}
        | {"moe_intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 4}
        | {"linear_head_dim": 32, "linear_num_heads": 2},
    ),
    "bailing_moe_v3": (
        "BailingHybrid",
        {name: LATENT[name] for name in LATENT if name.endswith(("rank", "dim", "heads"))}
        | {"layer_types": LAYERS, "num_hidden_layers": 4, "first_k_dense_replace": 1}
        | {"moe_intermediate_size": 32, "num_local_experts": 16, "num_experts_per_tok": 4}
        | {"n_group": 4, "topk_group": 2, "linear_head_dim": 16, "linear_num_heads": 2},
    ),
    "minimax": (
        "MiniMax",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32}
        | {"layer_types": LAYERS, "num_hidden_layers": 4, "mlp_alpha_factor": 2.0}
        | {"full_attn_alpha_factor": 1.7, "linear_attn_alpha_factor": 1.4},
    ),
    "olmo_hybrid": (
        "OlmoHybrid",
        {"layer_types": LAYERS, "num_hidden_layers": 4, "num_key_value_heads": 4}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ),
    "lara_mini": (
        "LaraMini",
        DELTA_NET
        | SHARED_EXPERT
        | {"layer_types": [*LAYERS[:3], "sliding_attention"], "sliding_window": 48}
        | {"num_experts": 8, "tie_word_embeddings": True},
    ),
    "lfm2": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
        | {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
        | {"tie_word_embeddings": True},
    ),
    "lfm3": (
        "Lfm3",
        {"layer_types": ["conv", "full_attention", "sliding_attention"], "head_dim": 16}
        | {"sliding_window": 48, "tie_word_embeddings": True},
    ),
    "mamba": ("Mamba", {"intermediate_size": 128}),
    "mamba2": ("Mamba2", {"num_heads": 4, "head_dim": 32, "n_groups": 2, "state_size": 32}),
    "zamba2": (
        "Zamba2",
        {"num_hidden_layers": 2, "layers_block_type": ["hybrid"] * 2, "n_mamba_heads": 4}
        | {"mamba_ngroups": 2, "mamba_d_state": 32, "adapter_rank": 16, "use_mem_rope": True}
        | {"tie_word_embeddings": True},
    ),
    "nemotron_h": (
        "NemotronH",
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]}
        | {"n_routed_experts": 8, "moe_intermediate_size": 32}
        | {"moe_shared_expert_intermediate_size": 48}
        | {"mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 32}
        | {"head_dim": 16},
    ),
    "nemotron_3": (
        "NemotronH",
        {"layers_block_type": ["moe", "linear_attention", "full_attention", "moe"]}
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
        | {"moe_latent_size": 32, "moe_shared_expert_intermediate_size": 48}
        | {"mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 32}
        | {"head_dim": 16, "routed_scaling_factor": 2.5},
    ),
    "llama4": (
        "Llama4Text",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "num_hidden_layers": 4}
        | {"intermediate_size": 32, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2}
        | {"attention_chunk_size": 72, "floor_scale": 32},
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 48,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
    ),
}
MAMBAS = (
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granite_moe_hybrid",
    "jamba",
    "mamba",
    "mamba2",
    "nemotron_h",
    "nemotron_3",
    "zamba2",
)
"""The families with Mamba 1 or 2, some of them beside attention."""
RECURRENT = (
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear", "olmo_hybrid"),
    *("bailing_moe_v3", "lara_mini", "minimax", "lfm2", "lfm2_moe", "lfm3", *MAMBAS),
)
"""Those whose layers have states."""
DENSE = (
    *(
        "apertus",
        "apertus1p5",
        "arcee",
        "biogpt",
        "cohere_compass",
        "modernbert_decoder",
        "phi4_multimodal",
        "xglm",
        "gpt_neox_japanese",
        "openai_gpt",
        "bitnet",
        "persimmon",
        "internlm",
        "domyn_edge",
        "pangu_embedded",
        "telechat2",
        "teleflm",
        "internlm2",
        "orion",
        "baichuan",
        "baichuan_13b",
        "bloom",
        "mpt",
        "cohere",
        "ernie4_5",
        "exaone",
        "exaone4",
        "glm",
        "internlm3",
    ),
    *("opt", "seed_oss", "stablelm", "starcoder2"),
    *("gemma", "gpt_neox", "gptj", "helium", "nemotron", "olmo", "phi"),
    *("hunyuan_v1_dense", "ministral3", "nanochat", "granite_swa"),
    *("cwm", "hyperclovax", "jais2", "vaultgemma"),
    *("falcon", "falcon_7b", "gpt_bigcode", "codegen", "gpt_neo"),
)
"""Dense families that are made of what others have."""
WITH_EXPERTS = (
    *("afmoe", "ernie4_5_moe", "exaone_moe", "flex_olmo"),
    *("granite_moe", "granite_moe_shared", "hunyuan_v1_moe", "minimax_m2"),
    *("granite_moe_swa", "hy_v3", "mellum", "cohere2_moe", "llama4"),
    *("dots1", "phimoe", "dbrx", "mimo_v2_flash", "bailing_moe_v2", "deepseek", "laguna"),
    *("sarvam_moe", "sarvam_mla", "step3p5"),
    *("aria", "axk1", "bailing_moe", "beam", "flint", "kolibri1", "longcat_flash"),
)
"""Families with experts that are made of what others have."""
NOT_IN_GGUF = (
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "bamba", "nemotron_h", "nemotron_3"),
    *("flex_olmo", "glm", "opt", "gptj", "helium"),
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "gemma3n", "gemma4"),
    *("beam", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v4"),
    *("mistral4", "nanochat", "falcon_h1", "kimi_linear", "bailing_moe_v3", "lfm3", "lara_mini"),
    *("cohere2_moe", "granite_moe_swa", "granite_swa", "hy_v3", "mellum"),
    *("apertus", "cwm", "hyperclovax", "vaultgemma", "codegen", "gpt_neo", "phimoe", "dbrx"),
    *("exaone", "internlm3", "laguna", "mimo_v2_flash", "olmo_hybrid", "minimax"),
    *("bitnet", "internlm2"),
    *("sarvam_moe", "sarvam_mla", "step3p5"),
    *("baichuan", "baichuan_13b", "internlm", "bailing_moe", "telechat2", "domyn_edge"),
    *("pangu_embedded", "teleflm"),
    *("aria", "axk1", "axk2", "biogpt", "gpt_neox_japanese", "kolibri1", "openai_gpt"),
    *("apertus1p5", "cohere_compass", "flint", "modernbert_decoder", "xglm"),
    *("longcat_flash", "minimax_m3", "persimmon", "phi4_multimodal", "zamba2", "deepseek_v4"),
)
"""Those of which no GGUF files are written yet."""
WITH_INDEXER = ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "minimax_m3")
LATENTS = (
    *("deepseek_v2", "deepseek_v3", *WITH_INDEXER, "glm4_moe_lite"),
    *(
        "axk1",
        "kimi_linear",
        "longcat_flash",
        "minicpm3",
        "mistral4",
        "sarvam_mla",
        "bailing_moe_v3",
        "deepseek_v4",
    ),
)
"""Those whose cache holds latents, or keys of an indexer, which are not rounded to 8 bits."""
QUICK = ("qwen3", "mistral", "gpt_oss", "gemma3", "qwen3_next", "deepseek_v3")
"""The norms of queries and keys, a window, groups of layers with sinks and experts, with two
rotations, with states, and with latents: the architectures that differ most."""
ALIKE = (
    *(*DENSE, *WITH_EXPERTS),
    *("deepseek_v2", "gemma2", "glm4_moe", "glm4_moe_lite", "mistral4", "olmo2", "olmoe"),
    *WITH_INDEXER,
    *(
        "bailing_moe_v3",
        "deepseek_v4",
        "lara_mini",
        "gemma3n",
        "kimi_linear",
        "minimax",
        "olmo_hybrid",
        "minicpm3",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "qwen3_5_moe",
        "qwen3_moe",
        *MAMBAS,
    ),
)
"""Those that differ from the ones in QUICK by few options, or whose layers other tests compare with
transformers: only slow tests run them."""
KINDS = [kind if kind in QUICK else slow(kind) for kind in VARIANTS]
"""All architectures, as parameters of a test. Only those in QUICK are in the default suite."""
INEXACT = (*RECURRENT, "gemma3n", "gemma4", *WITH_INDEXER, "deepseek_v4")
"""Those whose hidden states transformers does not compute to 1e-5 in float32, and those of which a
token's embedding is not all that layers read of it (Gemma 3n and 4), and those of which the last
chosen token may be another one where two scores differ by a rounding error. Its delta nets and
its Mamba 2 work in chunks, whose rounding errors are 2e-5, and prefix-cache hits are shorter with
states. It is 2.0e-5 from float64 for this Gemma 4, where shmllm is 1.3e-5 from it."""
EXACT_KINDS = [kind if kind in QUICK else slow(kind) for kind in VARIANTS if kind not in INEXACT]


def with_kinds(settings: Iterable[Any]) -> list[Any]:
    """Each setting with each architecture that is not INEXACT, as parameters of a test. The default
    suite has each setting once, with the architectures in QUICK in turn."""
    values = list(settings)
    quick = [kind for kind in QUICK if kind not in INEXACT]
    others = [kind for kind in VARIANTS if kind not in (*QUICK, *INEXACT)]
    return diagonal(values, quick) + [slow(*each) for each in itertools.product(values, others)]


@dataclass
class ReferenceModel:
    """A model of transformers, its directory, and prompts."""

    model: Any
    directory: Path
    prompts: list[list[int]]
    _greedy: list[list[int]] | None = None

    def assert_greedy(self, continuations: list[list[int]]) -> None:
        """Check that these are the greedy continuations of the prompts.

        One forward pass over a prompt and its continuation gives transformers' choice after each
        token, in a twentieth of the time that `greedy_tokens` takes. There is only one greedy
        continuation, so later calls compare with what the first one found right.
        """
        if self._greedy is not None:
            assert continuations == self._greedy
            return
        for prompt, tokens in zip(self.prompts, continuations, strict=True):
            assert 0 < len(tokens) <= MAX_TOKENS
            assert choices(self.model, prompt, tokens) == tokens
            assert EOS not in tokens[:-1]
            assert len(tokens) == MAX_TOKENS or tokens[-1] == EOS
        self._greedy = continuations


MIXING = ("bias", "conv1d.weight", "A_log", "_coefs.weight", "modality_router.weight")
"""The ends of the names of parameters that would change little as matrices do: biases, and what
mixes tokens or streams."""


def draw_weights(model: Any) -> None:
    """Random models tie; larger matrices make their greedy choices clear. Norms, biases and sinks
    that are all ones or zeros would hide a mistake."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 or name.endswith(("q_norm.weight", "k_norm.weight"))
            if ("norm" in name and is_norm) or ".ln_" in name:
                parameter.normal_(1.0, 0.2)
            elif parameter.ndim == 1 or name.endswith(MIXING):
                parameter.normal_(0.0, 0.5)
            elif not name.endswith(("x_proj.weight", "dt_proj.weight")):  # they make exponents
                parameter.mul_(WEIGHT_SCALE)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
            if name.endswith("tid2eid"):
                buffer.random_(model.config.num_local_experts)


OTHERS = {
    each.__name__: each
    for each in (
        *(BailingMoeConfig, BailingMoeV2Config, DeepseekConfig),
        *(InternLMConfig, InternLM2Config, OrionConfig, BaichuanConfig, TeleChat2Config),
        *(DomynEdgeConfig, PanguEmbeddedConfig, TeleFLMConfig),
    )
}
"""The configurations that transformers lacks."""


def make_model(kind: str, directory: Path, *, max_shard_size: str = "1GB", **config: Any) -> Any:
    """A random float32 model of transformers' in `directory`, with the bundled tokenizer."""
    family, variant = VARIANTS[kind]
    torch.manual_seed(7)
    name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    make: Any = OTHERS.get(name) or getattr(transformers, name)
    settings = make(**(SHAPE | variant | config))
    model = model_of(settings).eval()
    draw_weights(model)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((resolve_model("tiny") / name).read_bytes())
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    return model


def make_prompts(vocab_size: int, longest: int = 300) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens; some share prefixes of whole blocks."""
    rng = random.Random(3)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, longest]
    lengths += [rng.randint(1, longest) for _ in range(NUM_PROMPTS - len(lengths))]
    shared = [rng.randrange(1, vocab_size) for _ in range(longest)]
    prompts = []
    for index, length in enumerate(lengths):
        own = [rng.randrange(1, vocab_size) for _ in range(length)]
        keep = min(length - 1, 64) if index % 3 == 0 else 0
        prompts.append(shared[:keep] + own[keep:])
    return prompts


@one_thread()
@torch.inference_mode()
def greedy_tokens(model: Any, prompt: list[int], max_tokens: int = MAX_TOKENS) -> list[int]:
    """transformers' greedy continuation; a sequence of its own, so nothing is padded."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=max_tokens,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
