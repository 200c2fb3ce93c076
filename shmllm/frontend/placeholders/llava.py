"""LLaVA: as many image tokens as the tower has patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Config, ImagePlaceholder
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
        return cls(
            mark=text,
            replaced=text,
            replaced_ids=(token,),
            token=text,
            token_id=token,
            side=side,
            tokens=rows * rows + leading - dropped,
        )

    def count(self, grid: Grid) -> int:
        return self.tokens

    def expansion(self, item: PreparedItem) -> str:
        return self.token * self.tokens
