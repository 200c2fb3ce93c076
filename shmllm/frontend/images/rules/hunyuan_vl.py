"""HunyuanOCR's images: of any size with a number of pixels between two bounds, resized bicubically
whatever the files say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.formats.image_defaults import BICUBIC
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.qwen2_vl import OneFrameRules


@dataclass(frozen=True, kw_only=True)
class HunYuanVLRules(OneFrameRules):
    """The rules of transformers' `HunYuanVLImageProcessor`."""

    OVERRIDES: ClassVar[frozenset[str]] = OneFrameRules.OVERRIDES - {"resample"}

    @classmethod
    def of(cls, options: Options) -> Self:
        return super().of(Options({**options.values, "resample": BICUBIC}))
