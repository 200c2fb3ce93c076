"""Images of any size: their own ratio, and sides that are multiples of merged patches.

The grid is (1, rows, columns) of patches before they are merged.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from shmllm.errors import RequestError
from shmllm.frontend.images.picture import Picture, pixels_of, resized
from shmllm.frontend.images.rules.family import Rules, Tiles


@dataclass(frozen=True, kw_only=True)
class SquaresRules(Rules):
    """
    Attributes:
        resize: whether images are resized; otherwise their sides must suit.
        resample: the filter of pillow.
        patch_size: the side of a patch, in pixels.
        merge_size: the side of the square of patches that becomes one embedding, in patches.
    """

    resize: bool
    resample: int
    patch_size: int
    merge_size: int

    @abstractmethod
    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the resized image.

        Raises:
            RequestError: the image is too narrow.
        """

    @property
    def factor(self) -> int:
        """The side of an embedding, in pixels."""
        return self.patch_size * self.merge_size

    @property
    def step(self) -> int:
        """The number of pixels of which the sides of a resized image are multiples."""
        return self.factor

    def tiles(self, picture: Picture) -> Tiles:
        picture = self.fitted(picture, self.size_of)
        width, height = picture.size
        grid = (1, height // self.patch_size, width // self.patch_size)
        return Tiles(pixels_of(picture)[None], grid)

    def fitted(self, picture: Picture, size_of: Callable[[int, int], tuple[int, int]]) -> Picture:
        """The image in a size that the model takes.

        Args:
            picture: an RGB image.
            size_of: makes that size of the image's, width and height.

        Raises:
            RequestError: without `resize`, its size does not suit.
        """
        if self.resize:
            picture = resized(picture, *size_of(*picture.size), self.resample)
        width, height = picture.size
        if width % self.step or height % self.step:
            raise RequestError(
                f"without 'do_resize' both sides must be multiples of {self.step} pixels, not "
                f"{width}x{height}",
                parameter="do_resize",
            )
        return picture


@dataclass(frozen=True, kw_only=True)
class BoundedRules(SquaresRules):
    """
    Attributes:
        fewest: the smallest number of pixels that a resized image, or all frames together, become.
        most: the largest one.
    """

    fewest: int
    most: int
