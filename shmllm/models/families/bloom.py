"""BLOOM (BigScience Workshop, 2022): attention falls with the distance in place of positions, and
the embeddings have a LayerNorm. Checkpoints have query, key and value of each head side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.bias_specs import MOST_BIASED_POSITIONS, LinearBiases
from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import read_attention, read_model, read_num_layers
from shmllm.models.specs import MLPSpec, NormSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_SIZES = {
    "hidden_size": "n_embed",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""For each name of a size, BLOOM's own."""
_NAMES = {
    "model.layers.": "transformer.h.",
    "model.embed_tokens.": "transformer.word_embeddings.",
    "model.embed_norm.": "transformer.word_embeddings_layernorm.",
    "model.norm.": "transformer.ln_f.",
    ".self_attn.o_proj.": ".self_attention.dense.",
    ".self_attn.": ".self_attention.",
    ".mlp.up_proj.": ".mlp.dense_h_to_4h.",
    ".mlp.down_proj.": ".mlp.dense_4h_to_h.",
}
_QKV = "query_key_value", ("q_proj", "k_proj", "v_proj")


def configure(fields: Fields) -> ModelConfig:
    if fields.flag("apply_residual_connection_post_layernorm", False):
        raise fields.error("apply_residual_connection_post_layernorm true is not supported")
    fields = with_own_sizes(fields, _SIZES)
    positions = fields.integer("seq_length", 2048, maximum=MOST_BIASED_POSITIONS)
    attention = read_attention(fields, bias=True, output_bias=True)
    inner = 4 * fields.integer("hidden_size")
    if (found := fields.optional_integer("n_inner")) not in (None, inner):
        raise fields.error(f"n_inner {found} is not supported; supported: {inner}, 4 * hidden_size")
    biases = LinearBiases(positions, attention.num_heads)
    layer = LayerSpec(
        mixer=replace(attention, biases=biases),
        mlp=MLPSpec(inner=inner, activation="gelu_tanh", gated=False, bias=True),
    )
    model = read_model(fields, [layer] * read_num_layers(fields), positions, tied=True)
    eps = fields.number("layer_norm_epsilon", 1e-5)
    norm = NormSpec(kind="layer", eps=eps, bias=True)
    return replace(model, norm=norm, embedding_norm=True)


def with_own_sizes(fields: Fields, names: dict[str, str]) -> Fields:
    """Returns the fields with sizes under the names that `readers.py` reads, of a family without
    heads of keys and without a width of heads.

    Args:
        fields: the fields of config.json.
        names: for each of these names the family's own, which has precedence.
    """
    own = {name: fields.values.get(known) for name, known in names.items()}
    found = {name: value for name, value in own.items() if value is not None}
    plain = {"num_key_value_heads": None, "head_dim": None}
    return fields.with_values(fields.values | plain | found)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import with_fused_groups

    found = with_fused_groups(weights, _QKV, config.attentions[0].num_kv_heads)
    return {renamed(name, _NAMES): views for name, views in found.items()}
