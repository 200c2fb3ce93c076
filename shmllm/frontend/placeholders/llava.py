"""LLaVA: as many image tokens as the tower has patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any, Self

from shmllm.formats.joined_tiles import DEFAULT_SIZES, Size, join_tiles
from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.llava_next import LlavaNextRules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Config, ImagePlaceholder, one_token
from shmllm.params.items import Grid

_TOWERS = {"clip_vision_model": (1, 224, 32), "siglip_vision_model": (0, 224, 16)}
"""Of each kind of tower the number of tokens before the patches (CLIP's CLS), and the sides of an
image and of a patch where config.json is silent."""


@dataclass(frozen=True, kw_only=True)
class LlavaPlaceholder(ImagePlaceholder):
    """Attributes:
    tokens: the number of embeddings of an image.
    """

    tokens: int

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        return cls(**cls._values(config, texts))

    @staticmethod
    def _values(config: Config, texts: Mapping[str, str]) -> dict[str, Any]:
        vision = config.table("vision_config")
        tower = vision.choice("model_type", tuple(_TOWERS))
        leading, image_size, patch_size = _TOWERS[tower]
        if not vision.values:
            image_size, patch_size = 336, 14
        side = vision.integer("image_size", default=image_size)
        rows = side // vision.integer("patch_size", default=patch_size)
        dropped = config.choice("vision_feature_select_strategy", ("default", "full")) == "default"
        text = texts.get("image_token", "<image>")
        token = config.integer("image_token_id", "image_token_index", default=32000, minimum=0)
        return {
            **one_token(text, token),
            "side": side,
            "tokens": rows * rows + leading - dropped,
        }

    def count(self, grid: Grid) -> int:
        return self.tokens

    def expansion(self, item: PreparedItem) -> str:
        return self.token * self.count(item.grid)


@dataclass(frozen=True, kw_only=True)
class LlavaNextPlaceholder(LlavaPlaceholder):
    """LLaVA-NeXT: behind the embeddings of the whole image those of a larger one, as many as its
    size asks for.

    Attributes:
        patches: the number of patches in a row of a tile.
        sizes: the possible sizes of the larger image.
    """

    patches: int
    sizes: tuple[Size, ...]

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        values = cls._values(config, texts)
        sizes = config.values.get("image_grid_pinpoints") or DEFAULT_SIZES
        try:
            pairs = tuple((int(height), int(width)) for height, width in sizes)
        except (TypeError, ValueError):
            raise config.error(
                f"'image_grid_pinpoints' must list heights and widths, not {sizes!r}"
            ) from None
        return cls(**values, patches=isqrt(values["tokens"]), sizes=pairs)

    def count(self, grid: Grid) -> int:
        _, height, width = grid
        assert self.side is not None, "tiles have one size"
        joined = join_tiles(height, width, self.sizes, self.side, self.patches)
        return self.tokens + joined.num_embeddings

    def check_rules(self, rules: Rules) -> None:
        if not isinstance(rules, LlavaNextRules):
            raise Config({}).error(f"the model needs LLaVA-NeXT's image processor, not {rules!r}")
        if (rules.tile, rules.sizes) != (self.side, self.sizes):
            raise Config({}).error(
                f"the model has tiles of {self.side} pixels and the sizes {self.sizes}, the image "
                f"processor has {rules.tile} and {rules.sizes}"
            )
