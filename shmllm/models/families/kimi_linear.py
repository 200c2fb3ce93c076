"""Kimi Linear: most layers are gated delta nets with a decay for each channel, the others have
latent attention without rotation; DeepSeek's experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.combined_specs import FeedForwardSpec
from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import (
    check_choice,
    read_latent_attention,
    read_sigmoid_experts,
)
from shmllm.models.families.qwen3_5 import HEAD_MULTIPLE, MOST_TAPS
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mamba_fields import LINEAR
from shmllm.models.mixer_specs import LatentAttentionSpec, MixerSpec
from shmllm.models.readers import (
    DENSE,
    FULL,
    MOST_LAYERS,
    SPARSE,
    read_activation,
    read_layer_types,
    read_mlp,
    read_mlp_types,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
)
from shmllm.models.recurrent_specs import KimiDeltaSpec
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MoESpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_FIELDS = {
    "max_position_embeddings": ("model_max_length", "max_position_embeddings"),
    "norm_topk_prob": ("moe_renormalize", "norm_topk_prob"),
    "n_group": ("num_expert_group", "n_group"),
    "n_routed_experts": ("num_experts", "num_local_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "num_experts_per_tok"),
    "n_shared_experts": ("num_shared_experts", "n_shared_experts"),
}
"""DeepSeek's names of fields, and for each both that transformers takes."""
_DEFAULTS = {
    "max_position_embeddings": 1_048_576,
    "norm_topk_prob": True,
    "n_group": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
}
_EXPERT_NAMES = {".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
_MIXTURE, _MLP = ".block_sparse_moe.", ".mlp."
_FORGET_GATE = ".f_a_proj.", ".f_b_proj.", ".A_log", ".dt_bias"
"""What belongs to a module of its own in transformers."""


def configure(fields: Fields) -> ModelConfig:
    fields = under_deepseeks_names(fields.with_absent({"q_lora_rank": None}), _DEFAULTS)
    num_layers, positions = read_num_layers(fields), read_positions(fields, 1_048_576)
    types = _read_types(fields, num_layers)
    mlp_types = read_mlp_types_or_count(fields, num_layers, default=1)
    mixers: dict[str, MixerSpec] = {}
    if FULL in types:
        mixers[FULL] = _read_attention(fields, positions)
    if LINEAR in types:
        mixers[LINEAR] = _read_delta(fields)
    mlps: dict[str, FeedForwardSpec] = {}
    if DENSE in mlp_types:
        mlps[DENSE] = read_mlp(fields)
    if SPARSE in mlp_types:
        check_choice(fields, "moe_router_activation_func", "sigmoid")
        mlps[SPARSE] = read_sigmoid_experts(
            fields, inner=1024, num_experts=None, top_k=None, weight_scale=2.446
        )
    layers = [
        LayerSpec(mixer=mixers[kind], mlp=mlps[mlp])
        for kind, mlp in zip(types, mlp_types, strict=True)
    ]
    further = fields.integer("num_nextn_predict_layers", 0, minimum=0, maximum=MOST_LAYERS)
    behind = range(num_layers, num_layers + further)
    return replace(
        read_model(fields, layers, positions),
        norm=read_norm(fields, default=1e-5),
        skipped_prefixes=tuple(f"model.layers.{index}." for index in behind),
    )


def under_deepseeks_names(fields: Fields, defaults: Mapping[str, Any]) -> Fields:
    """Returns the fields of Kimi Linear's names under those of DeepSeek.

    Args:
        fields: the fields of config.json.
        defaults: the values of those that are absent, by DeepSeek's names.
    """
    found = {
        name: fields.values.get(own, fields.values.get(other, defaults[name]))
        for name, (own, other) in _FIELDS.items()
    }
    return fields.with_values(fields.values | found)


def _read_attention(fields: Fields, positions: int) -> LatentAttentionSpec:
    check_choice(fields, "mla_use_nope", True)
    attention = read_latent_attention(fields, positions, interleaved=False)
    unrotated = RopeConfig(rotary_dim=attention.rope_dim, type="proportional", num_pairs=0)
    return replace(
        attention, rope=unrotated, scale=(attention.nope_dim + attention.rope_dim) ** -0.5
    )


def _read_delta(fields: Fields) -> KimiDeltaSpec:
    of_nets = Fields(fields.table("linear_attn_config"), f"{fields.where}: linear_attn_config")
    return make_delta(
        fields,
        heads=of_nets.integer("num_heads", fields.integer("linear_num_heads", 32)),
        head_dim=of_nets.integer("head_dim", fields.integer("linear_head_dim", 128)),
        taps=of_nets.integer(
            "short_conv_kernel_size",
            fields.integer("linear_conv_kernel_dim", 4, minimum=2),
            minimum=2,
            maximum=MOST_TAPS,
        ),
    )


def make_delta(
    fields: Fields,
    *,
    heads: int,
    head_dim: int,
    taps: int,
    has_low_rank: bool = True,
    least_log: float | None = None,
) -> KimiDeltaSpec:
    """Returns a delta net of sizes that kernels compute; see `KimiDeltaSpec`."""
    if (activation := read_activation(fields)) != "silu":
        raise fields.error(
            f"delta nets with hidden_act {activation!r} are not supported, only silu"
        )
    net = KimiDeltaSpec(
        heads=heads,
        head_dim=head_dim,
        taps=taps,
        has_low_rank=has_low_rank,
        least_log=least_log,
    )
    if net.head_dim % HEAD_MULTIPLE:
        raise fields.error(
            f"linear_head_dim must be a multiple of {HEAD_MULTIPLE}, not {net.head_dim}"
        )
    return net


def _read_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Returns ``layer_types``, or what ``linear_attn_config`` says, which counts layers from 1."""
    types = read_layer_types(fields, num_layers, (LINEAR, FULL))
    if types is not None:
        return types
    lists = {FULL: "full_attn_layers", LINEAR: "kda_layers"}
    given = fields.table("linear_attn_config")
    if not all(name in given for name in lists.values()):
        return tuple(FULL if index and index % 4 == 0 else LINEAR for index in range(num_layers))
    found = {number: kind for kind, name in lists.items() for number in given[name]}
    if sorted(found) != [*range(1, num_layers + 1)]:
        raise fields.error(
            f"'linear_attn_config' must list each of {num_layers} layers, from 1, once"
        )
    return tuple(found[number] for number in sorted(found))


def read_mlp_types_or_count(fields: Fields, num_layers: int, *, default: int) -> tuple[str, ...]:
    """Returns ``mlp_layer_types``, or what ``first_k_dense_replace`` says, by default `default`."""
    types = read_mlp_types(fields, num_layers)
    num_dense = fields.integer("first_k_dense_replace", default, minimum=0)
    return types or tuple(DENSE if index < num_dense else SPARSE for index in range(num_layers))


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations under this family's names."""
    apart = with_convolutions_apart(weights)
    return {_own_name(name, config): views for name, views in apart.items()}


def with_convolutions_apart(weights: NamedWeights) -> NamedWeights:
    """Returns destinations in which queries, keys and values have tensors of their own for their
    convolution, too."""
    from shmllm.models.matrices import matrix_of

    found: NamedWeights = {}
    for name, views in weights.items():
        if name.endswith(".conv1d.weight"):
            rows = matrix_of(views)
            parts = rows.split_with_sizes([rows.shape[0] // 3] * 3)
            for part, own in zip(parts, "qkv", strict=True):
                found[name.replace(".conv1d.", f".{own}_conv1d.")] = (part,)
        else:
            found[name] = views
    return found


def _own_name(name: str, config: ModelConfig) -> str:
    if not _has_experts(name, config):
        return name
    name = name.replace(_MLP, _MIXTURE)
    return renamed(name, _EXPERT_NAMES) if ".experts." in name else name


def _has_experts(name: str, config: ModelConfig) -> bool:
    """Returns whether a weight belongs to the feed-forward of a layer with experts."""
    return _MLP in name and isinstance(config.layers[int(name.split(".")[2])].mlp, MoESpec)


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations of the names that differ in transformers' modules, and of those that
    transformers gives dense MLPs in files."""
    names = {name: _other_name(name, config) for name in weights}
    return {other: weights[name] for name, other in names.items() if other is not None}


def _other_name(name: str, config: ModelConfig) -> str | None:
    if any(part in name for part in _FORGET_GATE):
        return name.replace(".self_attn.", ".self_attn.forget_gate.")
    if name.endswith(".conv1d.weight"):
        return name
    if _MLP not in name or ".experts." in name:
        return None
    return name if _has_experts(name, config) else name.replace(_MLP, _MIXTURE)
