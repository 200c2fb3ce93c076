"""Nemotron-H: each layer is one of Mamba 2, attention without rotation, an MLP of a squared ReLU
without a gate, or experts of such, chosen by sigmoids, which may read a latent (Nemotron 3). The
sizes of Puzzle's layers differ."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.combined_specs import LatentExpertsSpec
from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import with_groups
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.mamba_fields import LINEAR, Names, read_mamba2
from shmllm.models.readers import (
    FULL,
    MOST_LAYERS,
    read_activation,
    read_attention,
    read_layer_types,
    read_model,
    read_norm,
    read_positions,
)
from shmllm.models.specs import MLPSpec, MoESpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

MLP, EXPERTS = "mlp", "moe"
"""The types of layers with an MLP or experts."""
_LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}
"""What the letters of ``hybrid_override_pattern`` mean."""
_OLD_TYPES = {"mamba": LINEAR, "attention": FULL}
_FIELDS: Names = {
    "heads": ("mamba_num_heads", 128),
    "head_dim": ("mamba_head_dim", 64),
    "groups": ("n_groups", 8),
    "state_size": ("ssm_state_size", 128),
    "taps": ("conv_kernel", 4),
    "bias": ("use_bias", False),
    "convolution_bias": ("use_conv_bias", True),
    "activation": ("mamba_hidden_act", "silu"),
}
_BLOCKS, _BLOCK_TYPE = "block_configs", "block_type"
_OF_BLOCKS = {
    MLP: {"intermediate_size"},
    EXPERTS: {
        *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group"),
        *("moe_shared_expert_intermediate_size", "moe_latent_size", "topk_group"),
        *("routed_scaling_factor", "norm_topk_prob"),
    },
}
"""The fields that layers of Puzzle may have of their own, by their type."""
_REFUSED = "sliding_window", "attention_bias", "tie_word_embeddings"
_NAMES = {
    ".mamba.": ".mixer.",
    ".self_attn.": ".mixer.",
    ".mlp.": ".mixer.",
    "model.embed_tokens.": "model.embeddings.",
    "model.norm.": "model.norm_f.",
}
"""The parts of names that differ from the default ones."""


def configure(fields: Fields) -> ModelConfig:
    for name in _REFUSED:
        if fields.values.get(name):
            raise fields.error(f"{name} {fields.values[name]!r} is not supported")
    types = _read_types(fields)
    layers = [
        _read_layer(own, kind)
        for own, kind in zip(_fields_of_layers(fields, types), types, strict=True)
    ]
    model = read_model(fields, layers, read_positions(fields, 4096))
    return replace(model, norm=read_norm(fields, "layer_norm_epsilon", 1e-5))


def _read_layer(fields: Fields, kind: str) -> LayerSpec:
    first, second = LayerNorms(before_mixer="norm"), LayerNorms(before_mlp="norm")
    if kind == LINEAR:
        return LayerSpec(mixer=read_mamba2(fields, _FIELDS), mlp=None, norms=first)
    if kind == FULL:
        attention = read_attention(fields, num_kv_heads=8, head_dim=128)
        return LayerSpec(mixer=attention, mlp=None, norms=first)
    mlp = _read_mlp(fields) if kind == MLP else _read_experts(fields)
    return LayerSpec(mixer=None, mlp=mlp, norms=second)


def _fields_of_layers(fields: Fields, types: tuple[str, ...]) -> list[Fields]:
    """Returns the fields of each layer: those of the model, or what ``block_configs`` of Puzzle has
    for the layer in their place."""
    blocks: Any = fields.values.get(_BLOCKS)
    if blocks is None:
        return [fields] * len(types)
    layers = []
    for index, (block, kind) in enumerate(zip(blocks, types, strict=True)):
        own = {name: value for name, value in block.items() if value is not None}
        if unknown := own.keys() - _OF_BLOCKS.get(kind, set()) - {_BLOCK_TYPE}:
            raise fields.error(f"{min(unknown)!r} of layer {index} in {_BLOCKS!r} is not supported")
        layers.append(fields.with_values(fields.values | own))
    return layers


def _read_mlp(fields: Fields) -> MLPSpec:
    return MLPSpec(
        inner=fields.integer("intermediate_size", 21504),
        activation=read_activation(fields, "mlp_hidden_act", "relu2"),
        gated=False,
        bias=fields.flag("mlp_bias", False),
    )


def _read_experts(fields: Fields) -> MoESpec | LatentExpertsSpec:
    shared = replace(
        _read_mlp(fields), inner=fields.integer("moe_shared_expert_intermediate_size", 7688)
    )
    if shared.activation != "relu_squared":
        raise fields.error(f"experts with mlp_hidden_act {shared.activation!r} are not supported")
    num_experts = fields.integer("n_routed_experts", 8)
    top_k = fields.integer("num_experts_per_tok", 2)
    if top_k > num_experts:
        raise fields.error(
            f"num_experts_per_tok ({top_k}) is more than n_routed_experts ({num_experts})"
        )
    experts = MoESpec(
        num_experts=num_experts,
        top_k=top_k,
        inner=fields.integer("moe_intermediate_size", 7688),
        activation="relu_squared",
        scoring="sigmoid",
        renormalize=fields.flag("norm_topk_prob", True),
        weight_scale=fields.number("routed_scaling_factor", 1.0),
        correction_bias=True,
        router_float32=True,
        shared=shared,
        shared_name="shared_experts",
    )
    experts = with_groups(fields, experts, 1, 1, best_of_group=2)
    latent, hidden = fields.optional_integer("moe_latent_size"), fields.integer("hidden_size")
    if latent is None:
        return experts
    if latent > hidden:
        raise fields.error(f"moe_latent_size ({latent:,}) is more than hidden_size ({hidden:,})")
    experts = replace(experts, latent=latent, shared=None)
    return LatentExpertsSpec(experts=experts, shared=shared, bias=shared.bias)


def _read_types(fields: Fields) -> tuple[str, ...]:
    """Returns the types in ``block_configs``, ``layers_block_type`` or ``layer_types``, or what
    ``hybrid_override_pattern`` says."""
    blocks: Any = fields.values.get(_BLOCKS)
    found: Any = fields.values.get("layers_block_type") or fields.values.get("layer_types")
    if blocks is not None:
        if not isinstance(blocks, list) or not all(isinstance(each, dict) for each in blocks):
            raise fields.error(f"{_BLOCKS!r} must list an object for each layer")
        found = [each.get(_BLOCK_TYPE) for each in blocks]
    elif found is None:
        pattern = fields.text("hybrid_override_pattern")
        found = [_LETTERS.get(letter, letter) for letter in pattern]
    if not isinstance(found, list) or not 0 < len(found) <= MOST_LAYERS:
        raise fields.error("'layers_block_type' must list a type for each layer")
    found = [_OLD_TYPES.get(each, each) if isinstance(each, str) else each for each in found]
    known = Fields({"layer_types": found}, fields.where)
    types = read_layer_types(known, len(found), (LINEAR, FULL, MLP, EXPERTS))
    assert types is not None, "there is a list"
    return types


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}


module_weights = named_weights
