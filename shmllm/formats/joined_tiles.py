"""How the tiles of an image lie that make up one picture (LLaVA-NeXT, Liu et al., 2024).

An image is resized to the largest sides that fit into one of several sizes, padded to it, and cut
into square tiles; another tile has the whole image. Of the patches of the picture those are left
out that show padding, and each row of them ends with an embedding of its own. Front ends and
engines compute this alike, from the sides of the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Size = tuple[int, int]
"""Height and width, in pixels."""
DEFAULT_SIZES: tuple[Size, ...] = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
"""The default of ``image_grid_pinpoints`` in config.json."""
_MOST_SIDE = 2**16


@dataclass(frozen=True, slots=True)
class JoinedTiles:
    """
    Attributes:
        rows, columns: of tiles in the picture.
        above: how many rows of patches are left out at the top, and as many at the bottom.
        left: how many columns of patches at the left, and as many at the right.
        num_rows, num_columns: of the patches that remain.
    """

    rows: int
    columns: int
    above: int
    left: int
    num_rows: int
    num_columns: int

    @property
    def num_tiles(self) -> int:
        """The number of tiles, with that of the whole image."""
        return 1 + self.rows * self.columns

    @property
    def num_embeddings(self) -> int:
        """The number of embeddings of the picture, with those at the ends of its rows."""
        return self.num_rows * (self.num_columns + 1)


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


def join_tiles(height: int, width: int, sizes: Sequence[Size], tile: int, side: int) -> JoinedTiles:
    """Returns how the tiles of an image lie. Of one that is very narrow no patch may remain.

    Args:
        height, width: of the image.
        sizes: see `best_size`; multiples of `tile`.
        tile: the side of a tile, in pixels.
        side: the number of patches in a row of a tile.
    """
    best = best_size(height, width, sizes)
    rows, columns = best[0] // tile, best[1] // tile
    num_rows, num_columns = rows * side, columns * side
    above = left = 0
    if width / height > num_columns / num_rows:
        above = (num_rows - int(round(height * (num_columns / width), 7))) // 2
    else:
        left = (num_columns - int(round(width * (num_rows / height), 7))) // 2
    return JoinedTiles(rows, columns, above, left, num_rows - 2 * above, num_columns - 2 * left)
