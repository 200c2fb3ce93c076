"""HunyuanOCR's images: of any size with a number of pixels between two bounds, resized bicubically
whatever the files say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.formats.image_defaults import BICUBIC
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.paddleocr_vl import check_one_frame
from shmllm.frontend.images.rules.qwen2_vl import Qwen2VLRules


@dataclass(frozen=True, kw_only=True)
class HunYuanVLRules(Qwen2VLRules):
    """The rules of transformers' `HunYuanVLImageProcessor`."""

    OVERRIDES: ClassVar[frozenset[str]] = Qwen2VLRules.OVERRIDES - {"resample"}

    @classmethod
    def of(cls, options: Options) -> Self:
        check_one_frame(options)
        return super().of(Options({**options.values, "resample": BICUBIC}))
