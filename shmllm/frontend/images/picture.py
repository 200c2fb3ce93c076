"""What the modules of this package need of an image of pillow, without importing pillow.

`Picture` is `PIL.Image.Image` for type checkers. The limit of pixels holds for images that users
give, and for what settings make of them.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shmllm.errors import RequestError

MOST_PIXELS = 2**30 // 12
"""The largest number of pixels of an image; 256 MiB of RGB. Above it, pillow warns by default."""
MOST_OF_SIDE = 2**20
"""The longest side of an image, in pixels. pillow's filters take 50 bytes and more for each, and
from about 40 million on it resizes and encodes none: it raises a MemoryError without a word."""


class Picture(Protocol):
    """An image of pillow."""

    info: dict[Any, Any]

    @property
    def mode(self) -> str: ...

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""

    def getbands(self) -> tuple[str, ...]: ...

    def load(self) -> Any: ...

    def convert(self, mode: str) -> Picture: ...

    def resize(self, size: tuple[int, int], resample: int) -> Picture: ...

    def crop(self, box: tuple[int, int, int, int]) -> Picture: ...

    def tobytes(self) -> bytes: ...


def excess_of(width: int, height: int) -> str | None:
    """Which limit an image of this size exceeds, in words; None: none."""
    if width * height > MOST_PIXELS:
        return f"more than {MOST_PIXELS:,} pixels"
    if max(width, height) > MOST_OF_SIDE:
        return f"more than {MOST_OF_SIDE:,} pixels in a row or a column"
    return None


def resized(picture: Picture, width: int, height: int, resample: int) -> Picture:
    """The image in another size, by pillow's filter `resample`; the image itself if it has it.

    Raises:
        RequestError: the result would have more than MOST_PIXELS pixels, or MOST_OF_SIDE in a row
            or a column.
    """
    if (excess := excess_of(width, height)) is not None:
        raise RequestError(
            f"an image of {picture.size[0]}x{picture.size[1]} pixels becomes one of "
            f"{width}x{height} by the model's settings, {excess}; crop it"
        )
    if picture.size == (width, height):
        return picture
    return picture.resize((width, height), resample)


def pixels_of(picture: Picture) -> NDArray[np.uint8]:
    """The pixels of an RGB image, uint8 [height, width, 3], read-only."""
    width, height = picture.size
    return np.frombuffer(picture.tobytes(), np.uint8).reshape(height, width, 3)
