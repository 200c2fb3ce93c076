"""Qwen 3 VL: an encoder for images of any size, whose inner layers give levels of embeddings, too,
and Qwen 3 with three axes.

Its positions are triples, of time, row and column, which ``mrope_section`` distributes over the
pairs (`RopeConfig.sections`). Those of text are three equal numbers, for which it changes nothing.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families import qwen3
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import read_item_token, read_levels, vision_fields
from shmllm.models.vision.qwen_fields import (
    TOKENS,
    ItemTokens,
    read_qwen_tower,
    read_video,
    with_vision,
)
from shmllm.models.vision.specs import VisionSpec
from shmllm.models.vision.squares_specs import Qwen3Tower

SECTIONS = (24, 20, 20)
_DEFAULTS = {"max_position_embeddings": 128000, "rope_theta": 500000.0}
_VISION_DEFAULTS: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "out_hidden_size": 3584,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
}
_LEVELS = (8, 16, 24)


def configure(fields: Fields) -> ModelConfig:
    config = qwen3.configure(fields.with_defaults(_DEFAULTS))
    vision = read_vision(fields, config)
    return with_vision(config, fields, vision, SECTIONS, mixes_axes=True)


def read_vision(
    fields: Fields,
    config: ModelConfig,
    model_types: tuple[str, ...] = ("qwen3_vl_vision", "qwen3_vl"),
    *,
    levels: tuple[int, ...] = _LEVELS,
    tokens: ItemTokens = TOKENS,
) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``.

    Args:
        fields: what `configure` got.
        config: that of the language model.
        model_types: what ``model_type`` of ``vision_config`` may be.
        levels: the default of ``deepstack_visual_indexes``.
        tokens: the defaults of those whose embeddings an item's take the place of.
    """
    vision = vision_fields(fields, *model_types)
    if vision is None:
        return None
    shared = read_qwen_tower(vision, config.hidden_size, _VISION_DEFAULTS)
    positions = vision.integer("num_position_embeddings", 2304)
    if isqrt(positions) ** 2 != positions:
        raise vision.error(f"num_position_embeddings ({positions}) must be a square number")
    layers = read_levels(vision, levels, shared["num_layers"], config.num_layers)
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), tokens.image, config.vocab_size),
        tower=Qwen3Tower(
            **shared,
            inner=vision.integer("intermediate_size", 4304),
            num_positions=positions,
            level_layers=layers,
        ),
        num_levels=len(layers),
        merge_size=shared["merge_size"],
        has_axes=True,
        video=read_video(
            fields,
            ("Qwen3VLVideoProcessor",),
            config.vocab_size,
            in_one_piece=False,
            tokens=tokens,
        ),
    )
