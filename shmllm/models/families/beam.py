"""Beam: windows, and every sixth layer over all positions without rotation; gates with a bias for
each head; norms before and behind attention and MLP; DeepSeek-V3's experts without a shared one.

The residual stream is a mean: behind the n-th addition it is ``stream * sqrt((n - 1) / n) + x *
sqrt(1 / n)``. Times sqrt(n) that is a sum, of which RMSNorms with n times the eps make the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import with_groups
from shmllm.models.families.deepseek_v32 import with_mlps
from shmllm.models.families.gemma3 import NORMS
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec, Growth
from shmllm.models.readers import (
    FULL,
    SLIDING,
    read_attention,
    read_experts,
    read_layer_types,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
    read_rope_of_type,
    read_window,
    windows_by_type,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MoESpec

_LOGITS_CAP = 30.0
_GROWTH = Growth(0.0, 2048, offset=1, power=0.1)
"""Of queries in layers without rotation."""
_ROPES: dict[str, dict[str, Any] | None] = {SLIDING: {"rope_theta": 10_000.0}, FULL: None}
"""The rotation of each type of layers where the field is absent."""


def configure(fields: Fields) -> ModelConfig:
    positions, norm = read_positions(fields, 8192), read_norm(fields)
    mixers = _read_mixers(fields, positions)
    layers = [
        _with_norms(layer, index, norm.eps)
        for index, layer in enumerate(with_mlps(fields, mixers, _read_experts(fields)))
    ]
    model = read_model(fields, layers, positions)
    cap: float | None = _LOGITS_CAP
    if "final_logit_softcapping" in fields.values:
        cap = fields.optional_number("final_logit_softcapping")
    num_additions = 2 * len(layers)
    last = replace(norm, eps=(num_additions + 1) * norm.eps)
    return replace(model, norm=norm, last_norm=last, logits_cap=cap)


def _with_norms(layer: LayerSpec, index: int, eps: float) -> LayerSpec:
    """Returns a layer with its norms, those that read the stream with their eps."""
    num_before = 2 * index  # additions to the stream, which begins with the first term of its sum
    return replace(
        layer, norms=replace(NORMS, eps_before=((num_before + 1) * eps, (num_before + 2) * eps))
    )


def _read_mixers(fields: Fields, positions: int) -> list[AttentionSpec]:
    """Returns the attention of each layer. A type of layers whose rotation is null has none."""
    bias = fields.flag("attention_bias", False)
    plain = replace(
        read_attention(fields, num_kv_heads=8, head_dim=128, bias=bias, output_bias=bias),
        qk_norm="head",
        own_gates=True,
    )
    num_layers = read_num_layers(fields)
    types = read_layer_types(fields, num_layers)
    if types is None:
        period = [*[SLIDING] * 5, FULL]
        types = (*(period[index % 6] for index in range(num_layers - 1)), FULL)
    ropes = {kind: _read_rope(fields, positions, plain.head_dim, kind) for kind in set(types)}
    mixers = {
        kind: replace(plain, rope=rope, growth=_GROWTH if rope is None else None)
        for kind, rope in ropes.items()
    }
    windows = windows_by_type(fields, types, read_window(fields, 512))
    return [
        replace(mixers[kind], window=window) for kind, window in zip(types, windows, strict=True)
    ]


def _read_rope(fields: Fields, positions: int, head_dim: int, kind: str) -> RopeConfig | None:
    """Returns the rotation of a type of layers; None: they have none."""
    known = fields.table("rope_parameters") or _ROPES
    if kind in known and known[kind] is None:
        return None
    own = {name: values for name, values in known.items() if values is not None}
    return read_rope_of_type(fields, positions, head_dim, kind, own)


def _read_experts(fields: Fields) -> MoESpec:
    inner = fields.integer("moe_intermediate_size", 2560)
    experts = read_experts(fields, inner, num_experts=256, top_k=8)
    return replace(
        with_groups(fields, experts, 8, 4, best_of_group=2),
        scoring="sigmoid",
        renormalize=fields.null_as_false("norm_topk_prob").flag("norm_topk_prob", True),
        correction_bias=True,
        router_float32=True,
        weight_scale=fields.number("routed_scaling_factor", 2.5),
    )
