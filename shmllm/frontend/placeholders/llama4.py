"""Llama 4: the tiles of an image with tokens between them, then the whole image, within two
tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.llama4 import Llama4Rules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Config
from shmllm.frontend.placeholders.internvl import square_side
from shmllm.frontend.placeholders.tiles import TilesPlaceholder

_PATCH, _BEHIND_TILE, _BEHIND_ROW = "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"
_BEGIN, _WHOLE, _END = "<|image_start|>", "<|image|>", "<|image_end|>"


@dataclass(frozen=True, kw_only=True)
class Llama4Placeholder(TilesPlaceholder):
    """Of transformers' `Llama4Processor`."""

    RULES: ClassVar[type[Rules]] = Llama4Rules
    AUTHOR: ClassVar[str] = "Llama 4"

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        vision = config.table("vision_config")
        side = square_side(vision, "image_size", 448)
        ratio = vision.values.get("pixel_shuffle_ratio", 0.5)
        if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
            raise vision.error(f"'pixel_shuffle_ratio' must be from 0 to 1, not {ratio!r}")
        rows = side // square_side(vision, "patch_size", 14)
        mark = texts.get("image_token", _WHOLE)
        names = "image_token_index", "image_token_id"
        return cls(
            mark=mark,
            replaced=mark,
            replaced_ids=(),
            token=_PATCH,
            token_id=config.integer(*names, default=200_092, minimum=0),
            side=side,
            tokens=rows**2 // round(1 / ratio**2),
        )

    def expansion(self, item: PreparedItem) -> str:
        tiles, rows, columns = item.grid
        tile = _PATCH * self.tokens
        row = _BEHIND_TILE.join([tile] * columns) + _BEHIND_ROW
        return f"{_BEGIN}{row * rows if tiles > 1 else ''}{_WHOLE}{tile}{_END}"
