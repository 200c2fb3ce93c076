"""Encoders with the norms of BERT whose attention rotates queries and keys: what they share.

transformers' modules have Llama's names of projections; the files of the models' authors have
others, with queries, keys and values in one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.bert import as_encoder
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.readers import read_attention, read_num_layers
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

NORMS = LayerNorms(
    after_mixer="post_attention_layernorm", after_mlp="post_mlp_layernorm", of_sums=True
)

_EMBEDDINGS = {
    "model.embed_tokens.": "embeddings.word_embeddings.",
    "model.embed_token_types.": "embeddings.token_type_embeddings.",
    "model.embed_norm.": "embeddings.LayerNorm.",
}
"""The names of embeddings in transformers' modules."""


def read_rotary_encoder(
    fields: Fields, mlp: MLPSpec, positions: int, *, theta: float, bias: bool
) -> ModelConfig:
    """Returns an encoder whose layers are alike, without a head.

    Args:
        fields: the fields of config.json.
        mlp: the MLP of each layer.
        positions: the largest number of positions.
        theta: the default of the base of the wavelengths.
        bias: whether the projections of attention have a bias.
    """
    fields = fields.with_values(fields.values | {"num_key_value_heads": None})  # it has none
    attention = read_attention(fields, bias=bias, output_bias=bias)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, theta=theta)
    layer = LayerSpec(mixer=replace(attention, rope=rope, ahead=None), mlp=mlp, norms=NORMS)
    return as_encoder(fields, [layer] * read_num_layers(fields), positions)


def published_weights(
    weights: NamedWeights, names: Mapping[str, str], *fused: tuple[str, Sequence[str]]
) -> NamedWeights:
    """Returns destinations under the names of the authors' files.

    Args:
        weights: the destinations under the default names.
        names: the authors' name for each part of default names.
        fused: see `fused_names.with_fused`.
    """
    from shmllm.models.fused_names import with_fused

    return module_names(with_fused(weights, *fused), names)


def module_names(weights: NamedWeights, names: Mapping[str, str]) -> NamedWeights:
    """Returns destinations under the names that transformers' modules have.

    Args:
        weights: the destinations under the default names.
        names: the modules' name for each part of default names, but for embeddings.
    """
    return {renamed(name, {**_EMBEDDINGS, **names}): views for name, views in weights.items()}


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations of the names that transformers' modules have: Llama's."""
    return module_names(weights, {})
