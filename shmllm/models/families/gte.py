"""GTE and Arctic Embed 2: BERT with rotations in place of learned positions, and gated MLPs (Zhang
et al., "mGTE", 2024)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.config_file import architecture_name
from shmllm.models.families.bert import read_head, tanh_dense
from shmllm.models.families.rotary_encoder import (
    other_names,
    published_weights,
    read_rotary_encoder,
)
from shmllm.models.fields import Fields
from shmllm.models.readers import read_activation, read_attention
from shmllm.models.specs import MLPSpec

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

__all__ = ["configure", "named_weights", "other_names"]

_COMPUTED: dict[str, Any] = {
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "logn_attention_clip1": False,
    "pack_qkv": True,
}
"""What is computed of the fields that the authors' files alone have."""

_NAMES = {
    "model.layers.": "encoder.layer.",
    ".self_attn.": ".attention.",
    ".post_attention_layernorm.": ".attn_ln.",
    ".post_mlp_layernorm.": ".mlp_ln.",
}
_QKV = "qkv_proj", ("q_proj", "k_proj", "v_proj")
_UP_GATE = "up_gate_proj", ("up_proj", "gate_proj")


def configure(fields: Fields) -> ModelConfig:
    is_published = architecture_name(fields).startswith(("New", "GteNew"))
    theta, length = (10_000.0, 2048) if is_published else (160_000.0, 8192)
    for name, computed in _COMPUTED.items():
        if (found := fields.values.get(name, computed)) != computed:
            raise fields.error(f"{name} {found!r} is not supported; supported: {computed!r}")
    mlp = MLPSpec(
        inner=fields.integer("intermediate_size"),
        activation=read_activation(fields, "hidden_act", "gelu"),
        bias=True,
        up_bias=False,
    )
    positions = fields.integer("max_position_embeddings", length)
    head = read_head(fields, tanh_dense(fields, "pooler.dense"))
    unread = () if head else ("pooler.", "classifier.")  # this weighs tokens of sparse vectors
    return replace(
        read_rotary_encoder(_without_ntk(fields, theta), mlp, positions, theta=theta, bias=True),
        head=head,
        num_token_types=fields.integer("type_vocab_size", 1, minimum=0),
        skipped_prefixes=("lm_head.", *unread),
    )


def _without_ntk(fields: Fields, theta: float) -> Fields:
    """Returns the fields with a linear rotation in place of one of the authors' type "ntk", which
    multiplies the base by the factor and divides the frequencies by its power of 2 / head_dim."""
    name = "rope_scaling" if fields.table("rope_scaling") else "rope_parameters"
    rope = Fields(fields.table(name), f"{fields.where}: {name}")
    if rope.text("rope_type", rope.text("type", "default")) != "ntk":
        return fields
    if (mixed := rope.values.get("mixed_b")) is not None:
        raise rope.error(f"mixed_b {mixed!r} is not supported; supported: None")
    factor, width = rope.number("factor"), read_attention(fields).head_dim
    theta = rope.number("rope_theta", fields.number("rope_theta", theta))
    linear = {"rope_type": "linear", "rope_theta": factor * theta, "factor": factor ** (2 / width)}
    return fields.with_values(fields.values | {"rope_scaling": None, "rope_parameters": linear})


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return published_weights(weights, _NAMES, _QKV, _UP_GATE)
