"""Qwen 3.5 and 3.6: three of four layers are gated delta nets, the others have attention with a
gate of its output; norms are of (1 + weight).

The tower and the positions are those of `qwen3_vl`, without further levels of embeddings.
"""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import qwen3_vl
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import (
    FULL,
    read_activation,
    read_attention,
    read_layer_types,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
)
from shmllm.models.recurrent_specs import DeltaNetSpec
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec, MoESpec
from shmllm.models.vision.qwen_fields import ItemTokens, with_vision
from shmllm.models.vision.specs import VisionSpec

LINEAR = "linear_attention"
"""The type of layers with a delta net, as in the field ``layer_types``."""
HEAD_MULTIPLE = 16
"""What the widths of a delta net's heads must be multiples of."""
MOST_TAPS = 4
"""The most tokens that a convolution reads."""
SECTIONS = (11, 11, 10)
_TOKENS = ItemTokens(248056, 248057)


def configure(fields: Fields) -> ModelConfig:
    config = configure_with(fields, read_mlp(fields), num_kv_heads=4)
    return with_vision(config, fields, read_vision(fields, config), SECTIONS, mixes_axes=True)


def read_vision(
    fields: Fields,
    config: ModelConfig,
    model_types: tuple[str, ...] = ("qwen3_5_vision", "qwen3_5"),
) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``.

    Args:
        fields: what `configure` got.
        config: that of the language model.
        model_types: what ``model_type`` of ``vision_config`` may be.
    """
    vision = qwen3_vl.read_vision(fields, config, model_types, levels=(), tokens=_TOKENS)
    if vision is not None and vision.num_levels:
        raise fields.whole.error("deepstack_visual_indexes is not supported; supported: []")
    return vision


def configure_with(fields: Fields, mlp: MLPSpec | MoESpec, *, num_kv_heads: int = 2) -> ModelConfig:
    """Returns the configuration of a model whose layers all have this MLP.

    Args:
        fields: the fields of config.json.
        mlp: the MLP.
        num_kv_heads: the default of ``num_key_value_heads``.
    """
    positions = read_positions(fields, 32768)
    attention = _read_attention(fields, positions, num_kv_heads)
    layers = _read_layers(fields, attention, mlp)
    model = read_model(fields, layers, positions)
    return replace(model, norm=replace(read_norm(fields), offset=1.0))


def _read_layers(
    fields: Fields, attention: AttentionSpec, mlp: MLPSpec | MoESpec
) -> tuple[LayerSpec, ...]:
    """Returns layers of the types that the fields say."""
    num_layers = read_num_layers(fields)
    types = read_layer_types(fields, num_layers, (LINEAR, FULL))
    if types is None:
        interval = fields.integer("full_attention_interval", 4)
        types = tuple(LINEAR if (index + 1) % interval else FULL for index in range(num_layers))
    kinds: dict[str, AttentionSpec | DeltaNetSpec] = {FULL: attention}
    if LINEAR in types:
        kinds[LINEAR] = read_delta_net(fields)
    return tuple(LayerSpec(mixer=kinds[name], mlp=mlp) for name in types)


def _read_attention(fields: Fields, positions: int, num_kv_heads: int) -> AttentionSpec:
    bias = fields.flag("attention_bias", False)
    attention = read_attention(
        fields, num_kv_heads=num_kv_heads, head_dim=256, bias=bias, output_bias=bias
    )
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, partial=0.25)
    return replace(attention, rope=rope, qk_norm="head", gated=True)


def read_delta_net(fields: Fields) -> DeltaNetSpec:
    """Returns the delta net that fields ``linear_...`` describe."""
    if (activation := read_activation(fields)) != "silu":
        raise fields.error(
            f"delta nets with hidden_act {activation!r} are not supported, only silu"
        )
    net = DeltaNetSpec(
        key_heads=fields.integer("linear_num_key_heads", 16),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_heads=fields.integer("linear_num_value_heads", 32),
        value_dim=fields.integer("linear_value_head_dim", 128),
        taps=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
        tiled=fields.flag("linear_value_heads_tiled", False),  # of GGUF files alone
        apart=fields.flag("linear_projections_apart", False),  # likewise
    )
    for name, width in (("key", net.key_dim), ("value", net.value_dim)):
        if width % HEAD_MULTIPLE:
            raise fields.error(
                f"linear_{name}_head_dim must be a multiple of {HEAD_MULTIPLE}, not {width}"
            )
    if net.value_heads % net.key_heads:
        raise fields.error(
            f"linear_num_value_heads ({net.value_heads}) must be a multiple of "
            f"linear_num_key_heads ({net.key_heads})"
        )
    if net.taps > MOST_TAPS:
        raise fields.error(f"linear_conv_kernel_dim must be at most {MOST_TAPS}, not {net.taps}")
    return net
