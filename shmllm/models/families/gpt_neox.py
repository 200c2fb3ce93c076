"""GPT-NeoX (Black et al., 2022) and Pythia: attention and MLP side by side, each behind a LayerNorm
of its own. Checkpoints have query, key and value of each head side by side in one matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_model,
    read_num_layers,
    read_positions,
    read_ungated_mlp,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import NormSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_ROPE = {
    "rope_theta": ("rotary_emb_base", 10_000.0),
    "partial_rotary_factor": ("rotary_pct", 0.25),
}
"""GPT-NeoX's names of the fields of the rotation, with their defaults."""

NAMES = {
    "model.embed_tokens.": "model.embed_in.",
    "model.norm.": "model.final_layer_norm.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.": ".attention.",
    ".mlp.up_proj.": ".mlp.dense_h_to_4h.",
    ".mlp.down_proj.": ".mlp.dense_4h_to_h.",
}
"""The parts of names that differ from the default ones."""
QKV = "query_key_value", ("q_proj", "k_proj", "v_proj")


def configure(fields: Fields) -> ModelConfig:
    plain = {"num_key_value_heads": None, "head_dim": None}  # GPT-NeoX has no such fields
    fields = fields.under_names(_ROPE)
    fields = fields.with_values(fields.values | plain)
    positions = read_positions(fields, 2048)
    bias = fields.flag("attention_bias", True)
    attention = read_attention(fields, bias=bias, output_bias=bias)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, partial=0.25)
    mlp = read_ungated_mlp(fields, activation="gelu", bias=True)
    layer = LayerSpec(
        mixer=replace(attention, rope=rope),
        mlp=mlp,
        parallel=fields.flag("use_parallel_residual", True),
    )
    model = read_model(fields, [layer] * read_num_layers(fields), positions)
    norm = NormSpec(kind="layer", eps=fields.number("layer_norm_eps", 1e-5), bias=True)
    return replace(model, norm=norm)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import with_fused_groups

    found = with_fused_groups(weights, QKV, config.attentions[0].num_kv_heads)
    return {renamed(name, NAMES): views for name, views in found.items()}
