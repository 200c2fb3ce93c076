"""Ling 3.0 (Bailing MoE 3): most layers are delta nets with a decay for each channel, whose
logarithm is bounded, the others have latent attention with a gate of each head; DeepSeek-V3's
experts, whose gates and ups are bounded in some layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.combined_specs import FeedForwardSpec
from shmllm.models.config import ModelConfig
from shmllm.models.families.bailing_moe_v2 import further_layers
from shmllm.models.families.deepseek_v3 import (
    check_choice,
    read_latent_attention,
    read_sigmoid_experts,
)
from shmllm.models.families.kimi_linear import (
    make_delta,
    read_mlp_types_or_count,
    under_deepseeks_names,
    with_convolutions_apart,
)
from shmllm.models.families.qwen3_5 import MOST_TAPS
from shmllm.models.families.step3p5 import read_bound
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mamba_fields import LINEAR
from shmllm.models.mixer_specs import MixerSpec
from shmllm.models.readers import (
    DENSE,
    FULL,
    read_layer_types,
    read_mlp,
    read_model,
    read_num_layers,
    read_positions,
)
from shmllm.models.recurrent_specs import KimiDeltaSpec
from shmllm.models.specs import MoESpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_ONLY: dict[str, str | bool | int] = {
    "attention_bias": False,
    "gated_attention_proj_granularity_type": "head_wise",
    "moe_router_enable_expert_bias": True,
    "no_kda_lora": True,
    "num_kv_heads_for_linear_attn": 0,
    "rope_interleave": True,
    "scale_router_input": False,
    "score_function": "sigmoid",
    "up_proj_norm": False,
    "use_bias": False,
    "use_kda_lora": False,
    "use_mla_nope": False,
    "use_nGPT": False,
    "use_qkv_bias": False,
    "value_norm": False,
}
"""What fields of published models say, some of which name what no published model does."""
_DEFAULTS = {
    "max_position_embeddings": 262_144,
    "norm_topk_prob": True,
    "n_group": 8,
    "n_routed_experts": 512,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
}
_PARTIAL = "partial_rotary_factor"
"""What published files say although the whole part of a key that carries the position rotates."""
_NAMES = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.": ".attention.",
    ".mlp.gate.e_score_correction_bias": ".mlp.gate.expert_bias",
}
_FORGET_GATE = ".f_proj.", ".A_log", ".dt_bias"
"""What belongs to a module of its own in transformers."""


def configure(fields: Fields) -> ModelConfig:
    for name, supported in _ONLY.items():
        check_choice(fields, name, supported)
    fields = under_deepseeks_names(fields, _DEFAULTS)
    positions, num_layers = read_positions(fields, 262_144), read_num_layers(fields)
    types = _read_types(fields, num_layers)
    mixers = {kind: _read_mixer(fields, kind, positions) for kind in dict.fromkeys(types)}
    layers = [
        LayerSpec(mixer=mixers[kind], mlp=mlp)
        for kind, mlp in zip(types, _read_mlps(fields, num_layers), strict=True)
    ]
    count = fields.values.get("num_mtp_layers", 1)
    behind = fields.with_defaults({"num_nextn_predict_layers": count})
    model = read_model(fields, layers, positions)
    return replace(model, skipped_prefixes=further_layers(behind, num_layers))


def _read_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Returns ``layer_types``, or layers in groups of ``layer_group_size``, the last of each with
    attention. What the layers behind the last whole group are, transformers and the authors' code
    do not agree on."""
    types = read_layer_types(fields, num_layers, (LINEAR, FULL))
    if types is not None:
        return types
    size = fields.integer("layer_group_size", 6)
    if num_layers % size:
        raise fields.error(
            f"without 'layer_types', num_hidden_layers ({num_layers}) must be a multiple of "
            f"layer_group_size ({size})"
        )
    return tuple(LINEAR if (index + 1) % size else FULL for index in range(num_layers))


def _read_mixer(fields: Fields, kind: str, positions: int) -> MixerSpec:
    if kind == LINEAR:
        return make_delta(
            fields,
            heads=fields.integer("linear_num_heads", fields.integer("num_attention_heads")),
            head_dim=fields.integer("linear_head_dim", fields.integer("head_dim", 128)),
            taps=fields.integer(
                "linear_conv_kernel_dim",
                fields.integer("short_conv_kernel_size", 4),
                minimum=2,
                maximum=MOST_TAPS,
            ),
            has_low_rank=False,
            least_log=_read_least_log(fields),
        )
    values = {"q_lora_rank": None, "rope_theta": 6_000_000.0} | fields.values
    values["rope_parameters"] = _without_partial(fields.table("rope_parameters"))
    attention = read_latent_attention(
        fields.with_values(_without_partial(values)), positions, interleaved=True
    )
    return replace(attention, gated=True)


def _without_partial(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != _PARTIAL}


def _read_least_log(fields: Fields) -> float | None:
    """Returns ``kda_lower_bound``, a negative number, unless ``kda_safe_gate`` switches it off."""
    if not fields.flag("kda_safe_gate", True):
        return None
    value: Any = fields.with_defaults({"kda_lower_bound": -5.0}).values["kda_lower_bound"]
    if type(value) not in (int, float) or not -1e38 < value < 0:
        raise fields.error(f"'kda_lower_bound' must be a negative number, not {value!r}")
    return float(value)


def _read_mlps(fields: Fields, num_layers: int) -> Iterable[FeedForwardSpec]:
    """Yields the feed-forward of each layer."""
    experts: MoESpec | None = None
    for index, kind in enumerate(read_mlp_types_or_count(fields, num_layers, default=2)):
        if kind == DENSE:
            yield read_mlp(fields)
            continue
        experts = experts or _read_experts(fields)
        yield _bounded(fields, experts, index)


def _read_experts(fields: Fields) -> MoESpec:
    experts = read_sigmoid_experts(
        fields, inner=768, num_experts=None, top_k=None, top_groups=4, weight_scale=2.5
    )
    if experts.shared is not None:
        check_choice(fields, "moe_shared_expert_intermediate_size", experts.shared.inner)
    return experts


def _bounded(fields: Fields, experts: MoESpec, layer: int) -> MoESpec:
    """Returns experts with the bounds that a layer has: those of the model's authors, who apply
    them in vLLM. Their code for transformers, and transformers itself, know no such field."""
    of_experts = read_bound(fields, "expert_swiglu_limit_list", layer)
    if of_experts is not None:
        experts = replace(experts, activation="silu_bounded", bound=of_experts)
    of_shared = read_bound(fields, "share_expert_swiglu_limit_list", layer)
    if of_shared is not None and experts.shared is not None:
        experts = replace(experts, shared=replace(experts.shared, bound=of_shared))
    return experts


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations under this family's names."""
    apart = with_convolutions_apart(_with_flat_logs(weights))
    return {_own_name(name, config): views for name, views in apart.items()}


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations of the names of transformers' modules, and of that which its files
    give the last projection of a delta net."""
    found: NamedWeights = {}
    for name, views in _with_flat_logs(weights).items():
        if any(part in name for part in _NAMES):
            is_of_gate = any(part in name for part in _FORGET_GATE)
            module = ".self_attn.forget_gate." if is_of_gate else ".self_attn."
            found[name.replace(".self_attn.", module)] = views
        if _is_of_net(name, config) and ".o_proj." in name:
            found[renamed(name, _NAMES).replace(".o_proj.", ".dense.")] = views
    return found


def _own_name(name: str, config: ModelConfig) -> str:
    if ".self_attn." in name and not _is_of_net(name, config):
        name = name.replace(".o_proj.", ".dense.")
    return renamed(name, _NAMES)


def _is_of_net(name: str, config: ModelConfig) -> bool:
    """Returns whether a weight belongs to a delta net."""
    if ".self_attn." not in name:
        return False
    return isinstance(config.layers[int(name.split(".")[2])].mixer, KimiDeltaSpec)


def _with_flat_logs(weights: NamedWeights) -> NamedWeights:
    """Returns destinations in which the logarithms of decays have one dimension."""
    from torch import Tensor

    return {
        name: tuple(each.view(-1) for each in views if isinstance(each, Tensor))
        if name.endswith(".A_log")
        else views
        for name, views in weights.items()
    }
