"""OPT: learned positions, LayerNorms with biases, an MLP without a gate (Zhang et al., 2022)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.readers import (
    read_activation,
    read_attention,
    read_model,
    read_num_layers,
    read_positions,
)
from shmllm.models.specs import MLPSpec, NormSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_REFUSED = {
    "do_layer_norm_before": True,
    "layer_norm_elementwise_affine": True,
    "_remove_final_layer_norm": False,
}
"""The only supported value of each flag, which is its default. OPT-350m has another."""

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}

_FIRST_POSITION = 2

NAMES = {
    "model.": "model.decoder.",
    "decoder.norm.": "decoder.final_layer_norm.",
    ".o_proj.": ".out_proj.",
    ".mlp.up_proj.": ".fc1.",
    ".mlp.down_proj.": ".fc2.",
}
"""The parts of names that differ from the default ones."""


def configure(fields: Fields) -> ModelConfig:
    for name, supported in _REFUSED.items():
        if fields.flag(name, supported) != supported:
            raise fields.error(f"{name} {str(not supported).lower()} is not supported")
    fields = fields.with_defaults(_DEFAULTS)
    hidden_size = fields.integer("hidden_size")
    if fields.integer("word_embed_proj_dim", hidden_size) != hidden_size:
        raise fields.error("a word_embed_proj_dim other than hidden_size is not supported")
    bias = fields.flag("enable_bias", True)
    mlp = MLPSpec(
        inner=fields.integer("ffn_dim", 3072),
        activation=read_activation(fields, "activation_function", "relu"),
        gated=False,
        bias=bias,
    )
    return opt_model(fields, mlp, read_num_layers(fields), read_positions(fields, 2048))


def opt_model(fields: Fields, mlp: MLPSpec, num_layers: int, positions: int) -> ModelConfig:
    """Returns a model of layers like OPT's, whose projections have biases if those of MLPs do.

    Args:
        fields: the fields of config.json.
        mlp: the MLP of each layer.
        num_layers: the number of layers.
        positions: the largest number of positions, which are learned.
    """
    plain = {"num_key_value_heads": None, "head_dim": None}  # OPT has no such fields
    fields = fields.with_values(fields.values | plain)
    layer = LayerSpec(
        mixer=read_attention(fields, bias=mlp.bias, output_bias=mlp.bias),
        mlp=mlp,
        norms=LayerNorms(before_mixer="self_attn_layer_norm", before_mlp="final_layer_norm"),
    )
    model = read_model(fields, [layer] * num_layers, positions, tied=True)
    return replace(
        model,
        norm=NormSpec(kind="layer", eps=1e-5, bias=True),
        num_learned_positions=positions + _FIRST_POSITION,
        first_position=_FIRST_POSITION,
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, NAMES): views for name, views in weights.items()}
