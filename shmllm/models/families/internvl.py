"""InternVL: its encoder, a norm and two projections of squares of patches, and the language model
of another family."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.formats.internvl_chat import ENCODER
from shmllm.models.config import ModelConfig
from shmllm.models.families import internlm2, llava
from shmllm.models.fields import Fields
from shmllm.models.vision.encoder_spec import EncoderSpec
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    read_factor,
    read_feature_layer,
    read_item_token,
    read_num_heads,
    read_side,
    read_vision_activation,
    vision_fields,
)
from shmllm.models.vision.projected_specs import InternVLTower
from shmllm.models.vision.specs import VisionSpec

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_NORMS = {"layer_norm": False, "rms_norm": True}


def configure(fields: Fields) -> ModelConfig:
    tied = {"tie_word_embeddings": True}
    config = llava.read_text_model(fields.with_defaults(tied), "qwen2")
    return replace(config, vision=read_vision(fields, config.vocab_size))


def read_vision(
    fields: Fields,
    vocab_size: int,
    model_types: tuple[str, ...] = ("internvl_vision", ENCODER),
    *,
    attention_bias: bool = False,
) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``.

    Args:
        fields: what `configure` got.
        vocab_size: the number of tokens.
        model_types: what ``model_type`` of ``vision_config`` may be.
        attention_bias: the default of the field of that name there.
    """
    vision, whole = vision_fields(fields, *model_types), fields.whole
    if vision is None:
        return None
    encoder, num_stored = _read_encoder(vision, whole)
    if (norm := vision.text("norm_type", "layer_norm")) not in _NORMS:
        raise vision.error(f"norm_type {norm!r} is not supported; supported: {', '.join(_NORMS)}")
    if not vision.flag("use_absolute_position_embeddings", True):
        raise vision.error("use_absolute_position_embeddings false is not supported")
    strategy = whole.text("vision_feature_select_strategy", "default")
    if strategy != "default":
        raise whole.error(
            f"vision_feature_select_strategy {strategy!r} is not supported; supported: default"
        )
    factor = read_factor(whole, "downsample_ratio", encoder.side)
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), 151_667, vocab_size),
        tower=InternVLTower(
            encoder=encoder,
            num_stored=num_stored,
            rms_norms=_NORMS[norm],
            qk_norm=vision.flag("use_qk_norm", False),
            attention_bias=vision.flag("attention_bias", attention_bias),
            factor=factor,
            activation=read_vision_activation(whole, "projector_hidden_act", "gelu"),
            is_published=vision.text("model_type", "") == ENCODER,
        ),
        tile_embeddings=(encoder.side // factor) ** 2,
    )


def _read_encoder(vision: Fields, whole: Fields) -> tuple[EncoderSpec, int]:
    """Returns the encoder with the layers that are computed, and the number of all layers. The last
    one has a norm behind it only where ``vision_feature_layer`` is -1."""
    hidden_size = vision.integer("hidden_size", 1024)
    num_stored = vision.integer("num_hidden_layers", 24, maximum=MOST_LAYERS)
    last = whole.values.get("vision_feature_layer") in (None, -1)
    image_size, patch_size = (
        read_side(vision, "image_size", 448),
        read_side(vision, "patch_size", 14),
    )
    if patch_size > image_size:
        raise vision.error(f"patch_size ({patch_size}) exceeds image_size ({image_size})")
    encoder = EncoderSpec(
        kind="internvl",
        hidden_size=hidden_size,
        num_layers=read_feature_layer(whole, num_stored, -1),
        num_heads=read_num_heads(vision, "num_attention_heads", 16, hidden_size),
        inner=vision.integer("intermediate_size", 4096),
        image_size=image_size,
        patch_size=patch_size,
        activation=read_vision_activation(vision, "hidden_act", "gelu"),
        eps=vision.number("layer_norm_eps", 1e-6),
        final_norm=last and not vision.flag("use_mean_pooling", True),
    )
    return encoder, num_stored


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the names of the language model; those of InternLM 2 are no default ones, which the
    names of its norms tell."""
    if config.layers[0].norms == internlm2.NORMS:
        return internlm2.named_weights(weights, config)
    return weights
