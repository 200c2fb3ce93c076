"""Llama-Nemotron, which a search made of Llama (Bercovich et al., "Puzzle", 2024): layers differ in
the heads of keys and values and in the width of the MLP, and may lack either part."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import (
    read_activation,
    read_attention,
    read_model,
    read_num_layers,
    read_positions,
    with_rope,
)
from shmllm.models.specs import MLPSpec

_FIRST, _SECOND = "input_layernorm", "post_attention_layernorm"
_REFUSED = ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens")
_MULTIPLE = 256


def configure(fields: Fields) -> ModelConfig:
    positions, num_layers = read_positions(fields, 2048), read_num_layers(fields)
    bias = fields.flag("attention_bias", False)
    # The number of heads of keys and values is each layer's own.
    attention = read_attention(
        fields.with_values(fields.values | {"num_key_value_heads": None}),
        bias=bias,
        output_bias=bias,
    )
    attention = with_rope(attention, fields, positions)
    blocks = fields.values.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != num_layers:
        raise fields.error(f"'block_configs' must list an object for each of {num_layers} layers")
    layers = [
        _read_layer(
            fields, Fields({"block": block}, f"{fields.where}: block_configs[{index}]"), attention
        )
        for index, block in enumerate(blocks)
    ]
    return read_model(fields, layers, positions)


def _read_layer(fields: Fields, parent: Fields, attention: AttentionSpec) -> LayerSpec:
    block = Fields(parent.table("block"), parent.where)
    mixer = _read_mixer(_part(block, "attention"), attention)
    mlp = _read_mlp(fields, _part(block, "ffn"))
    norms = LayerNorms(
        before_mixer=None if mixer is None else _FIRST, before_mlp=None if mlp is None else _SECOND
    )
    return LayerSpec(mixer=mixer, mlp=mlp, norms=norms)


def _part(block: Fields, name: str) -> Fields:
    part = Fields(block.table(name), f"{block.where}: {name}")
    for refused in _REFUSED:
        if part.values.get(refused):
            raise part.error(f"{refused} {part.values[refused]!r} is not supported")
    return part


def _read_mixer(part: Fields, attention: AttentionSpec) -> AttentionSpec | None:
    if part.flag("no_op", False):
        return None
    size, num_heads = part.integer("n_heads_in_group"), attention.num_heads
    if num_heads % size:
        raise part.error(f"n_heads_in_group ({size}) must divide num_attention_heads ({num_heads})")
    return replace(attention, num_kv_heads=num_heads // size)


def _read_mlp(fields: Fields, part: Fields) -> MLPSpec | None:
    """Returns an MLP of about two thirds of ``ffn_mult`` hidden states."""
    if part.flag("no_op", False):
        return None
    width = int(2 * part.number("ffn_mult") * fields.integer("hidden_size") / 3)
    return MLPSpec(
        inner=-(-width // _MULTIPLE) * _MULTIPLE,
        activation=read_activation(fields),
        bias=fields.flag("mlp_bias", False),
    )
