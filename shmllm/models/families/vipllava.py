"""ViP-LLaVA: CLIP, two projections of the results of several of its layers behind a norm, and the
language model of another family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families import llava
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import (
    check_feature_layer,
    read_clip,
    read_item_token,
    read_vision_activation,
    vision_fields,
)
from shmllm.models.vision.llava_specs import VipLlavaTower
from shmllm.models.vision.specs import VisionSpec

_LAYERS = "vision_feature_layer", "vision_feature_layers"
_DEFAULT_LAYERS = (-2, -5, -8, -11, 6)


def configure(fields: Fields) -> ModelConfig:
    config = llava.read_text_model(fields)
    return replace(config, vision=read_vision(fields, config.vocab_size))


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision, whole = vision_fields(fields, "clip_vision_model"), fields.whole
    if vision is None:
        return None
    encoder = read_clip(vision)
    layers = _read_layers(whole, encoder.num_layers)
    tower = VipLlavaTower(
        encoder=replace(encoder, num_layers=max(layers), final_norm=False),
        num_stored=encoder.num_layers,
        drops_first=True,
        activation=read_vision_activation(whole, "projector_hidden_act", "gelu"),
        bias=True,
        layers=layers,
        eps=whole.number("projector_layernorm_eps", 1e-5),
    )
    names = "image_token_index", "image_token_id"
    return VisionSpec(
        image_token=read_item_token(fields, names, 32_000, vocab_size),
        tower=tower,
        tile_embeddings=encoder.side**2,
    )


def _read_layers(whole: Fields, num_layers: int) -> tuple[int, ...]:
    """Returns the layers whose results are read, from 1: a field has one, or a list."""
    given = (whole.values[name] for name in _LAYERS if whole.values.get(name) is not None)
    found: Any = next(given, _DEFAULT_LAYERS)
    layers = found if isinstance(found, list | tuple) else [found]
    if not layers:
        raise whole.error(f"{_LAYERS[0]!r} must list layers, not {found!r}")
    return tuple(check_feature_layer(whole, layer, num_layers) for layer in layers)
