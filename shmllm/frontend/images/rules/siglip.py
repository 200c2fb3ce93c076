"""SigLIP's images: resized to fixed sides, whatever their ratio was. The grid is (1, 1, 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.frontend.images.picture import Picture, pixels_of
from shmllm.frontend.images.rules.family import Rules, Tiles
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.sides import FIXED, SHORTEST, fixed_sides, resized_to


@dataclass(frozen=True)
class SiglipRules(Rules):
    """The rules of transformers' `SiglipImageProcessor` and `BlipImageProcessor`.

    Attributes:
        size: the sides of the resized image, in pixels; None if it keeps its size.
        resample: the filter of pillow.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset({"do_resize", "size", "resample"})

    size: dict[str, int] | None
    resample: int

    @classmethod
    def of(cls, options: Options) -> Self:
        size = options.sides("size", FIXED, SHORTEST, one="shortest_edge")
        return cls(size if options.flag("do_resize") else None, options.filter())

    def tiles(self, picture: Picture) -> Tiles:
        return Tiles(pixels_of(self.fitted(picture))[None], (1, 1, 1))

    def fitted(self, picture: Picture) -> Picture:
        """The tile of an RGB image."""
        if self.size is not None:
            picture = resized_to(picture, self.size, self.resample)
        return picture

    def sides(self) -> tuple[int, int] | None:
        return fixed_sides(self.size)
