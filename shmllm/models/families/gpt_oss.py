"""gpt-oss: attention with sinks, every other layer in a window, and experts in place of MLPs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
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
    read_window,
    windows_by_type,
    with_windows,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MoESpec

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotation of a file that has no parameters of one."""
_CLAMPED = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
"""The bound of gates and ups, and the factor of gates in the sigmoid, that the kernels know."""


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 131072)
    attention, experts = read_sinks(fields, positions), read_clamped_experts(fields)
    num_layers = read_num_layers(fields)
    types = read_layer_types(fields, num_layers)
    if types is None:
        types = tuple(FULL if layer % 2 else SLIDING for layer in range(num_layers))
    windows = windows_by_type(fields, types, read_window(fields, 128))
    layer = LayerSpec(mixer=attention, mlp=experts)
    model = read_model(fields, with_windows(layer, windows), positions)
    return replace(model, norm=read_norm(fields, default=1e-5))


def read_sinks(fields: Fields, positions: int) -> AttentionSpec:
    """Returns an attention with sinks over all positions, and its rotation."""
    bias = fields.flag("attention_bias", True)
    attention = read_attention(fields, num_kv_heads=8, head_dim=64, bias=bias, output_bias=bias)
    of_rope = fields
    if fields.values.get("rope_parameters") is None and fields.values.get("rope_scaling") is None:
        of_rope = Fields({**fields.values, "rope_scaling": ROPE}, fields.where)
    rope = RopeConfig.from_fields(of_rope, positions, attention.head_dim, theta=150000.0)
    return replace(attention, rope=rope, sinks=True)


def read_clamped_experts(fields: Fields) -> MoESpec:
    """Returns experts whose gates and ups have bounds."""
    for name, known in _CLAMPED.items():
        if (number := fields.number(name, known)) != known:
            raise fields.error(f"{name} {number:g} is not supported; supported: {known:g}")
    experts = read_experts(fields, fields.integer("intermediate_size"), num_experts=128, top_k=4)
    return replace(
        experts,
        activation="gpt_oss",
        scoring="softmax_of_top",
        router_bias=True,
        bias=True,
        whole=True,
        transposed=True,
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {name.replace(".mlp.gate.", ".mlp.router."): views for name, views in weights.items()}
