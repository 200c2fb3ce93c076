"""GLM-4: norms on both sides; half of each head rotates, neighbouring elements together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
)
from shmllm.models.rope_config import RopeConfig

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

NORMS = LayerNorms(
    before_mixer="input_layernorm",
    after_mixer="post_self_attn_layernorm",
    before_mlp="post_attention_layernorm",
    after_mlp="post_mlp_layernorm",
)


def configure(fields: Fields, partial: float = 0.5) -> ModelConfig:
    """
    Args:
        fields: the fields of config.json.
        partial: the default of ``partial_rotary_factor``.
    """
    positions = read_positions(fields, 131_072)
    bias = fields.flag("attention_bias", True)
    attention = read_attention(fields, num_kv_heads=2, head_dim=128, bias=bias)
    rope = RopeConfig.from_fields(
        fields, positions, attention.head_dim, partial=partial, interleaved=True
    )
    layer = LayerSpec(mixer=replace(attention, rope=rope), mlp=read_mlp(fields), norms=NORMS)
    model = read_model(fields, [layer] * read_num_layers(fields), positions)
    return replace(model, norm=read_norm(fields, default=1.5625e-07))


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import GATE_UP, with_fused

    return with_fused(weights, GATE_UP)
