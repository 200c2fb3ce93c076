"""DeepSeek-V3 and R1, and Kimi K2: latent attention; experts chosen in groups by sigmoids."""

from __future__ import annotations

import math
from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import LatentAttentionSpec, MixerSpec
from shmllm.models.readers import (
    MOST_LAYERS,
    read_activation,
    read_mlp,
    read_model,
    read_num_layers,
    read_positions,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec, MoESpec


def configure(fields: Fields) -> ModelConfig:
    fields = fields.null_as_false("rope_interleave", "norm_topk_prob")
    positions = read_positions(fields, 4096)
    attention = read_latent_attention(
        fields, positions, interleaved=fields.flag("rope_interleave", True)
    )
    experts = read_sigmoid_experts(
        fields, inner=2048, num_experts=256, num_groups=8, top_groups=4, weight_scale=2.5
    )
    layers = with_dense_layers(fields, attention, experts, default=3)
    return with_further_layers(read_model(fields, layers, positions), fields, experts)


def read_latent_attention(
    fields: Fields,
    positions: int,
    *,
    interleaved: bool,
    query_rank: int = 1536,
    nope_dim: int = 128,
    value_dim: int = 128,
) -> LatentAttentionSpec:
    """Returns a latent attention with its rotation.

    Args:
        fields: the fields of config.json.
        positions: the result of `read_positions`.
        interleaved: see `RopeConfig`.
        query_rank: the default of ``q_lora_rank``, which null switches off.
        nope_dim: the default of ``qk_nope_head_dim``.
        value_dim: the default of ``v_head_dim``.
    """
    num_heads = fields.integer("num_attention_heads")
    if (kv_heads := fields.integer("num_key_value_heads", num_heads)) != num_heads:
        raise fields.error(
            f"num_key_value_heads ({kv_heads}) differs from num_attention_heads ({num_heads}); "
            "latent attention has a key and a value for each head"
        )
    rope_dim = fields.integer("qk_rope_head_dim", 64)
    nope_dim = fields.integer("qk_nope_head_dim", nope_dim)
    rope = RopeConfig.from_fields(fields, positions, rope_dim, interleaved=interleaved)
    rank: int | None = query_rank
    if "q_lora_rank" in fields.values:
        rank = fields.optional_integer("q_lora_rank")
    return LatentAttentionSpec(
        num_heads=num_heads,
        rank=fields.integer("kv_lora_rank", 512),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=fields.integer("v_head_dim", value_dim),
        query_rank=rank,
        rope=rope,
        scale=(nope_dim + rope_dim) ** -0.5 * _squared_mscale(rope),
        bias=fields.flag("attention_bias", False),
        kv_apart=fields.flag("kv_projections_apart", False),  # of GGUF files alone
    )


def _squared_mscale(rope: RopeConfig) -> float:
    """Returns the factor of scores that comes with yarn (Peng et al., 2023, eq. 15, with a
    weight)."""
    if rope.type != "yarn" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def read_sigmoid_experts(
    fields: Fields,
    *,
    inner: int,
    num_experts: int | None,
    top_k: int | None = 8,
    num_shared: int = 1,
    num_groups: int = 1,
    top_groups: int = 1,
    weight_scale: float = 1.0,
    renormalize: bool = True,
) -> MoESpec:
    """Returns DeepSeek-V3's experts (2024, section 2.1.2), with the MLP that all tokens go to.

    Args:
        fields: the fields of config.json.
        inner: the default of ``moe_intermediate_size``.
        num_experts: the default of ``n_routed_experts``; None: the field is required.
        top_k: the default of ``num_experts_per_tok``, likewise.
        num_shared: the default of ``n_shared_experts``.
        num_groups: the default of ``n_group``.
        top_groups: the default of ``topk_group``.
        weight_scale: the default of ``routed_scaling_factor``.
        renormalize: the default of ``norm_topk_prob``.
    """
    check_choice(fields, "scoring_func", "sigmoid")
    check_choice(fields, "topk_method", "noaux_tc")
    experts = read_routed_experts(
        fields, inner=inner, num_experts=num_experts, top_k=top_k, num_shared=num_shared
    )
    return replace(
        with_groups(fields, experts, num_groups, top_groups, best_of_group=2),
        scoring="sigmoid",
        correction_bias=True,
        weight_scale=fields.number("routed_scaling_factor", weight_scale),
        renormalize=fields.flag("norm_topk_prob", renormalize),
    )


def read_routed_experts(
    fields: Fields, *, inner: int, num_experts: int | None, top_k: int | None, num_shared: int
) -> MoESpec:
    """Returns experts with a router in float32, and the MLP that all tokens go to.

    Args:
        fields: the fields of config.json.
        inner: the default of ``moe_intermediate_size``.
        num_experts: the default of ``n_routed_experts``; None: the field is required.
        top_k: the default of ``num_experts_per_tok``, likewise.
        num_shared: the default of ``n_shared_experts``, whose widths are added.
    """
    check_choice(fields, "moe_layer_freq", 1)
    activation = read_activation(fields)
    if activation != "silu":
        raise fields.error(f"experts with hidden_act {activation!r} are not supported, only silu")
    inner = fields.integer("moe_intermediate_size", inner)
    num_experts = fields.integer("n_routed_experts", num_experts)
    top_k = fields.integer("num_experts_per_tok", top_k)
    if top_k > num_experts:
        raise fields.error(f"num_experts_per_tok ({top_k}) is more than {num_experts} experts")
    num_shared = fields.integer("n_shared_experts", num_shared, minimum=0)
    bias = fields.flag("mlp_bias", False)
    shared = MLPSpec(inner=inner * num_shared, bias=bias) if num_shared else None
    return MoESpec(
        num_experts=num_experts,
        top_k=top_k,
        inner=inner,
        router_float32=True,
        shared=shared,
        shared_name="shared_experts",
    )


def with_groups(
    fields: Fields, experts: MoESpec, num_groups: int, top_groups: int, *, best_of_group: int
) -> MoESpec:
    """Returns experts that are chosen from the best groups.

    Args:
        fields: the fields of config.json.
        experts: the experts.
        num_groups: the default of ``n_group``.
        top_groups: the default of ``topk_group``.
        best_of_group: see `MoESpec`.
    """
    num_groups = fields.integer("n_group", num_groups)
    top_groups = fields.integer("topk_group", top_groups)
    size, rest = divmod(experts.num_experts, num_groups)
    if rest:
        raise fields.error(f"n_group ({num_groups}) does not divide {experts.num_experts} experts")
    if num_groups > 1 and size < best_of_group:
        raise fields.error(f"n_group ({num_groups}) leaves {size} experts in a group: too few")
    if top_groups > num_groups or top_groups * size < experts.top_k:
        raise fields.error(
            f"topk_group ({top_groups}) does not suit {experts.top_k} experts for each token in "
            f"{num_groups} groups of {size}"
        )
    return replace(
        experts, num_groups=num_groups, top_groups=top_groups, best_of_group=best_of_group
    )


def with_dense_layers(
    fields: Fields, mixer: MixerSpec, experts: MoESpec, *, default: int
) -> list[LayerSpec]:
    """Returns layers whose first ones have an MLP in place of experts.

    Args:
        fields: the fields of config.json.
        mixer: the attention of each layer.
        experts: the experts of the others.
        default: that of ``first_k_dense_replace``, their number. If it is 0, config.json needs no
            ``intermediate_size``.
    """
    num_dense = fields.integer("first_k_dense_replace", default, minimum=0)
    bias = fields.flag("mlp_bias", False)
    return [
        LayerSpec(mixer=mixer, mlp=read_mlp(fields, bias=bias) if index < num_dense else experts)
        for index in range(read_num_layers(fields))
    ]


def with_further_layers(model: ModelConfig, fields: Fields, experts: MoESpec) -> ModelConfig:
    """Returns a model whose checkpoint may have ``num_nextn_predict_layers`` more layers, which
    have the attention of the others, and these experts."""
    count = fields.integer("num_nextn_predict_layers", 1, minimum=0, maximum=MOST_LAYERS)
    layer = replace(model.layers[-1], mlp=experts)
    return replace(model, further_layers=(layer,) * count)


def check_choice(fields: Fields, name: str, supported: str | float | None) -> None:
    """Raises EngineStartError if the field `name` has another value than the supported one."""
    value = fields.values.get(name)
    if value not in (None, supported):
        raise fields.error(f"{name} {value!r} is not supported; supported: {supported!r}")
