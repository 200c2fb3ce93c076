"""Step 3.5, and the language model of Step 3.7: attention with a gate for each head, in layers
whose heads, windows and rotations differ by type; experts chosen by sigmoids; norms of (1 +
weight)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import check_choice
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import (
    DENSE,
    FULL,
    MOST_LAYERS,
    SLIDING,
    SPARSE,
    read_attention,
    read_experts,
    read_layer_types,
    read_mlp_types,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
    windows_by_type,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec, MoESpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_ONLY: dict[str, str | bool] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "norm_expert_weight": True,
    "moe_router_activation": "sigmoid",
    "att_impl_type": "GQA",
    "gating": True,
    "use_head_wise_attn_gate": True,
    "use_moe_router_bias": True,
    "need_fp32_gate": True,
    "zero_centered": True,
    "use_bidirectional_attention": False,
}
"""What fields say that transformers does not read, or knows one value of."""
_OTHERS = {
    "num_key_value_heads": ("num_attention_groups",),
    "num_experts": ("n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_top_k",),
    "share_expert_dim": ("share_expert_dims",),
    "num_nextn_predict_layers": ("num_mtp_layers",),
}
"""The names that fields have in files, by those that the readers know."""
_PADDED = (
    *("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"),
    *("rope_theta", "partial_rotary_factors", "use_rope_layers"),
)
"""The lists that may have items of the layers that predict further tokens."""
_PROJECTOR = "vit_large_projector."
"""What the files of Step 3.7 have of images beside a tower."""
_NAMES = {
    ".self_attn.gate_proj.": ".self_attn.g_proj.",
    ".mlp.gate.weight": ".moe.gate.weight",
    ".mlp.gate.e_score_correction_bias": ".moe.router_bias",
    ".mlp.experts.down_proj": ".moe.down_proj.weight",
    ".mlp.share_expert.": ".share_expert.",
}


def configure(fields: Fields) -> ModelConfig:
    num_layers = read_num_layers(fields)
    fields = _under_known_names(fields)
    further = fields.integer("num_nextn_predict_layers", 0, minimum=0, maximum=MOST_LAYERS)
    fields = _without_further(fields, num_layers, further)
    _check(fields)
    mixers = _read_mixers(fields, num_layers)
    mlps = _read_mlps(fields, num_layers)
    layers = [LayerSpec(mixer=mixer, mlp=mlp) for mixer, mlp in zip(mixers, mlps, strict=True)]
    behind = [f"model.layers.{index}." for index in range(num_layers, num_layers + further)]
    return replace(
        read_model(fields, layers, _positions(fields)),
        norm=replace(read_norm(fields, default=1e-5), offset=1.0),
        skipped_prefixes=(*behind, _PROJECTOR),
    )


def _positions(fields: Fields) -> int:
    return read_positions(fields, 128_000)


def _under_known_names(fields: Fields) -> Fields:
    found: dict[str, Any] = {}
    for name, others in _OTHERS.items():
        given = (fields.values[other] for other in others if fields.values.get(other) is not None)
        found[name] = next(given, None)
    return fields.with_defaults({name: value for name, value in found.items() if value is not None})


def _without_further(fields: Fields, num_layers: int, further: int) -> Fields:
    lists = {name: fields.values.get(name) for name in _PADDED}
    own = {
        name: value[:num_layers]
        for name, value in lists.items()
        if isinstance(value, list) and len(value) == num_layers + further
    }
    return fields.with_values(fields.values | own)


def _check(fields: Fields) -> None:
    for name, supported in _ONLY.items():
        if (name, fields.values.get(name)) != ("gating", "per-head"):
            check_choice(fields, name, supported)
    if fields.values.get("yarn_only_types") not in (None, [], [FULL]):
        raise fields.error(f"'yarn_only_types' is not supported but for [{FULL!r}]")
    if not all(fields.values.get("use_rope_layers") or []):
        raise fields.error("'use_rope_layers' is not supported but for layers that rotate")


def _read_mixers(fields: Fields, num_layers: int) -> list[AttentionSpec]:
    types = read_layer_types(fields, num_layers) or (FULL,) * num_layers
    window = fields.optional_integer("sliding_window")
    windows = windows_by_type(fields, types, window)
    own = {FULL: fields, SLIDING: _with_heads_of_windows(fields)}
    heads = {kind: _read_attention(own[kind]) for kind in set(types)}
    return [
        replace(
            heads[kind], window=window, rope=_read_rope(fields, kind, index, heads[kind].head_dim)
        )
        for index, (kind, window) in enumerate(zip(types, windows, strict=True))
    ]


def _read_attention(fields: Fields) -> AttentionSpec:
    attention = read_attention(fields, num_kv_heads=8, head_dim=128)
    return replace(
        attention,
        scale=fields.number("query_pre_attn_scalar", attention.head_dim) ** -0.5,
        qk_norm="head",
        gated=True,
        gates_of_heads=True,
        gates_apart=True,
    )


def _with_heads_of_windows(fields: Fields) -> Fields:
    """Returns the fields with the number of heads that layers with a window have."""
    name = "attention_other_setting"
    own = Fields(fields.table(name), f"{fields.where}: {name}")
    check_choice(own, "attention_type", SLIDING)
    check_choice(own, "num_attention_groups", fields.integer("num_key_value_heads", 8))
    check_choice(own, "head_dim", fields.integer("head_dim", 128))
    usual = own.integer("num_attention_heads", fields.integer("num_attention_heads"))
    count = fields.integer("num_sliding_attention_heads", usual)
    for settings in fields.table("per_layer_config").values():
        if settings != {"num_attention_heads": count}:
            raise fields.error(
                "'per_layer_config' is not supported but for the num_attention_heads of layers "
                f"with a window, {count}"
            )
    return fields.with_values(fields.values | {"num_attention_heads": count})


def _read_rope(fields: Fields, kind: str, layer: int, head_dim: int) -> RopeConfig:
    parameters: Any = fields.table("rope_parameters").get(kind)
    if not isinstance(parameters, dict):
        parameters = {
            "rope_theta": _item(fields, "rope_theta", layer),
            "partial_rotary_factor": _item(fields, "partial_rotary_factors", layer),
        }
        parameters = {name: each for name, each in parameters.items() if each is not None}
        if kind == FULL:
            parameters |= fields.table("rope_scaling")
    own = Fields({"rope_parameters": {kind: parameters}}, fields.where)
    return RopeConfig.from_fields(own, _positions(fields), head_dim, layer_type=kind, partial=1.0)


def _item(fields: Fields, name: str, layer: int) -> Any:
    """Returns a layer's item of a field that lists one for each, or the field itself."""
    values = fields.values.get(name)
    if not isinstance(values, list):
        return values
    if len(values) <= layer:
        raise fields.error(f"{name!r} must list a number for each layer")
    return values[layer]


def _read_mlps(fields: Fields, num_layers: int) -> list[MLPSpec | MoESpec]:
    bias = fields.flag("mlp_bias", False)
    types = read_mlp_types(fields, num_layers) or _types_by_number(fields, num_layers)
    experts: MoESpec | None = None
    if SPARSE in types:
        named = fields.with_defaults({"num_experts": 288})
        inner = fields.integer("moe_intermediate_size", 1280)
        experts = replace(
            read_experts(named, inner, num_experts=288, top_k=8),
            scoring="sigmoid",
            renormalize=True,
            correction_bias=True,
            router_float32=True,
            weight_scale=fields.number("moe_router_scaling_factor", 1.0),
            whole=True,
            shared_name="share_expert",
            shared_module="shared_experts",
        )
    found: list[MLPSpec | MoESpec] = []
    for index, kind in enumerate(types):
        bound = read_bound(fields, "swiglu_limits_shared", index)
        if kind == DENSE or experts is None:
            inner = fields.integer("intermediate_size", 11264)
            found.append(MLPSpec(inner=inner, bias=bias, bound=bound))
            continue
        inner = fields.integer("share_expert_dim", 1280)
        own = replace(experts, shared=MLPSpec(inner=inner, bias=bias, bound=bound))
        if (limit := read_bound(fields, "swiglu_limits", index)) is not None:
            own = replace(own, activation="silu_bounded", bound=limit)
        found.append(own)
    return found


def _types_by_number(fields: Fields, num_layers: int) -> list[str]:
    """Returns the types of layers whose numbers, or else all from 3 on, have experts."""
    given: Any = fields.values.get("moe_layers_enum")
    if given is None:
        return [SPARSE if index >= 3 else DENSE for index in range(num_layers)]
    items = given.split(",") if isinstance(given, str) else given
    try:
        numbers = {int(item) for item in items if str(item).strip()}
    except (TypeError, ValueError):
        raise fields.error("'moe_layers_enum' must list numbers of layers") from None
    return [SPARSE if index in numbers else DENSE for index in range(num_layers)]


def read_bound(fields: Fields, name: str, layer: int) -> float | None:
    """Returns the bound that a layer has; 0 and null stand for none."""
    value = _item(fields, name, layer)
    if value is not None and not isinstance(fields.values[name], list):
        raise fields.error(f"{name!r} must list a number for each layer")
    if not value:
        return None
    return Fields({name: value}, fields.where).number(name)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations under this family's names: gates and ups of all experts have a
    tensor each."""
    from shmllm.models.fused_names import gates_and_ups
    from shmllm.models.matrices import unstacked

    found: NamedWeights = {}
    for name, views in weights.items():
        if name.endswith(".mlp.experts.gate_up_proj"):
            prefix, [view] = name.removesuffix("mlp.experts.gate_up_proj"), views
            for part, own in zip(("gate", "up"), gates_and_ups(view), strict=True):
                found[f"{prefix}moe.{part}_proj.weight"] = (unstacked(own, view.shape[0]),)
        else:
            found[renamed(name, _NAMES)] = views
    return found
