"""Falcon-H1: attention and Mamba 2 side by side in each layer, and factors of nearly all products
(the multipliers of maximal update parametrization)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.jamba import NORMS, named_weights
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mamba_fields import HYBRID_MAMBA2, Names, read_mamba2
from shmllm.models.mixer_specs import AttentionSpec, SideBySideSpec
from shmllm.models.readers import (
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
    with_rope,
)
from shmllm.models.recurrent_specs import GatedNorm, Mamba2Spec

__all__ = ["configure", "module_weights", "named_weights"]

_FIELDS: Names = {
    **HYBRID_MAMBA2,
    "width": ("mamba_d_ssm", 1024),
    "output_bias": ("projectors_bias", False),
}

module_weights = named_weights


def configure(fields: Fields) -> ModelConfig:
    """The factor of what attention reads multiplies queries, keys and values: it is one of scores,
    squared, and of the output. That of gates is one of what the MLP reads, which its output is
    divided by."""
    num_layers, positions = read_num_layers(fields), read_positions(fields, 8192)
    of_gates, of_output = _numbers(fields, "mlp_multipliers", 2)
    of_queries = fields.number("attention_in_multiplier", 1.0)
    mixers = SideBySideSpec(
        mixers=(_read_mamba(fields), _read_attention(fields, positions, of_queries)),
        scales=(
            fields.number("ssm_out_multiplier", 1.0),
            fields.number("attention_out_multiplier", 1.0) * of_queries,
        ),
    )
    mlp = read_mlp(fields, bias=fields.flag("mlp_bias", False))
    _check_bias(fields, "mlp_bias", mlp.bias, "mlp_multipliers", of_gates)
    layer = LayerSpec(mixer=mixers, mlp=mlp, norms=NORMS, mlp_scale=of_gates)
    return replace(
        read_model(fields, [layer] * num_layers, positions),
        norm=read_norm(fields, default=1e-5),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=of_output / of_gates,
        logits_scale=fields.number("lm_head_multiplier", 1.0),
    )


def _read_attention(fields: Fields, positions: int, of_queries: float) -> AttentionSpec:
    bias = fields.flag("attention_bias", False)
    _check_bias(fields, "attention_bias", bias, "attention_in_multiplier", of_queries)
    attention = read_attention(fields, num_kv_heads=8, bias=bias, output_bias=bias)
    of_keys = fields.number("key_multiplier", 1.0)
    scaled = replace(attention, scale=attention.scale * of_keys * of_queries**2)
    return with_rope(scaled, fields, positions)


def _read_mamba(fields: Fields) -> Mamba2Spec:
    fields = fields.null_as_false("mamba_conv_bias", "mamba_norm_before_gate")
    mamba = read_mamba2(fields, _FIELDS)
    is_before = fields.flag("mamba_norm_before_gate", True)
    norm: GatedNorm = "before gates" if is_before else "behind gates"
    has_norm = fields.flag("mamba_rms_norm", False)
    of_inputs = fields.number("ssm_in_multiplier", 1.0)
    _check_bias(fields, "mamba_proj_bias", mamba.bias, "ssm_in_multiplier", of_inputs)
    of_parts = tuple(each * of_inputs for each in _numbers(fields, "ssm_multipliers", 5))
    factors = None if set(of_parts) == {1.0} else of_parts
    return replace(mamba, norm=norm if has_norm else None, factors=factors)


def _check_bias(fields: Fields, name: str, has_bias: bool, factor_name: str, factor: float) -> None:
    if has_bias and factor != 1:
        raise fields.error(f"{name} with {factor_name} of {factor} is not supported, only of 1")


def _numbers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    """Returns a list of so many numbers; all are 1 if the field is absent."""
    found: Any = fields.values.get(name)
    if found is None:
        return (1.0,) * count
    if not isinstance(found, list) or len(found) != count:
        raise fields.error(f"{name!r} must list {count} numbers, not {found!r}")
    return tuple(Fields({name: each}, fields.where).number(name) for each in found)
