"""CLIP and SigLIP: an image is a prompt, for which one token stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Config, ImagePlaceholder
from shmllm.params.items import Grid

_TOKEN = 0


@dataclass(frozen=True, kw_only=True)
class ClipPlaceholder(ImagePlaceholder):
    """See the module; no text stands for an image."""

    is_alone: ClassVar[bool] = True

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        vision = config.table("vision_config_dict")
        if not vision.values:
            vision = config.table("vision_config")
        return cls(
            mark="",
            replaced="",
            replaced_ids=(_TOKEN,),
            token="",
            token_id=_TOKEN,
            side=vision.integer("image_size", default=224),
        )

    def count(self, grid: Grid) -> int:
        return 1

    def expansion(self, item: PreparedItem) -> str:
        return self.token
