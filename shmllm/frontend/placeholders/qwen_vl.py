"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: an image token for each square of merged patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.qwen2_vl import Qwen2VLRules
from shmllm.frontend.placeholders.family import Config, ImagePlaceholder
from shmllm.params.items import Grid


@dataclass(frozen=True, kw_only=True)
class QwenVLPlaceholder(ImagePlaceholder):
    """Attributes:
    patch_size: the side of a patch, in pixels.
    merge_size: the side of the square of patches that becomes one embedding, in patches.
    """

    DEFAULT_PATCH: ClassVar[int] = 14
    DEFAULT_ID: ClassVar[int] = 151655

    patch_size: int
    merge_size: int

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        vision = config.table("vision_config")
        text = texts.get("image_token", "<|image_pad|>")
        token = config.integer("image_token_id", default=cls.DEFAULT_ID, minimum=0)
        return cls(
            mark=f"<|vision_start|>{text}<|vision_end|>",
            replaced=text,
            replaced_id=token,
            token=text,
            token_id=token,
            side=None,
            patch_size=vision.integer("patch_size", default=cls.DEFAULT_PATCH),
            merge_size=vision.integer("spatial_merge_size", default=2),
        )

    def count(self, grid: Grid) -> int:
        return grid[0] * grid[1] * grid[2] // self.merge_size**2

    def expansion(self, grid: Grid) -> str:
        return self.token * self.count(grid)

    def check_rules(self, rules: Rules) -> None:
        if not isinstance(rules, Qwen2VLRules):
            raise Config({}).error(f"the model needs Qwen's image processor, not {rules!r}")
        if (rules.patch_size, rules.merge_size) != (self.patch_size, self.merge_size):
            raise Config({}).error(
                f"the vision tower has patches of {self.patch_size} pixels and merges squares of "
                f"{self.merge_size}, the image processor has {rules.patch_size} and "
                f"{rules.merge_size}"
            )


@dataclass(frozen=True, kw_only=True)
class Qwen3VLPlaceholder(QwenVLPlaceholder):
    """The defaults of transformers' `Qwen3VLVisionConfig`."""

    DEFAULT_PATCH: ClassVar[int] = 16
