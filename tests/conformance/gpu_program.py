"""The tests of a model's forward pass on a device.

The logits equal those of transformers, and replays equal eager launches. Each folder has a fixture
`gpu_device`: the fake GPU, or a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gpu_steps import GpuSteps, Prepared
from support.model_helpers import reference_logits, reference_model, save
from support.reference_models import BLOCKS_CHOSEN, ENTRIES, INDEXER, PHI4_TOWERS
from support.variants import slow

from shmllm.config.graphs import CudaGraphMode

NONE, PIECEWISE, FULL = CudaGraphMode.NONE, CudaGraphMode.PIECEWISE, CudaGraphMode.FULL
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LAYER_TYPES = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
DELTA_NET = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
}
GROUPS = {"n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
}
GROWING: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 4,
    "llama_4_scaling_beta": 0.5,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "bamba": {name: HYBRID[name] for name in HYBRID if name != "layer_types"}
    | {"attn_layer_indices": [1]},
    "falcon_h1": {name: HYBRID[name] for name in HYBRID if name != "layer_types"}
    | {"mamba_d_ssm": 128, "head_dim": 32, "embedding_multiplier": 3.0, "key_multiplier": 0.4}
    | {"attention_in_multiplier": 0.7, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6}
    | {"ssm_multipliers": [0.9, 0.7, 0.8, 1.1, 0.6], "mlp_multipliers": [0.88, 0.59]},
    "falcon_mamba": {"intermediate_size": 112},
    "granite_moe_hybrid": HYBRID
    | {"num_local_experts": 4, "intermediate_size": 24, "shared_intermediate_size": 40},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4},
    "kimi_linear": LATENT
    | {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 8}
    | {"num_experts_per_tok": 3, "linear_num_heads": 2, "linear_head_dim": 32},
    "bailing_moe_v3": LATENT
    | {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 8}
    | {"num_experts_per_tok": 3, "linear_num_heads": 2, "linear_head_dim": 32}
    | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 40},
    "step3p5": {"head_dim": 16, "layer_types": LAYER_TYPES, "sliding_window": 5}
    | {"num_sliding_attention_heads": 2, "n_routed_experts": 8, "num_experts_per_tok": 3}
    | {"moe_intermediate_size": 24, "share_expert_dim": 48, "moe_layers_enum": "1"}
    | {"swiglu_limits": [0, 0.05], "swiglu_limits_shared": [0.04, 0.03]},
    "sarvam_moe": GROUPS | {"head_dim": 16, "moe_intermediate_size": 24},
    "sarvam_mla": LATENT | GROUPS,
    "minimax": {"num_local_experts": 4, "intermediate_size": 24, "mlp_alpha_factor": 2.0}
    | {"layer_types": ["linear_attention", "full_attention"], "linear_attn_alpha_factor": 1.4},
    "olmo_hybrid": {name: DELTA_NET[name] for name in DELTA_NET if name != "head_dim"}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    "lara_mini": DELTA_NET
    | EXPERTS
    | {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]}
    | {"num_hidden_layers": 3, "sliding_window": 5, "shared_expert_intermediate_size": 24},
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_bias": True},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}
    | {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    "lfm3": {"layer_types": ["conv", "sliding_attention", "full_attention"]}
    | {"num_hidden_layers": 3, "sliding_window": 5, "head_dim": 16},
    "mamba": {"intermediate_size": 112, "use_bias": True, "state_size": 5},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 2, "state_size": 20}
    | {"time_step_limit": [0.25, 0.75]},
    "nemotron_h": {
        "layers_block_type": ["mlp", "linear_attention", "moe", "full_attention"],
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 48,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 20,
        "head_dim": 16,
    },
    "nemotron_3": {
        "layers_block_type": ["moe", "full_attention", "moe"],
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_latent_size": 40,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 48,
        "head_dim": 16,
    },
    "nemotron_h_puzzle": {
        "block_configs": [
            {"block_type": "moe", "num_experts_per_tok": 3},
            {"block_type": "attention"},
            {"block_type": "moe", "moe_intermediate_size": 40, "moe_latent_size": 40},
        ],
        "n_routed_experts": 6,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 48,
        "head_dim": 16,
    },
    "zamba2": {"layers_block_type": ["hybrid", "hybrid"], "n_mamba_heads": 4, "adapter_rank": 8}
    | {"mamba_ngroups": 2, "mamba_d_state": 20, "num_key_value_heads": None, "use_mem_rope": True}
    | {"use_shared_attention_adapter": True, "rms_norm_eps": 30.0},
    "qwen3_5": DELTA_NET,
    "qwen3_next": DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 24},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 16, "sliding_window": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3": {
        "head_dim": 16,
        "query_pre_attn_scalar": 9,
        "sliding_window": 5,
        "layer_types": LAYER_TYPES,
        "final_logit_softcapping": 2.0,
    },
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 9,
        "sliding_window": 5,
        "layer_types": LAYER_TYPES,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
    },
    "gemma3n": {
        "head_dim": 16,
        "sliding_window": 5,
        "num_hidden_layers": 4,
        "layer_types": 2 * LAYER_TYPES,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 90,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.6, 0.0, 0.0, 0.3],
    },
    "gemma4": {
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 5,
        "num_hidden_layers": 4,
        "layer_types": 2 * LAYER_TYPES,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 16,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "dbrx": {
        "d_model": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek": {"n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1},
    "deepseek_v2": LATENT | GROUPS | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT | GROUPS | {"first_k_dense_replace": 1, "kv_lora_rank": 32},
    "glm4_moe": GROUPS | {"head_dim": 16, "use_qk_norm": True, "moe_intermediate_size": 24},
    "deepseek_v32": LATENT | GROUPS | INDEXER | {"first_k_dense_replace": 1, "q_lora_rank": 40},
    "glm_moe_dsa": LATENT
    | GROUPS
    | INDEXER
    | {"index_topk_freq": 2, "index_skip_topk_offset": 1, "q_lora_rank": 40},
    "glm4_moe_lite": LATENT | GROUPS | {"attention_bias": True, "q_lora_rank": 40},
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo2": {},
    "olmo3": {"sliding_window": 5, "layer_types": LAYER_TYPES},
    "phi3": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
        }
    },
    "glm4": {"head_dim": 16},
    "afmoe": EXPERTS
    | {"head_dim": 16, "sliding_window": 5, "layer_types": LAYER_TYPES}
    | {"mup_enabled": True, "route_scale": 2.5},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24},
    "exaone_moe": EXPERTS | {"sliding_window": 5, "layer_types": LAYER_TYPES},
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 3},
    "granite_moe": {"num_local_experts": 4, "intermediate_size": 24, "residual_multiplier": 0.4},
    "granite_moe_shared": {"num_local_experts": 4, "shared_intermediate_size": 96},
    "granite_moe_swa": {"num_local_experts": 4, "intermediate_size": 24, "sliding_window": 5}
    | {"shared_intermediate_size": 96, "layer_rope_theta": [1e4, 0]},
    "granite_swa": {"sliding_window": 5, "layer_rope_theta": [0, 1e4]},
    "hy_v3": EXPERTS | {"head_dim": 16},
    "beam": EXPERTS
    | {"head_dim": 16, "n_group": 1, "topk_group": 1, "layer_types": LAYER_TYPES}
    | {"mlp_layer_types": ["dense", "sparse"], "sliding_window": 5},
    "longcat_flash": {name: LATENT[name] for name in LATENT if name != "first_k_dense_replace"}
    | {"num_key_value_heads": 4, "q_lora_rank": 40, "head_dim": 8}
    | {"n_routed_experts": 6, "num_experts_per_tok": 3, "zero_expert_num": 4},
    "hy_v4": LATENT
    | GROUPS
    | INDEXER
    | {"indexer_types": ["full", "shared"], "q_lora_rank": 40, "swiglu_limit": 0.1},
    "deepseek_v4": ENTRIES
    | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    | {"num_hidden_layers": 3, "num_attention_heads": 6, "hc_sinkhorn_iters": 6}
    | {"index_topk": 2, "sliding_window": 4},
    "mellum": EXPERTS | {"head_dim": 16, "sliding_window": 5, "layer_types": LAYER_TYPES},
    "minicpm3": {name: LATENT[name] for name in LATENT if "moe" not in name}
    | {"num_key_value_heads": 4, "q_lora_rank": 40},
    "bailing_moe_v2": EXPERTS
    | {"head_dim": 16, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    "laguna": EXPERTS
    | {"head_dim": 16, "layer_types": LAYER_TYPES, "sliding_window": 5}
    | {"num_attention_heads_per_layer": [2, 4], "shared_expert_intermediate_size": 48},
    "mimo_v2_flash": {
        "num_key_value_heads": 1,
        "head_dim": 24,
        "v_head_dim": 16,
        "sliding_window": 5,
        "layer_types": LAYER_TYPES,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
    },
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3}
    | {"head_dim": 16, "rotary_dim": 8},
    "minimax_m3": {"num_local_experts": 8, "num_experts_per_tok": 3}
    | BLOCKS_CHOSEN
    | {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 8}
    | {"mlp_layer_types": ["dense", "sparse"], "index_topk_blocks": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2, "intermediate_size": 24},
    "ministral3": {"head_dim": 16, "rope_parameters": GROWING},
    "mistral4": LATENT
    | {"n_routed_experts": 8, "num_experts_per_tok": 2, "rope_parameters": dict(GROWING)},
    "nanochat": {},
    "apertus": {},
    "apertus1p5": {"output_vocab_size": 60},
    "arcee": {},
    "aria": {"moe_num_experts": 8, "moe_topk": 3, "intermediate_size": 24},
    "axk1": LATENT | GROUPS | {"first_k_dense_replace": 1, "q_lora_rank": 40},
    "axk2": LATENT | GROUPS | INDEXER | {"q_lora_rank": 40},
    "biogpt": {},
    "persimmon": {},
    "cohere_compass": {
        "layer_types": LAYER_TYPES,
        "sliding_window": 5,
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "xglm": {"ffn_dim": 96},
    "gpt_neox_japanese": {},
    "kolibri1": EXPERTS
    | {"head_dim": 16, "sliding_window": 5, "layer_types": LAYER_TYPES}
    | {"shared_expert_intermediate_size": 48},
    "flint": EXPERTS
    | {"head_dim": 16, "sliding_window": 5, "layer_types": LAYER_TYPES, "mlp_only_layers": []}
    | {"shared_expert_intermediate_size": 48},
    "modernbert_decoder": {"local_attention": 10, "layer_types": LAYER_TYPES},
    "phi4_multimodal": PHI4_TOWERS,
    "openai_gpt": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "bitnet": {},
    "internlm": {},
    "domyn_edge": {"position_layers": ["nope", "rope"], "head_sizes": [16, 8]}
    | {"window_sizes": [[-1, 0], [5, 0]]},
    "pangu_embedded": {},
    "teleflm": {"input_mult": 2.0, "output_mult": 3.0, "mup_scale_factor": 4.0},
    "telechat2": {"training_seqlen": 64, "ffn_hidden_size": 96},
    "internlm2": {},
    "bailing_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "orion": {},
    "baichuan": {"model_max_length": 64},
    "bloom": {},
    "mpt": {"max_seq_len": 64, "attn_config": {"clip_qkv": 0.5}},
    "decilm": {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": size, "no_op": size is None},
                "ffn": {"ffn_mult": factor, "no_op": factor is None},
            }
            for size, factor in ((2, 2.0), (None, 1.0))
        ]
    },
    "exaone": {},
    "minicpm": {"scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 16},
    "cwm": {"head_dim": 16, "sliding_window": 5, "layer_types": LAYER_TYPES},
    "hyperclovax": {"residual_multiplier": 0.4, "logits_scaling": 0.5},
    "jais2": {},
    "vaultgemma": {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 1.5},
    "cohere": {"use_qk_norm": True},
    "ernie4_5": {"head_dim": 16, "use_bias": True},
    "exaone4": {"sliding_window": 5, "layer_types": LAYER_TYPES},
    "gemma": {"head_dim": 16},
    "glm": {"head_dim": 16},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_bigcode": {"n_embd": 64, "n_inner": 96, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "codegen": {"n_embd": 64, "n_inner": 96, "n_layer": 2, "n_head": 4, "n_positions": 64}
    | {"rotary_dim": 8},
    "gpt_neo": {"window_size": 5, "attention_types": [[["local", "global"], 1]]},
    "gpt_neox": {},
    "gptj": {"n_embd": 64, "n_inner": 96, "n_layer": 2, "n_head": 4, "n_positions": 64}
    | {"rotary_dim": 8},
    "helium": {"head_dim": 16},
    "nemotron": {"attention_bias": True},
    "olmo": {"clip_qkv": 0.5},
    "phi": {},
    "phimoe": {"num_local_experts": 4, "intermediate_size": 24, "router_jitter_noise": 0.3},
    "opt": {"ffn_dim": 96},
    "seed_oss": {"head_dim": 16, "attention_out_bias": True},
    "stablelm": {"use_parallel_residual": True, "use_qkv_bias": True, "qk_layernorm": True},
    "starcoder2": {"sliding_window": 5},
    "cohere2_moe": {"num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 2}
    | {"expert_selection_fn": "sigmoid", "sliding_window": 5, "layer_types": LAYER_TYPES}
    | {"head_dim": 16, "intermediate_size": 24},
    "cohere2": {"head_dim": 16, "sliding_window": 5, "layer_types": LAYER_TYPES},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.4,
        "logits_scaling": 5.0,
    },
    "gpt2": {"n_embd": 64, "n_inner": 96, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 48},
    "qwen3_moe": EXPERTS | {"head_dim": 16, "norm_topk_prob": True},
    "llama4": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "intermediate_size_mlp": 40,
        "attention_chunk_size": 5,
        "floor_scale": 4,
        "no_rope_layer_interval": 2,
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "layer_types": LAYER_TYPES,
    },
}
QUICK = ("cohere2", "deepseek_v3", "deepseek_v4", "glm_moe_dsa", "mamba", "qwen3_5")
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 0.15}
"""The tolerances of logits, relative to the largest logit."""

SCALE = 4.0
"""The scale of the matrices, so large that the best token of a random model is clear."""

PROMPTS = {0: 15, 1: 3, 2: 3, 3: 1}
MIXED = (
    {0: 6},
    {2: 3, 0: 5},
    {0: 4, 2: 1, 3: 1},
    {2: 1, 0: 1, 3: 1},
    {2: 1, 0: 1, 3: 1},
    {0: 1, 1: 3},
    {0: 1},
    {1: 1},
)
"""For each step the number of tokens of each row: prompt chunks and decodes, or decodes only."""


@pytest.fixture(autouse=True)
def _inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a name to (transformers' model, its directory)."""
    made: dict[str, tuple[Any, Path]] = {}

    def make(name: str) -> tuple[Any, Path]:
        if name not in made:
            model = reference_model(name, SCALE, **SHAPE | VARIANTS[name])
            made[name] = model, save(model, tmp_path_factory.mktemp(name))
        return made[name]

    return make


def add_prompts(steps: GpuSteps, prompts: dict[int, int], seed: int = 1) -> None:
    rng = np.random.default_rng(seed)
    for row, length in prompts.items():
        steps.add(row, rng.integers(1, 96, length).tolist())


def assert_equals_transformers(logits: torch.Tensor, reference: Any, tokens: list[int]) -> None:
    """Compare the logits after these tokens with those of transformers."""
    want = reference_logits(reference, tokens)[-1]
    logits, others = logits.tensor_split([len(want)])  # of an LM head that has no rows for some
    assert (others == -torch.inf).all()
    assert float((logits - want).abs().max() / want.abs().max()) < TOLERANCES[torch.float32]
    assert int(want.argmax()) == int(logits.argmax())


def assert_replay_equals_launch(steps: GpuSteps, step: Prepared) -> dict[int, torch.Tensor]:
    """Check that an eager step and its replay have the same bits, whatever the buffers contain.
    Returns the logits."""
    steps.poison()
    launched = steps.run(step, NONE)
    steps.poison()
    replayed = steps.run(step)
    for name, one, other in zip(("hidden", "logits"), launched, replayed, strict=True):
        assert torch.isfinite(one).all(), name
        assert torch.equal(one, other), name
    return steps.finish(step, replayed[1])


def take_first(in_flight: list[Any], known: dict[int, list[int]]) -> None:
    result, event = in_flight.pop(0)
    event.wait()
    for row, token in enumerate(result.tolist()):
        known[row].append(token)


class ProgramConformance:
    @pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in VARIANTS])
    def test_the_logits_equal_those_of_transformers(self, gpu_device, models, name) -> None:
        reference, directory = models(name)
        steps = GpuSteps(gpu_device, directory)
        add_prompts(steps, PROMPTS)
        for work in MIXED:
            for row, logits in steps.step(work).items():
                assert_equals_transformers(logits, reference, steps.tokens[row][:-1])

    @pytest.mark.parametrize("name", ["qwen3", *map(slow, ("deepseek_v3", "deepseek_v4", "hy_v4"))])
    def test_the_models_dtype(self, gpu_device, models, dtype, name) -> None:
        """The router's choice is clear for these prompts: scores differ by 0.04 or more. Of seed 1
        two experts of a token differ by 0.004, of which the other one changes the logits by 0.3:
        bfloat16 may choose it."""
        reference, directory = models(name)
        steps = GpuSteps(gpu_device, directory, "FULL_DECODE_ONLY", (2,), dtype=dtype)
        steps.program.capture()
        add_prompts(steps, {0: 6, 1: 3}, seed=5)
        steps.step({0: 6, 1: 3})
        step = steps.prepare({0: 1, 1: 1})
        assert step.mode is FULL
        for row, logits in assert_replay_equals_launch(steps, step).items():
            want = reference_logits(reference, steps.tokens[row][:-1])[-1]
            difference = float((logits - want).abs().max() / want.abs().max())
            assert difference < TOLERANCES[dtype]

    @pytest.mark.parametrize("name", ["qwen2", slow("gpt_oss")])
    def test_full_and_piecewise(self, gpu_device, models, name) -> None:
        """Experts are chosen within a piecewise graph, for the tokens of any number of requests."""
        reference, directory = models(name)
        steps = GpuSteps(gpu_device, directory, "FULL_AND_PIECEWISE", (4, 8))
        shown: list[tuple[int, int]] = []
        report = steps.program.capture(lambda done, total: shown.append((done, total)))
        assert shown == [(0, 3), (1, 3), (2, 3), (3, 3)]
        assert report.num_graphs == 1 + 2 * 3
        add_prompts(steps, PROMPTS)
        modes = [PIECEWISE] * 3 + [FULL] * 2 + [PIECEWISE] + [FULL] * 2
        for work, mode in zip(MIXED, modes, strict=True):
            step = steps.prepare(work)
            assert step.mode is mode
            for row, logits in assert_replay_equals_launch(steps, step).items():
                assert_equals_transformers(logits, reference, steps.tokens[row][:-1])

    @pytest.mark.slow
    def test_full(self, gpu_device, models) -> None:
        reference, directory = models("llama")
        steps = GpuSteps(gpu_device, directory, "FULL", (8,))
        assert steps.program.capture().num_graphs == 1
        add_prompts(steps, PROMPTS)
        for work in MIXED[:2]:
            step = steps.prepare(work)
            assert step.mode is FULL
            step.max_query_len = step.descriptor.num_tokens  # as in the captured graph
            for row, logits in assert_replay_equals_launch(steps, step).items():
                assert_equals_transformers(logits, reference, steps.tokens[row][:-1])

    @pytest.mark.parametrize(
        ("name", "max_verified"),
        [
            ("qwen2", 5),
            *(
                slow(name, most)
                for name, most in product(
                    (
                        "deepseek_v3",
                        "deepseek_v4",
                        "gemma2",
                        "gemma4",
                        "gpt_oss",
                        "llama4",
                        "mistral",
                        "olmo2",
                        "qwen3",
                    ),
                    (0, 5),
                )
            ),
        ],
    )
    def test_a_step_that_verifies_drafts(self, gpu_device, models, name, max_verified) -> None:
        """Each drafted token gets the logits behind it. Wrong ones leave nothing behind."""
        reference, directory = models(name)
        sizes = {"max_drafts": 6, "max_verified": max_verified}
        steps = GpuSteps(gpu_device, directory, "FULL_AND_PIECEWISE", (4, 8), **sizes)
        steps.program.capture()
        captured = [mode for mode, _ in steps.dispatcher.captures()]
        assert captured.count(FULL) == 3
        assert captured.count(PIECEWISE) == 2
        add_prompts(steps, PROMPTS)
        steps.step({0: 6, 1: 3, 3: 1})
        for work, drafts, mode in (
            ({1: 1, 3: 1}, {3: [7, 7, 90, 5], 1: [60]}, FULL),
            ({3: 1, 1: 1}, {1: [2, 3]}, FULL),
            ({1: 1, 0: 2, 3: 1}, {1: [8], 3: [1, 2, 3]}, PIECEWISE),
            ({3: 1, 0: 7, 1: 1}, {}, NONE),
        ):
            step = steps.prepare(work, drafts=drafts)
            assert step.mode is mode
            known = {row: list(tokens) for row, tokens in steps.tokens.items()}
            assert_replay_equals_launch(steps, step)
            logits = iter(steps.run(step)[1])
            for row in work:
                for count in range(len(drafts.get(row, [])) + 1) if row or mode is NONE else ():
                    tokens = known[row] + drafts.get(row, [])[:count]
                    assert_equals_transformers(next(logits), reference, tokens)
            assert next(logits, None) is None

    @pytest.mark.parametrize("name", ["llama", slow("deepseek_v4")])
    def test_a_deterministic_decode_has_the_same_bits_beside_others(
        self, gpu_device, models, name
    ) -> None:
        """The padded sizes are the same; matrix products of other sizes may have other bits."""
        steps = GpuSteps(gpu_device, models(name)[1], "PIECEWISE", (4,), deterministic=True)
        steps.program.capture()
        add_prompts(steps, {0: 42, 1: 2})
        for row, length in ((0, 41), (1, 1)):
            steps.invent_context(row, length)
        alone = steps.run(steps.prepare({0: 1}))[0]
        step = steps.prepare({0: 1, 1: 1})
        assert step.mode is PIECEWISE
        assert torch.equal(alone[0], steps.run(step)[0][0])
        assert_replay_equals_launch(steps, step)

    def test_a_step_is_sent_while_the_last_one_is_computed(self, gpu_device, models) -> None:
        reference, directory = models("mistral")
        steps = GpuSteps(gpu_device, directory, "FULL_DECODE_ONLY", (2,))
        steps.program.capture()
        add_prompts(steps, {0: 6, 1: 4})
        steps.step({0: 6, 1: 4})
        rows = torch.tensor([0, 1]).to(gpu_device.torch_device)
        in_flight, unknown = [], torch.zeros(2, dtype=torch.int64)
        known = {row: list(tokens) for row, tokens in steps.tokens.items()}
        for _ in range(4):
            step = steps.prepare({0: 1, 1: 1}, feeds_itself=True)
            assert step.mode is FULL
            _, logits = steps.program.run(step.mode, step.descriptor, 1)
            sampled = logits.argmax(-1)
            steps.last_tokens.index_copy_(0, rows, sampled)
            result, event = gpu_device.pinned((2,), torch.int64), gpu_device.event()
            result.copy_(sampled, non_blocking=True)
            event.record()
            in_flight.append((result, event))
            steps.append(step, unknown)
            if len(in_flight) == 2:
                take_first(in_flight, known)
        take_first(in_flight, known)
        for tokens in known.values():
            want = reference_logits(reference, tokens[:-1]).argmax(-1)[-5:]
            assert tokens[-5:] == want.tolist()

    def test_a_replay_uses_the_current_weights(self, gpu_device, models) -> None:
        steps = GpuSteps(gpu_device, models("qwen3")[1], "FULL_AND_PIECEWISE", (2,))
        steps.program.capture()
        weights = steps.model.named_weights()
        for prompts, names in (
            ({0: 1, 1: 1}, ["layers.0.self_attn.v_proj", "norm"]),
            ({0: 2}, ["layers.1.mlp.down_proj"]),
        ):
            add_prompts(steps, prompts)
            step = steps.prepare(prompts)
            for name in names:
                before = steps.run(step)[1]
                for view in weights[f"model.{name}.weight"]:
                    view.mul_(1.25)
                assert not torch.equal(steps.run(step)[1], before), name
            assert_replay_equals_launch(steps, step)

    def test_inputs_of_tokens_that_the_device_sampled_and_of_embeddings(
        self, gpu_device, models
    ) -> None:
        steps = GpuSteps(gpu_device, models("llama")[1])
        add_prompts(steps, {0: 3, 1: 2})
        steps.step({0: 3, 1: 2})
        step = steps.prepare({0: 1, 1: 1})
        want = steps.run(step)[1]
        step.inputs.token_ids[:] = -2 - step.inputs.rows
        steps.inputs.send(step.inputs, step.descriptor)
        assert torch.equal(steps.run(step)[1], want)
        last = [steps.tokens[row][-1] for row in (0, 1)]
        step.inputs.token_ids[:] = -1
        steps.inputs.send(step.inputs, step.descriptor)
        for place, token in enumerate(last):
            steps.buffers.hidden[place] = steps.model.embedding.table[token]
        assert torch.equal(steps.run(step)[1], want)

    def test_logits_of_any_rows(self, gpu_device, models) -> None:
        steps = GpuSteps(gpu_device, models("qwen3")[1])
        add_prompts(steps, {0: 6})
        step = steps.prepare({0: 6})
        hidden, logits = steps.run(step)
        hidden = hidden.to(gpu_device.torch_device)
        found = steps.on_host(steps.program.compute_logits(hidden))
        assert found.shape == (6, 97)
        assert found.dtype is torch.float32
        torch.testing.assert_close(found[5:], logits.float(), rtol=1e-5, atol=1e-5)

    def test_a_step_without_samples_has_no_logits(self, gpu_device, models) -> None:
        steps = GpuSteps(gpu_device, models("llama")[1])
        add_prompts(steps, {0: 6})
        step = steps.prepare({0: 4})
        hidden, logits = steps.program.run(step.mode, step.descriptor, 4)
        assert hidden.shape == (4, 64)
        assert logits.shape == (0, 97)
