"""GLM-4.1V's images: of any size with a number of pixels between two bounds, which count an image
as often as the tower repeats it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.qwen2_vl import refuse_narrow, sides_within
from shmllm.frontend.images.rules.squares import BoundedRules

_BOUNDS = ("shortest_edge", "longest_edge")


@dataclass(frozen=True, kw_only=True)
class Glm4vRules(BoundedRules):
    """The rules of transformers' `Glm4vImageProcessor`. Bounds are those of all frames.

    Attributes:
        num_frames: how often an image is repeated.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset({"do_resize", "size", "resample"})

    num_frames: int

    @classmethod
    def of(cls, options: Options) -> Self:
        bounds = options.sides("size", _BOUNDS)
        return cls(
            fewest=bounds["shortest_edge"],
            most=bounds["longest_edge"],
            num_frames=options.count("temporal_patch_size"),
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
        factor, given = self.factor, (width, height)
        if min(given) < factor:
            scale = max(factor / height, factor / width)
            width, height = int(width * scale), int(height * scale)
        refuse_narrow(max(width, height) / min(width, height), given)
        return sides_within(width, height, self.fewest, self.most, factor, self.num_frames)
