"""DBRX (Databricks, 2024): experts in every layer, LayerNorms without biases, bounds of queries,
keys and values. Its checkpoints have each projection of all experts in one matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.readers import read_attention, read_model, read_num_layers, read_positions
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MoESpec, NormSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_FIELDS: dict[str, tuple[str, Any]] = {
    "hidden_size": ("d_model", 2048),
    "num_attention_heads": ("n_heads", 16),
    "num_hidden_layers": ("n_layers", 24),
    "max_position_embeddings": ("max_seq_len", 2048),
    "vocab_size": ("vocab_size", 32_000),
}
"""DBRX's name and default of each field that `readers.py` reads."""
_NAMES = {
    "model.layers.": "transformer.blocks.",
    "model.embed_tokens.": "transformer.wte.",
    "model.norm.": "transformer.norm_f.",
    ".self_attn.o_proj.": ".norm_attn_norm.attn.out_proj.",
    ".self_attn.": ".norm_attn_norm.attn.",
    ".mlp.gate.": ".ffn.router.layer.",
    ".mlp.experts.": ".ffn.experts.mlp.",
}
"""The parts of names that differ from the default ones."""
_QKV = "Wqkv", ("q_proj", "k_proj", "v_proj")
_NORMS = LayerNorms(before_mixer="norm_attn_norm.norm_1", before_mlp="norm_attn_norm.norm_2")


def configure(fields: Fields) -> ModelConfig:
    fields = fields.under_names(_FIELDS)
    own = Fields(fields.table("attn_config"), f"{fields.where}: attn_config")
    heads = {"num_key_value_heads": own.integer("kv_n_heads", 1), "head_dim": None}
    fields = fields.with_values(fields.values | heads)
    positions, attention = read_positions(fields, 2048), read_attention(fields)
    theta = own.number("rope_theta", 10_000.0)  # where there are no rope_parameters
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, theta=theta)
    attention = replace(attention, rope=rope, clip=own.optional_number("clip_qkv"))
    layer = LayerSpec(mixer=attention, mlp=_read_experts(fields), norms=_NORMS)
    model = read_model(fields, [layer] * read_num_layers(fields), positions)
    return replace(model, norm=NormSpec(kind="layer", eps=1e-5))


def _read_experts(fields: Fields) -> MoESpec:
    own = Fields(fields.table("ffn_config"), f"{fields.where}: ffn_config")
    activation = own.table("ffn_act_fn").get("name", "silu")
    if activation != "silu":
        raise own.error(f"ffn_act_fn {activation!r} is not supported, only silu")
    name = "moe_normalize_expert_weights"
    power = own.with_absent({name: 1.0}).optional_number(name)
    if power not in (None, 1.0):
        raise own.error(f"{name} {power:g} is not supported; supported: 1.0 and null")
    num_experts, top_k = own.integer("moe_num_experts", 4), own.integer("moe_top_k", 1)
    if top_k > num_experts:
        raise own.error(f"moe_top_k ({top_k}) is more than moe_num_experts ({num_experts})")
    return MoESpec(
        num_experts=num_experts,
        top_k=top_k,
        inner=own.integer("ffn_hidden_size", 3584),
        renormalize=power is not None,
        whole=True,
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import gates_and_ups, with_fused
    from shmllm.models.matrices import stacked

    found: NamedWeights = {}
    for name, views in with_fused(weights, _QKV).items():
        if name.endswith(".experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for part, view in zip(("w1", "v1"), gates_and_ups(views[0]), strict=True):
                found[f"{prefix}{part}"] = (view,)
        elif name.endswith(".experts.down_proj"):
            found[f"{name.removesuffix('down_proj')}w2"] = (stacked(views[0], transposed=True),)
        else:
            found[name] = views
    return {renamed(name, _NAMES): views for name, views in found.items()}


def module_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns nothing: transformers' modules have the same names."""
    return {}
