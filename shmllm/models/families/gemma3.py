"""Gemma 3: norms on both sides with weights of 1 + w, and five windows for each full layer.

Layers with a window and full layers have rotations of their own. In EmbeddingGemma tokens attend to
those before and behind them (``use_bidirectional_attention``). Models that see images have SigLIP,
and the tokens of an image attend to all of it.
"""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from shmllm.models.config import ModelConfig
from shmllm.models.config_file import architecture_name
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.mixer_specs import WITHIN_ITEMS, Ahead, AttentionSpec
from shmllm.models.readers import (
    FULL,
    SLIDING,
    read_activation,
    read_attention,
    read_layer_types,
    read_model,
    read_num_layers,
    read_positions,
    read_rope_of_windows,
    read_window,
    windows_by_type,
)
from shmllm.models.registry import Purpose, purpose_of
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec, NormSpec
from shmllm.models.vision.fields import read_item_token, read_siglip, vision_fields
from shmllm.models.vision.projected_specs import Gemma3Tower
from shmllm.models.vision.specs import VisionSpec

NORMS = LayerNorms(
    before_mixer="input_layernorm",
    after_mixer="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


_NESTED_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
"""What the files of models that see images leave out of ``text_config``."""


def configure(fields: Fields) -> ModelConfig:
    if fields.whole is not fields:
        fields = fields.with_defaults(_NESTED_DEFAULTS)
    both_ways = fields.flag("use_bidirectional_attention", False)
    if both_ways and purpose_of(architecture_name(fields)) is Purpose.GENERATE:
        raise fields.error("use_bidirectional_attention is not supported in a model that generates")
    positions = read_positions(fields, 131_072)
    attention = replace(read_gemma_attention(fields, num_kv_heads=4), qk_norm="head")
    num_layers = read_num_layers(fields)
    types = read_layer_types(fields, num_layers)
    if types is None:
        pattern = fields.integer("sliding_window_pattern", 6)
        types = tuple(SLIDING if (i + 1) % pattern else FULL for i in range(num_layers))
    window = read_window(fields, 4096)
    if both_ways and window is not None:
        window = window // 2 + 1  # the field counts the positions on both sides
    windows = windows_by_type(fields, types, window)
    ropes = {
        FULL: RopeConfig.from_fields(
            fields, positions, attention.head_dim, layer_type=FULL, theta=1e6
        ),
        SLIDING: read_rope_of_windows(
            fields,
            positions,
            attention.head_dim,
            theta=fields.number("rope_local_base_freq", 10_000.0),
        ),
    }
    vision = read_vision(fields)
    layers = [
        LayerSpec(
            mixer=replace(
                attention,
                window=window,
                ahead=_ahead(window, both_ways, vision is not None),
                rope=ropes[kind],
            ),
            mlp=read_gemma_mlp(fields),
            norms=NORMS,
        )
        for window, kind in zip(windows, types, strict=True)
    ]
    return replace(gemma_model(fields, layers, positions), vision=vision)


def read_vision(fields: Fields) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, "siglip_vision_model")
    if vision is None:
        return None
    whole, encoder = fields.whole, read_siglip(vision)
    count = whole.integer("mm_tokens_per_image", 256)
    side = isqrt(count)
    size = encoder.side // side
    if side**2 != count or not size or encoder.side // size != side:
        raise whole.error(
            f"mm_tokens_per_image ({count}) is not possible with {encoder.side} patches in a row: "
            "it is the square of how many means of equal size a row has"
        )
    return VisionSpec(
        image_token=read_item_token(
            fields,
            ("image_token_index", "image_token_id"),
            262_144,
            fields.integer("vocab_size", 262_208),
        ),
        tower=Gemma3Tower(encoder=encoder, size=size),
        tile_embeddings=count,
        both_ways=True,
    )


def _ahead(window: int | None, both_ways: bool, sees_images: bool) -> Ahead:
    """Returns how many positions behind its own a token attends to: as many as before it, or those
    of its image, however many."""
    if not both_ways:
        return WITHIN_ITEMS if sees_images else 0
    return None if window is None else window - 1


def read_gemma_attention(fields: Fields, num_kv_heads: int) -> AttentionSpec:
    """Returns an attention over all positions, without rotation, with the scale and the cap that
    the fields give."""
    bias = fields.flag("attention_bias", False)
    attention = read_attention(
        fields, num_kv_heads=num_kv_heads, head_dim=256, bias=bias, output_bias=bias
    )
    return replace(
        attention,
        scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        soft_cap=fields.optional_number("attn_logit_softcapping"),
    )


def read_gemma_mlp(fields: Fields) -> MLPSpec:
    """Returns a gated MLP with the activation ``hidden_activation``."""
    activation = read_activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    return MLPSpec(inner=fields.integer("intermediate_size"), activation=activation)


def gemma_model(fields: Fields, layers: list[LayerSpec], positions: int) -> ModelConfig:
    """Returns the configuration with what Gemma's models have in common."""
    model = read_model(fields, layers, positions, tied=True)
    return replace(
        model,
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1e-6), offset=1.0),
        embedding_scale=model.hidden_size**0.5,
        logits_cap=fields.optional_number("final_logit_softcapping"),
    )
