"""Janus and Janus-Pro: SigLIP, projections, and Llama. What makes images is left out."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import llava
from shmllm.models.families.deepseek_v3 import check_choice
from shmllm.models.fields import Fields
from shmllm.models.vision.encoder_spec import EncoderSpec
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    read_item_token,
    read_num_heads,
    read_vision_activation,
    vision_fields,
)
from shmllm.models.vision.projected_specs import JanusTower
from shmllm.models.vision.specs import VisionSpec

_TIED = "tie_word_embeddings"
_OF_IMAGES = ("vqmodel.", "generation_embeddings.", "generation_aligner.", "generation_head.")
"""The weights of what makes images, below "model."."""


def read_text_model(fields: Fields) -> ModelConfig:
    """Returns the configuration of the language model, whose field for a tied LM head does not
    count."""
    tied = fields.whole.flag(_TIED, True)
    return llava.read_text_model(fields.with_values(fields.values | {_TIED: tied}))


def configure(fields: Fields) -> ModelConfig:
    config = read_text_model(fields)
    return replace(
        config,
        vision=read_vision(fields, config),
        skipped_prefixes=(
            *config.skipped_prefixes,
            *(f"{outer}{name}" for outer in ("model.", "") for name in _OF_IMAGES),
        ),
    )


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``.

    Args:
        fields: what `configure` got.
        config: that of the language model.
    """
    vision = vision_fields(fields, "janus_vision_model")
    if vision is None:
        return None
    check_choice(vision, "use_qk_norm", False)
    check_choice(vision, "attention_bias", True)
    if (width := vision.integer("projection_dim", 2048)) != config.hidden_size:
        raise vision.error(
            f"projection_dim ({width}) differs from the language model's hidden_size "
            f"({config.hidden_size})"
        )
    encoder = _read_encoder(vision)
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), 100_581, config.vocab_size),
        tower=JanusTower(
            encoder=encoder,
            depth=vision.integer("depth", 2, maximum=MOST_LAYERS),
            activation=encoder.activation,
        ),
        tile_embeddings=encoder.side**2,
    )


def _read_encoder(vision: Fields) -> EncoderSpec:
    hidden_size = vision.integer("hidden_size", 1024)
    patch_size = vision.integer("patch_size", 16)
    inner = int(hidden_size * vision.number("mlp_ratio", 4.0))
    if not inner:
        raise vision.error("mlp_ratio leaves no MLP")
    return EncoderSpec(
        kind="siglip",
        hidden_size=hidden_size,
        num_layers=vision.integer("num_hidden_layers", 24, maximum=MOST_LAYERS),
        num_heads=read_num_heads(vision, "num_attention_heads", 16, hidden_size),
        inner=inner,
        image_size=vision.integer("image_size", 384, minimum=patch_size),
        patch_size=patch_size,
        activation=read_vision_activation(vision, "hidden_act", "gelu"),
        eps=vision.number("layer_norm_eps", 1e-6),
    )
