"""The images of MiniCPM-V 4.6 and MiniCPM-OCR: a large one is cut into slices of its own ratio, and
is there as a whole, too. A slice has the shape of the others, the whole image one of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from shmllm.errors import RequestError
from shmllm.frontend.images.picture import Picture, pixels_of, resized
from shmllm.frontend.images.rules.family import Tiles
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.squares import SquaresRules

MERGED = {"4x": 2, "16x": 4}
"""The side of the square of patches that becomes one embedding, by "downsample_mode"."""
_ENLARGES = {None: True, "always": True, "never": False}
_MOST_SLICES = 1024

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class MiniCPMVRules(SquaresRules):
    """The rules of transformers' `MiniCPMV4_6ImageProcessor` and `MiniCPMOcrImageProcessor`.

    Attributes:
        scale: the side of a square of as many pixels as a slice has, about.
        most: the largest number of slices; 1: no image is cut.
        enlarges: whether images with fewer pixels are enlarged.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset(
        {"max_slice_nums", "resample", "scale_resolution", "slice_mode", "small_image_upsize"}
    )

    scale: int
    most: int
    enlarges: bool

    @classmethod
    def of(cls, options: Options) -> Self:
        for name in ("do_resize", "use_image_id"):
            if not options.flag(name):
                raise RequestError(f"{name!r} false is not supported", parameter=name)
        if (most := options.count("max_slice_nums")) > _MOST_SLICES:
            raise RequestError(
                f"'max_slice_nums' must be at most {_MOST_SLICES}, not {most}",
                parameter="max_slice_nums",
            )
        return cls(
            resize=True,
            resample=options.filter(),
            patch_size=options.count("patch_size"),
            merge_size=_choice(options, "downsample_mode", MERGED),
            scale=options.count("scale_resolution"),
            most=most if options.flag("slice_mode") else 1,
            enlarges=_choice(options, "small_image_upsize", _ENLARGES),
        )

    def tiles(self, picture: Picture) -> Tiles:
        width, height = picture.size
        found = self._arrangement(width, height)
        if found is None:
            return super().tiles(picture)
        rows, columns = found
        whole = self._whole(picture, self._sides(width, height, enlarges=False))
        # A slice has the size that the image would have if it were as large as one.
        of_slice = self._sides(
            _divisible(width, columns) / columns, _divisible(height, rows) / rows, enlarges=True
        )
        large = resized(picture, of_slice[0] * columns, of_slice[1] * rows, self.resample)
        slices = pixels_of(large).reshape(rows, of_slice[1], columns, of_slice[0], 3)
        grid = (1, of_slice[1] // self.patch_size, of_slice[0] // self.patch_size)
        parts = [
            Tiles(np.ascontiguousarray(slices[row, :, column])[None], grid)
            for row in range(rows)
            for column in range(columns)
        ]
        empty = np.empty(0, np.uint8)
        return Tiles(empty, (1 + len(parts), rows, columns), (whole, *parts))

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        return self._sides(width, height, enlarges=self.enlarges)

    def _whole(self, picture: Picture, sides: tuple[int, int]) -> Tiles:
        pixels = pixels_of(resized(picture, *sides, self.resample))
        return Tiles(pixels[None], (1, sides[1] // self.patch_size, sides[0] // self.patch_size))

    def _sides(self, width: float, height: float, *, enlarges: bool) -> tuple[int, int]:
        """Width and height of an image, reduced to `scale`, or enlarged to it, too."""
        if enlarges or height * width > self.scale**2:
            ratio = width / height
            height = int(self.scale / math.sqrt(ratio))
            width = int(height * ratio)
        return _divisible(width, self.factor), _divisible(height, self.factor)

    def _arrangement(self, width: int, height: int) -> tuple[int, int] | None:
        """The rows and columns of slices whose ratio is nearest to the image's, by its logarithm,
        of about as many as it is larger than `scale`; None: it is not cut."""
        wanted = min(math.ceil(width * height / self.scale**2), self.most)
        if wanted <= 1:
            return None
        log_ratio = math.log(width / height)
        best, least = (1, 1), math.inf
        for count in (wanted - 1, wanted, wanted + 1):
            if count == 1 or count > self.most:
                continue
            for rows in range(1, count + 1):
                if count % rows:
                    continue
                error = abs(log_ratio - math.log(count // rows / rows))
                if error < least or (error == least and rows > best[0]):
                    best, least = (rows, count // rows), error
        return best


def _divisible(length: float, divisor: int) -> int:
    """The nearest multiple of a divisor, itself at least. Of a half, Python rounds to the even
    number."""
    return max(round(length / divisor) * divisor, divisor)


def _choice(options: Options, name: str, meanings: Mapping[Any, T]) -> T:
    value = options.values.get(name)
    if not isinstance(value, str | None) or value not in meanings:
        known = ", ".join(each for each in meanings if each is not None)
        raise RequestError(
            f"{name!r} {value!r} is not supported; supported: {known}", parameter=name
        )
    return meanings[value]
