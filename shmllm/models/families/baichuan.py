"""Baichuan 1 and 2 (Yang et al., 2023): Llama with queries, keys and values in one matrix. In the
models of 13B attention falls with the distance in place of rotations, and the LM head of Baichuan 2
has rows of length 1, whatever a checkpoint has."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.bias_specs import MOST_BIASED_POSITIONS, LinearBiases
from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_mlp,
    read_model,
    read_num_layers,
    read_positions,
    with_rope,
)
from shmllm.models.weight_names import LM_HEAD

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

VOCABULARY_OF_2 = 125_696
"""The number of tokens of Baichuan 2, by which it is told from Baichuan 1."""
_QKV = "W_pack", ("q_proj", "k_proj", "v_proj")


def configure(fields: Fields) -> ModelConfig:
    plain = {"num_key_value_heads": None, "head_dim": None}  # it has no such fields
    fields = fields.with_values(fields.values | plain)
    attention = read_attention(fields)
    # The classes of 7B have this field, those of 13B do not.
    if fields.values.get("max_position_embeddings") is not None:
        positions = read_positions(fields, 4096)
        attention = with_rope(attention, fields, positions)
    else:
        positions = fields.integer("model_max_length", 4096, maximum=MOST_BIASED_POSITIONS)
        attention = replace(attention, biases=LinearBiases(positions, attention.num_heads))
    layer = LayerSpec(mixer=attention, mlp=read_mlp(fields))
    model = read_model(fields, [layer] * read_num_layers(fields), positions)
    if model.tie_word_embeddings and model.vocab_size == VOCABULARY_OF_2:
        raise fields.error("tie_word_embeddings true is not supported with Baichuan 2")
    return model


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.arranged import UnitRows
    from shmllm.models.fused_names import with_fused

    found = with_fused(weights, _QKV)
    if config.vocab_size == VOCABULARY_OF_2 and LM_HEAD in found:
        found[LM_HEAD] = tuple(map(UnitRows, found[LM_HEAD]))
    return found
