"""LLaVA-NeXT: the tower of LLaVA for the tiles of an image, of which all but the first make up a
larger picture, and an embedding behind each row of its patches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shmllm.formats.joined_tiles import DEFAULT_SIZES, Size, read_sizes
from shmllm.models.config import ModelConfig
from shmllm.models.families import llava
from shmllm.models.fields import Fields
from shmllm.models.vision.llava_specs import LlavaNextTower, LlavaTower
from shmllm.models.vision.specs import VisionSpec


def configure(fields: Fields) -> ModelConfig:
    config = llava.read_text_model(fields)
    return replace(config, vision=read_vision(fields, config.vocab_size))


def read_vision(
    fields: Fields, vocab_size: int, defaults: llava.Defaults = llava.DEFAULTS
) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision, whole = llava.read_vision(fields, vocab_size, defaults), fields.whole
    if vision is None:
        return None
    values = read_joined(whole, vision, DEFAULT_SIZES)
    return replace(vision, tower=LlavaNextTower(**values))


def read_joined(whole: Fields, vision: VisionSpec, default: Sequence[Size]) -> dict[str, Any]:
    """Returns the attributes of a `LlavaNextTower`.

    Args:
        whole: the fields around ``vision_config``.
        vision: what LLaVA computes of images.
        default: the possible sizes of the picture where the file has none.
    """
    tower = vision.tower
    assert isinstance(tower, LlavaTower)
    if vision.tile_embeddings != tower.encoder.side**2:
        strategy = "full" if tower.encoder.kind == "clip" else "default"
        raise whole.error(
            f"vision_feature_select_strategy {strategy!r} is not supported with a "
            f"{tower.encoder.kind} tower, as an embedding of each patch is needed and no other"
        )
    if not whole.flag("use_image_newline_parameter", True):
        raise whole.error("use_image_newline_parameter false is not supported; supported: true")
    sizes = _read_sizes(whole, tower.encoder.image_size, default)
    values = {each.name: getattr(tower, each.name) for each in dataclasses.fields(tower)}
    return values | {"sizes": sizes}


def _read_sizes(whole: Fields, tile: int, default: Sequence[Size]) -> tuple[Size, ...]:
    """Returns the possible sizes of the picture that tiles of this side make up."""
    name = "image_grid_pinpoints"
    value = whole.values.get(name)
    stored = [list(size) for size in default] if value is None else value
    sizes = read_sizes(stored, tile)
    if sizes is None:
        raise whole.error(
            f"{name!r} must list heights and widths that are multiples of image_size ({tile}), not "
            f"{stored!r}"
        )
    return sizes
