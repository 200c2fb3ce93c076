"""Kimi Linear: the fields and the names of its files, and of transformers' modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.model_helpers import (
    CONFIGS,
    assert_logits_close,
    load,
    our_logits,
    reference_logits,
    reference_model,
    save,
)
from support.module_updates import update_from_modules

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import left_out
from shmllm.models.mixer_specs import LatentAttentionSpec
from shmllm.models.recurrent_specs import KimiDeltaSpec
from shmllm.models.specs import MLPSpec, MoESpec

TOKENS = [(7 * position * position + 5) % 97 for position in range(40)]
FIELDS: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
}
SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 3,
    "layer_types": ["linear_attention", "full_attention"],
}


def read(directory: Path, **fields: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(FIELDS | fields))
    return ModelConfig.from_directory(directory)


def test_absent_fields_have_transformers_defaults(tmp_path: Path) -> None:
    config = read(tmp_path)
    expected = CONFIGS["kimi_linear"](**{n: v for n, v in FIELDS.items() if n != "architectures"})
    kinds = {"linear_attention": KimiDeltaSpec, "full_attention": LatentAttentionSpec}
    assert [type(each) for each in config.mixers] == [kinds[n] for n in expected.layer_types]
    mlps = {"dense": MLPSpec, "sparse": MoESpec}
    assert [type(layer.mlp) for layer in config.layers] == [
        mlps[name] for name in expected.mlp_layer_types
    ]
    net, attention = config.mixers[0], config.latent_attentions[0]
    assert net == KimiDeltaSpec(
        heads=expected.linear_num_heads,
        head_dim=expected.linear_head_dim,
        taps=expected.linear_conv_kernel_dim,
    )
    sizes = attention.rank, attention.nope_dim, attention.rope_dim, attention.value_dim
    names = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    assert sizes == tuple(getattr(expected, name) for name in names)
    assert (attention.query_rank, attention.scale) == (None, 192**-0.5)
    [experts] = config.mixtures
    found = experts.num_experts, experts.top_k, experts.inner, experts.num_groups
    assert found == (256, 8, expected.moe_intermediate_size, expected.n_group)
    assert (experts.weight_scale, experts.renormalize) == (2.446, True)
    assert experts.shared == MLPSpec(inner=1024)
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert config.norm.eps == expected.rms_norm_eps


def test_fields_of_published_files(tmp_path: Path) -> None:
    lists = {"full_attn_layers": [2, 6], "kda_layers": [1, 3, 4, 5]}
    sizes = {"head_dim": 32, "num_heads": 3, "short_conv_kernel_size": 3}
    config = read(
        tmp_path,
        linear_attn_config=lists | sizes,
        mla_use_nope=True,
        first_k_dense_replace=2,
        num_experts=12,
        num_experts_per_token=4,
        num_expert_group=3,
        topk_group=2,
        num_shared_experts=2,
        moe_renormalize=False,
        moe_router_activation_func="sigmoid",
        num_nextn_predict_layers=1,
        model_max_length=4096,
        rope_theta=10000.0,
        rope_scaling=None,
    )
    nets = [index for index, each in enumerate(config.mixers) if isinstance(each, KimiDeltaSpec)]
    assert nets == [0, 2, 3, 4]
    assert config.mixers[0] == KimiDeltaSpec(heads=3, head_dim=32, taps=3)
    assert [isinstance(layer.mlp, MoESpec) for layer in config.layers] == [False] * 2 + [True] * 4
    [experts] = config.mixtures
    groups = experts.num_groups, experts.top_groups
    assert (experts.num_experts, experts.top_k, *groups) == (12, 4, 3, 2)
    assert experts.shared == MLPSpec(inner=2048)
    assert not experts.renormalize
    assert config.max_position_embeddings == 4096
    assert left_out(config) == ("model.layers.6.",)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mla_use_nope": False}, "mla_use_nope False is not supported"),
        ({"hidden_act": "gelu"}, "delta nets with hidden_act 'gelu' are not supported"),
        ({"linear_head_dim": 24}, "linear_head_dim must be a multiple of 16, not 24"),
        ({"linear_conv_kernel_dim": 5, "linear_attn_config": {"short_conv_kernel_size": 5}},
         "'short_conv_kernel_size' must be an integer of at most 4"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax' is not"),
        ({"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3]}},
         "'linear_attn_config' must list each of 6 layers, from 1, once"),
        ({"moe_renormalize": None}, "'norm_topk_prob' must be true or false"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=reason) as caught:
        read(tmp_path, **fields)
    assert "\n" not in str(caught.value)


def test_files_and_modules_have_names_of_their_own(tmp_path: Path) -> None:
    """A published file calls dense MLPs "mlp", one of transformers "block_sparse_moe", and its
    modules have others for half of the weights."""
    reference = reference_model("kimi_linear", 4.0, **SMALL)
    directory = save(reference, tmp_path)
    expected = reference_logits(reference, TOKENS)
    model = load(directory)
    assert_logits_close(our_logits(model, TOKENS), expected, 1e-4)
    tensors = load_file(directory / "model.safetensors")
    dense = [name for name in tensors if name.startswith("model.layers.0.block_sparse_moe.")]
    assert len(dense) == 3
    for name in dense:
        tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)
    save_file(tensors, directory / "model.safetensors")
    published = load(directory)
    assert torch.equal(our_logits(published, TOKENS), our_logits(model, TOKENS))

    update_from_modules(model, reference)
    assert torch.equal(our_logits(model, TOKENS), our_logits(published, TOKENS))
