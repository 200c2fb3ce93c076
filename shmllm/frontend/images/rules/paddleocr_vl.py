"""PaddleOCR-VL's images: of any size with a number of pixels between two bounds, and narrow ones
enlarged before that."""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.frontend.images.rules.qwen2_vl import OneFrameRules, refuse_narrow, sides_within


@dataclass(frozen=True, kw_only=True)
class PaddleOcrVlRules(OneFrameRules):
    """The rules of transformers' `PaddleOCRVLImageProcessor`."""

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the resized image (transformers' `smart_resize`). Of a half, Python
        rounds to the even number.

        Raises:
            RequestError: one side of the enlarged image is more than LARGEST_RATIO times the other.
        """
        factor, given = self.factor, (width, height)
        if height < factor:
            width, height = round(width * factor / height), factor
        if width < factor:
            width, height = factor, round(height * factor / width)
        refuse_narrow(max(width, height) / min(width, height), given)
        return sides_within(width, height, self.fewest, self.most, factor)
