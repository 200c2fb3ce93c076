"""CLIP, SigLIP and SigLIP 2: an image is a prompt, for which one token stands and no text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.siglip2 import Siglip2Rules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Config, ImagePlaceholder
from shmllm.frontend.placeholders.internvl import square_side
from shmllm.frontend.placeholders.squares import SquaresPlaceholder
from shmllm.params.items import Grid

_TOKEN = 0
_NO_TEXT: dict[str, Any] = {
    "mark": "",
    "replaced": "",
    "replaced_ids": (_TOKEN,),
    "token": "",
    "token_id": _TOKEN,
}


@dataclass(frozen=True, kw_only=True)
class ClipPlaceholder(ImagePlaceholder):
    """Of images of one size."""

    is_alone: ClassVar[bool] = True

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        vision = config.table("vision_config_dict")
        if not vision.values:
            vision = config.table("vision_config")
        return cls(**_NO_TEXT, side=vision.integer("image_size", default=224))

    def count(self, grid: Grid) -> int:
        return 1

    def expansion(self, item: PreparedItem) -> str:
        return self.token


@dataclass(frozen=True, kw_only=True)
class Siglip2Placeholder(SquaresPlaceholder):
    """Of images of any size."""

    RULES: ClassVar[type[Rules]] = Siglip2Rules
    AUTHOR: ClassVar[str] = "SigLIP 2"
    is_alone: ClassVar[bool] = True

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        size = square_side(config.table("vision_config"), "patch_size", 16)
        return cls(**_NO_TEXT, side=None, patch_size=size, merge_size=1)

    def count(self, grid: Grid) -> int:
        return 1

    def expansion(self, item: PreparedItem) -> str:
        return self.token
