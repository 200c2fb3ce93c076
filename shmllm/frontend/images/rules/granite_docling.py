"""Granite-Docling's images: resized to the number of square tiles whose ratio is nearest, and cut;
large wide ones to more tiles than others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from shmllm.errors import RequestError
from shmllm.frontend.images.picture import Picture
from shmllm.frontend.images.rules.arrangements import (
    ArrangedRules,
    Arrangement,
    arrangements,
    check_pixels,
    nearest,
)
from shmllm.frontend.images.rules.options import Options

_MOST_OF_SIDE = 16
"""The most tiles in a row and in a column: its tokenizer has no names for others."""
_DENSE = "dense_max_patches"
_BOUNDS = ("dense_min_aspect", "dense_max_aspect", "dense_max_scale")


@dataclass(frozen=True)
class GraniteDoclingRules(ArrangedRules):
    """The rules of transformers' `GraniteDoclingImageProcessor`, which resizes always.

    Attributes:
        fewest: the smallest number of tiles, without that of the whole image.
        most_dense: the largest number of them of a dense image; 0: none is dense.
        ratios: the ratio of width to height above which images are dense, and the one up to which
            they are; 0: there is no bound.
        scale: of dense images, what the width of all tiles as a part of the image's is less than;
            0: that does not matter.
    """

    OVERRIDES: ClassVar[frozenset[str]] = ArrangedRules.OVERRIDES - {"do_resize"} | {
        "min_patches",
        "dense_max_patches",
        *_BOUNDS,
    }

    fewest: int
    most_dense: int
    ratios: tuple[float, float]
    scale: float

    @classmethod
    def _read(cls, options: Options) -> dict[str, Any]:
        if options.flag("fine_route"):
            raise RequestError(
                "'fine_route' true is not supported; supported: false", parameter="fine_route"
            )
        shared, fewest = super()._read(options), options.count("min_patches")
        least, greatest, scale = (_number(options, name) for name in _BOUNDS)
        dense = options.count(_DENSE) if options.values.get(_DENSE) else 0
        if shared["most"] == 1 or not (least or scale):
            dense = 0
        check_pixels(_DENSE, dense, shared["tile"])
        if any(1 < most < fewest for most in (shared["most"], dense)):
            raise RequestError(
                f"'min_patches' ({fewest}) must not exceed the most tiles of an image",
                parameter="min_patches",
            )
        own = {"fewest": fewest, "most_dense": dense, "ratios": (least, greatest), "scale": scale}
        return shared | own | {"resize": True}

    def arrangement(self, picture: Picture) -> Arrangement:
        most = self.most_dense if self._is_dense(picture) else self.most
        return nearest(picture, self.tile, _arrangements(self.fewest, most))

    def _is_dense(self, picture: Picture) -> bool:
        width, height = picture.size
        least, greatest = self.ratios
        if not self.most_dense or (least and not width / height > least):
            return False
        if greatest and width / height > greatest:
            return False
        columns, _ = nearest(picture, self.tile, _arrangements(self.fewest, self.most))
        return not self.scale or columns * self.tile[1] / width < self.scale


def _number(options: Options, name: str) -> float:
    """A number that is not negative."""
    return 0.0 if options.values.get(name) in (0, None) else options.number(name)


@lru_cache(8)
def _arrangements(fewest: int, most: int) -> list[Arrangement]:
    return [each for each in arrangements(fewest, most) if max(each) <= _MOST_OF_SIDE]
