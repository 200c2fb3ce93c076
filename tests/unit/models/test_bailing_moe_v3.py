"""Ling 3.0: the fields and the names of its authors' files, and of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.model_helpers import load, our_logits, reference_model, save
from support.module_updates import update_from_modules
from support.published_configs import SIZES, read
from transformers import BailingHybridConfig

from shmllm.errors import EngineStartError
from shmllm.models.decoder import left_out
from shmllm.models.mixer_specs import LatentAttentionSpec
from shmllm.models.recurrent_specs import KimiDeltaSpec
from shmllm.models.specs import MLPSpec, MoESpec

NAMES = "BailingHybridForCausalLM", "BailingMoeV3ForCausalLM"
TOKENS = [(7 * position * position + 5) % 97 for position in range(40)]
TINY: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "gated_attention_proj_granularity_type": "head_wise",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 4608,
    "kda_lower_bound": -5,
    "kda_safe_gate": True,
    "kv_lora_rank": 512,
    "layer_group_size": 4,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 512,
    "n_group": 8,
    "no_kda_lora": True,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "num_kv_heads_for_linear_attn": 0,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_scaling": None,
    "rope_theta": 6000000,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "short_conv_kernel_size": 4,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "use_mla_nope": False,
    "v_head_dim": 128,
}
"""Ling-3.0-tiny."""
FLASH = TINY | {
    "expert_swiglu_limit_list": [0] * 35 + [4] * 7,
    "first_k_dense_replace": 2,
    "layer_group_size": 6,
    "num_experts": 512,
    "num_hidden_layers": 42,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": None,
    "share_expert_swiglu_limit_list": [0] * 34 + [5] * 6 + [7] * 2,
}
"""Ling-3.0-flash, but for its widths."""
SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "linear_head_dim": 16,
    "linear_num_heads": 3,
    "layer_types": ["linear_attention", "full_attention"],
}


def test_absent_fields_have_transformers_defaults(tmp_path: Path) -> None:
    sizes = SIZES | {"num_hidden_layers": 6, "num_key_value_heads": 6}
    expected, config = BailingHybridConfig(**sizes), read(tmp_path, NAMES[0], **sizes)
    kinds = {"linear_attention": KimiDeltaSpec, "full_attention": LatentAttentionSpec}
    assert [type(each) for each in config.mixers] == [kinds[n] for n in expected.layer_types]
    mlps = {"dense": MLPSpec, "sparse": MoESpec}
    assert [type(layer.mlp) for layer in config.layers] == [
        mlps[name] for name in expected.mlp_layer_types
    ]
    assert config.mixers[0] == KimiDeltaSpec(
        heads=expected.linear_num_heads,
        head_dim=expected.linear_head_dim,
        taps=expected.linear_conv_kernel_dim,
        has_low_rank=False,
        least_log=expected.kda_lower_bound,
    )
    [attention], [experts] = config.latent_attentions, set(config.mixtures)
    sizes_of = attention.rank, attention.nope_dim, attention.rope_dim, attention.value_dim
    names = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    assert sizes_of == tuple(getattr(expected, name) for name in names)
    assert (attention.query_rank, attention.gated) == (expected.q_lora_rank, True)
    assert (attention.rope.theta, attention.rope.interleaved) == (expected.rope_theta, True)
    assert (experts.num_experts, experts.top_k) == (512, expected.num_experts_per_tok)
    assert (experts.num_groups, experts.top_groups) == (expected.n_group, expected.topk_group)
    assert (experts.inner, experts.weight_scale) == (768, expected.routed_scaling_factor)
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert left_out(config) == ("model.layers.6.",)


def test_published_files(tmp_path: Path) -> None:
    config = read(tmp_path, NAMES[1], **TINY)
    full = [i for i, each in enumerate(config.mixers) if isinstance(each, LatentAttentionSpec)]
    assert full == [3, 7, 11, 15, 19, 23]
    [attention], [experts] = set(config.latent_attentions), set(config.mixtures)
    assert attention.rope.rotary_dim == 64
    assert (experts.num_experts, experts.shared) == (128, MLPSpec(inner=512))
    assert left_out(config) == ()
    written = {"rope_theta": 6000000, "rope_type": "default", "partial_rotary_factor": 0.5}
    assert read(tmp_path, NAMES[1], **TINY, rope_parameters=written) == config

    flash = read(tmp_path, NAMES[1], **FLASH)
    mixtures = [each for layer in flash.layers if isinstance(each := layer.mlp, MoESpec)]
    activations = [(each.activation, each.bound) for each in mixtures]
    assert activations == [("silu", 0)] * 33 + [("silu_bounded", 4)] * 7
    bounds = [each.shared.bound for each in mixtures if each.shared is not None]
    assert bounds == [None] * 32 + [5] * 6 + [7] * 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"no_kda_lora": False}, "no_kda_lora False is not supported"),
        ({"use_mla_nope": True}, "use_mla_nope True is not supported"),
        ({"gated_attention_proj_granularity_type": "element_wise"}, "'element_wise' is not"),
        ({"num_hidden_layers": 25}, r"num_hidden_layers \(25\) must be a multiple of"),
        ({"kda_lower_bound": 5}, "'kda_lower_bound' must be a negative number, not 5"),
        ({"kda_lower_bound": [-5]}, "'kda_lower_bound' must be a negative number"),
        ({"kda_safe_gate": "yes"}, "'kda_safe_gate' must be true or false"),
        ({"head_dim": 24}, "linear_head_dim must be a multiple of 16, not 24"),
        ({"short_conv_kernel_size": 5}, "'linear_conv_kernel_dim' must be an integer of at most 4"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' are not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"expert_swiglu_limit_list": [4]}, "'expert_swiglu_limit_list' must list a number for"),
        ({"moe_shared_expert_intermediate_size": 256}, "supported: 512"),
        ({"num_key_value_heads": 4}, r"num_key_value_heads \(4\) differs from"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=reason) as caught:
        read(tmp_path, NAMES[1], **TINY | fields)
    assert "\n" not in str(caught.value)


def test_files_and_modules_have_names_of_their_own(tmp_path: Path) -> None:
    """Transformers writes the last projection of a delta net under the name that published files
    have in the other layers alone."""
    reference = reference_model("bailing_moe_v3", 4.0, **SMALL)
    directory = save(reference, tmp_path)
    model = load(directory)
    expected = our_logits(model, TOKENS)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.attention.o_proj.weight"] = tensors.pop(
        "model.layers.0.attention.dense.weight"
    )
    save_file(tensors, directory / "model.safetensors")
    assert torch.equal(our_logits(load(directory), TOKENS), expected)
    update_from_modules(model, reference)
    assert torch.equal(our_logits(model, TOKENS), expected)
