"""Gemma 3: each crop is a run of soft tokens between two others and empty lines. With pan and scan,
sentences introduce the whole image and its crops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Config, ImagePlaceholder
from shmllm.params.items import Grid


@dataclass(frozen=True, kw_only=True)
class Gemma3Placeholder(ImagePlaceholder):
    """Attributes:
    tokens: the number of embeddings of a crop.
    end: the text of the token behind them.
    """

    tokens: int
    end: str

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        begin = texts.get("boi_token", "<start_of_image>")
        return cls(
            mark=begin,
            replaced=begin,
            replaced_ids=(config.integer("boi_token_index", "boi_token_id", default=255_999),),
            token=texts.get("image_token", "<image_soft_token>"),
            token_id=config.integer("image_token_id", "image_token_index", default=262_144),
            side=config.table("vision_config").integer("image_size", default=224),
            tokens=config.integer("mm_tokens_per_image", default=256),
            end=texts.get("eoi_token", "<end_of_image>"),
        )

    def count(self, grid: Grid) -> int:
        return grid[0] * self.tokens

    def expansion(self, item: PreparedItem) -> str:
        image = f"\n\n{self.mark}{self.token * self.tokens}{self.end}\n\n"
        if item.grid[0] == 1:
            return image
        crops = " ".join([image] * (item.grid[0] - 1))
        return (
            f"Here is the original image {image} and here are some crops to help you see better "
            f"{crops}"
        )
