"""Moonshine, which writes what a sound says: an encoder of samples, and a decoder with rotations
(Jeffries et al., 2024)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.formats.audio_counts import num_convolved_samples
from shmllm.models.audio.keys_specs import MoonshineTower
from shmllm.models.audio.specs import AudioSpec
from shmllm.models.config import ModelConfig
from shmllm.models.encoder_decoder import (
    check_has_encoder,
    name_of_pair,
    pairs_of_layers,
    text_begins,
)
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import PRE_NORMS, LayerNorms
from shmllm.models.readers import (
    MOST_LAYERS,
    read_activation,
    read_attention,
    read_model,
    read_positions,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec, NormSpec
from shmllm.models.vision.fields import read_vision_activation
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_DEFAULTS: dict[str, Any] = {"vocab_size": 32768, "hidden_size": 288, "intermediate_size": 1152}
_NORM_EPS = 1e-5
NORMS = (
    LayerNorms(before_mixer=PRE_NORMS.before_mixer),
    LayerNorms(before_mixer=PRE_NORMS.before_mlp, before_mlp="final_layernorm"),
)
PARTS = "self_attn.", "encoder_attn."
_NAMES = {"model.": "model.decoder.", ".mlp.down_proj.": ".mlp.fc2."}
_UP_AND_GATE = "fc1", ("up_proj", "gate_proj")


def configure(fields: Fields) -> ModelConfig:
    check_has_encoder(fields)
    fields = fields.with_defaults(_DEFAULTS)
    num_heads = fields.integer("decoder_num_attention_heads", 8)
    own = {"num_attention_heads": num_heads, "num_key_value_heads": None, "head_dim": None}
    width = fields.integer("hidden_size")
    for name in _SAME_HEADS:
        found = fields.optional_integer(name) or _SAME_HEADS[name] or num_heads
        if found != num_heads:
            raise fields.error(
                f"{name} ({found}) must be decoder_num_attention_heads ({num_heads}): "
                "transformers has no others"
            )
    if fields.values.get("head_dim") not in (None, width // num_heads):
        raise fields.error(
            f"head_dim {fields.values['head_dim']!r} is not supported; supported: "
            f"hidden_size / decoder_num_attention_heads ({width // num_heads})"
        )
    fields = fields.with_values(fields.values | own)
    has_bias = fields.flag("attention_bias", False)
    attention, positions = read_attention(fields, bias=has_bias), read_positions(fields, 512)
    rope = RopeConfig.from_fields(
        fields, positions, attention.head_dim, partial=0.9, interleaved=True
    )
    if rope.type != "default" or rope.sections:
        raise fields.error(f"rope type {rope.type!r} is not supported; supported: 'default'")
    num_layers = fields.integer("decoder_num_hidden_layers", 6, maximum=MOST_LAYERS)
    inner = fields.integer("intermediate_size")
    tower = MoonshineTower(
        hidden_size=width,
        num_layers=fields.integer("encoder_num_hidden_layers", 6, maximum=MOST_LAYERS),
        num_heads=num_heads,
        inner=inner,
        activation=read_vision_activation(fields, "encoder_hidden_act", "gelu"),
        bias=has_bias,
        rotary_dim=rope.rotary_dim,
        theta=rope.theta,
        num_decoder_layers=num_layers,
        kv_width=width,
    )
    mlp = MLPSpec(
        inner=inner, activation=read_activation(fields, "decoder_hidden_act", "silu"), bias=True
    )
    begin = text_begins(num_convolved_samples(tower.most_frames))
    if positions > begin:
        raise fields.error(f"max_position_embeddings ({positions}) exceeds {begin}")
    layers = pairs_of_layers(
        replace(attention, rope=rope), attention, mlp, NORMS, begin, num_layers
    )
    return replace(
        read_model(fields, layers, begin + positions, tied=True),
        norm=NormSpec(kind="layer", eps=_NORM_EPS),
        audio=AudioSpec(
            token=None,
            tower=tower,
            has_start=True,
            decoder_start=fields.integer("decoder_start_token_id", 1, minimum=0),
        ),
    )


_SAME_HEADS: dict[str, int | None] = {
    "encoder_num_attention_heads": 8,
    "encoder_num_key_value_heads": None,
    "decoder_num_key_value_heads": None,
}
"""Fields that must be the number of the decoder's heads, and their defaults: None stands for that
number."""


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import with_fused

    fused = with_fused(weights, _UP_AND_GATE)
    return {renamed(name_of_pair(name, PARTS), _NAMES): views for name, views in fused.items()}
