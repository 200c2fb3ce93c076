"""How the tiles of an image lie that make up one picture (LLaVA-NeXT, Liu et al., 2024).

An image is resized to the largest sides that fit into one of several sizes, padded to it, and cut
into square tiles; another tile has the whole image. Of the patches of the picture those are left
out that show padding, and each row of them ends with an embedding of its own. LLaVA-OneVision (Li
et al., 2024) shrinks the embeddings of large pictures before that. Front ends and engines compute
this alike, from the sides of the image.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Size = tuple[int, int]
"""Height and width, in pixels."""
DEFAULT_SIZES: tuple[Size, ...] = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
"""The default of ``image_grid_pinpoints`` in config.json."""
_ONEVISION_SIDES = range(384, 2305, 384)
ONEVISION_SIZES: tuple[Size, ...] = tuple(
    (height, width) for height in _ONEVISION_SIDES for width in _ONEVISION_SIDES
)
"""The same of LLaVA-OneVision."""
_MOST_SIDE = 2**16
_LEAST_RATIO = 1.1


@dataclass(frozen=True, slots=True)
class JoinedTiles:
    """
    Attributes:
        rows, columns: of tiles in the picture.
        above: how many rows of patches are left out at the top, and as many at the bottom.
        left: how many columns of patches at the left, and as many at the right.
        num_rows, num_columns: of the patches that remain.
        shrunk: how many rows and columns of embeddings these become; None: as many.
    """

    rows: int
    columns: int
    above: int
    left: int
    num_rows: int
    num_columns: int
    shrunk: tuple[int, int] | None = None

    @property
    def num_tiles(self) -> int:
        """The number of tiles, with that of the whole image."""
        return 1 + self.rows * self.columns

    @property
    def num_embeddings(self) -> int:
        """The number of embeddings of the picture, with those at the ends of its rows."""
        rows, columns = self.shape
        return rows * (columns + 1)

    @property
    def shape(self) -> tuple[int, int]:
        """The rows and the columns of embeddings of the picture, without those at the ends."""
        return self.shrunk or (self.num_rows, self.num_columns)


def read_sizes(value: Any, tile: int) -> tuple[Size, ...] | None:
    """Returns the sizes that a file lists; None: it does not list sizes of whole tiles.

    Args:
        value: what the file has under ``image_grid_pinpoints``.
        tile: the side of a tile, in pixels.
    """

    def is_size(each: Any) -> bool:
        return (
            isinstance(each, list | tuple)
            and len(each) == 2
            and all(type(s) is int and 0 < s < _MOST_SIDE and s % tile == 0 for s in each)
        )

    if not isinstance(value, list | tuple) or not value or not all(map(is_size, value)):
        return None
    return tuple((height, width) for height, width in value)


def read_most_tiles(value: Any) -> int | None:
    """Returns the most tiles whose patches stay as they are, the number N of "anyres_max_N"; None:
    the value is something else.

    Args:
        value: what config.json has under ``vision_aspect_ratio``; None: the default, 9.
    """
    if value is None:
        return 9
    found = re.fullmatch(r"anyres_max_([1-9][0-9]{0,3})", value) if isinstance(value, str) else None
    return None if found is None else int(found[1])


def best_size(height: int, width: int, sizes: Sequence[Size]) -> Size:
    """Returns the size that shows the most pixels of an image, and of several the smallest.

    Args:
        height, width: of the image.
        sizes: those that are possible; the first one wins if others are as good.
    """

    def rank(size: Size) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        return shown, shown - size[0] * size[1]

    return max(sizes, key=rank)


def join_tiles(
    height: int, width: int, sizes: Sequence[Size], tile: int, side: int, most_tiles: int = 0
) -> JoinedTiles:
    """Returns how the tiles of an image lie. Of one that is very narrow no patch may remain.

    Args:
        height, width: of the image.
        sizes: see `best_size`; multiples of `tile`.
        tile: the side of a tile, in pixels.
        side: the number of patches in a row of a tile.
        most_tiles: pictures of more patches than about so many tiles have are shrunk; 0: none are.
    """
    best = best_size(height, width, sizes)
    rows, columns = best[0] // tile, best[1] // tile
    num_rows, num_columns = rows * side, columns * side
    above = left = 0
    if width / height > num_columns / num_rows:
        above = (num_rows - int(round(height * (num_columns / width), 7))) // 2
    else:
        left = (num_columns - int(round(width * (num_rows / height), 7))) // 2
    num_rows -= 2 * above
    num_columns -= 2 * left
    shrunk = _shrunk(num_rows, num_columns, most_tiles * side**2) if most_tiles else None
    return JoinedTiles(rows, columns, above, left, num_rows, num_columns, shrunk)


def _shrunk(rows: int, columns: int, most: int) -> tuple[int, int] | None:
    """Returns the rows and columns that a picture with more than `most` patches is shrunk to, if
    it has so many more that its sides become shorter by a tenth."""
    ratio = math.sqrt(rows * columns / most)
    return (int(rows // ratio), int(columns // ratio)) if ratio > _LEAST_RATIO else None
