"""nanochat: norms without weights, also of the embeddings, and of queries and keys behind their
rotation, which turns the other way; an MLP of squared ReLUs without a gate."""

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

_NAMES = {".mlp.up_proj.": ".mlp.fc1.", ".mlp.down_proj.": ".mlp.fc2."}


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 2048)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, bias=bias, output_bias=bias)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim)
    attention = replace(
        attention, rope=replace(rope, reversed=True), qk_norm="head", norms_rotated=True
    )
    mlp = read_ungated_mlp(fields, activation="relu2", bias=False)
    layer = LayerSpec(mixer=attention, mlp=mlp)
    model = read_model(fields, [layer] * read_num_layers(fields), positions)
    return replace(
        model,
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1e-6), weight=False),
        embedding_norm=True,
        logits_cap=_logits_cap(fields),
    )


def _logits_cap(fields: Fields) -> float | None:
    """Returns ``final_logit_softcapping``, which null switches off."""
    name = "final_logit_softcapping"
    return fields.optional_number(name) if name in fields.values else 15.0


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}
