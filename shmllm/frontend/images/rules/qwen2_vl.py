"""Qwen-VL's images: of any size with a number of pixels between two bounds. Qwen2-VL, 2.5-VL and
3-VL differ in the settings only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from shmllm.errors import RequestError
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.squares import BoundedRules

LARGEST_RATIO = 200
"""The largest ratio of an image's sides, as in transformers."""

_BOUNDS = ("shortest_edge", "longest_edge")
_OLDER_BOUNDS = ("min_pixels", "max_pixels")


@dataclass(frozen=True, kw_only=True)
class Qwen2VLRules(BoundedRules):
    """The rules of transformers' `Qwen2VLImageProcessor`."""

    OVERRIDES: ClassVar[frozenset[str]] = frozenset(
        {"do_resize", "size", "min_pixels", "max_pixels", "resample"}
    )

    @classmethod
    def merged(cls, values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        """All bounds of pixels are in "size" afterwards. A request may change one of them, and both
        kinds of fields may name them min_pixels and max_pixels, which then count, also before those
        of the same names that "size" has in older files."""
        size = values.get("size")
        for fields in (values, changes):
            given = fields.get("size")
            if isinstance(given, dict) and isinstance(size, dict):
                size = size | given
            elif given is not None:
                size = given
            for name, bound in zip(_OLDER_BOUNDS, _BOUNDS, strict=True):
                if fields.get(name) is not None and isinstance(size, dict):
                    size = {**size, bound: fields[name]}
                    size.pop(name, None)
        return values | changes | {"size": size}

    @classmethod
    def of(cls, options: Options) -> Self:
        bounds = options.sides("size", _BOUNDS)
        return cls(
            fewest=bounds["shortest_edge"],
            most=bounds["longest_edge"],
            resize=options.flag("do_resize"),
            resample=options.filter(),
            patch_size=options.count("patch_size"),
            merge_size=options.count("merge_size"),
        )

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the resized image (transformers' `smart_resize`). Of a half, Python
        rounds to the even number.

        Raises:
            RequestError: one side is more than LARGEST_RATIO times the other.
        """
        refuse_narrow(max(width, height) / min(width, height), (width, height))
        return sides_within(width, height, self.fewest, self.most, self.factor)


@dataclass(frozen=True, kw_only=True)
class OneFrameRules(Qwen2VLRules):
    """The rules of transformers' `VideoLlama3ImageProcessor` and `Ernie4_5_VLMoeImageProcessor`:
    patches are not repeated."""

    @classmethod
    def of(cls, options: Options) -> Self:
        if (frames := options.count("temporal_patch_size")) != 1:
            raise RequestError(
                f"'temporal_patch_size' must be 1, not {frames}", parameter="temporal_patch_size"
            )
        return super().of(options)


def refuse_narrow(ratio: float, given: tuple[int, int]) -> None:
    """Raises a RequestError if the ratio of an image's sides, which were `given`, is too large."""
    if ratio > LARGEST_RATIO:
        raise RequestError(
            f"an image of {given[0]}x{given[1]} pixels is too narrow: one side may be at most "
            f"{LARGEST_RATIO} times the other; crop it"
        )


def sides_within(
    width: int, height: int, fewest: int, most: int, factor: int, num_frames: int = 1
) -> tuple[int, int]:
    """Returns width and height of a resized image.

    Args:
        width, height: those of the image.
        fewest, most: the bounds of the number of pixels of all frames.
        factor: what sides are multiples of.
        num_frames: the number of frames.
    """
    sides = [round(side / factor) * factor for side in (width, height)]
    count = num_frames * sides[0] * sides[1]
    if count > most:
        scale = math.sqrt(num_frames * height * width / most)
        sides = [max(1, math.floor(side / scale / factor)) * factor for side in (width, height)]
    elif count < fewest:
        scale = math.sqrt(fewest / (num_frames * height * width))
        sides = [math.ceil(side * scale / factor) * factor for side in (width, height)]
    return sides[0], sides[1]
