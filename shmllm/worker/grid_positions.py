"""The positions of tokens on the axes of HunyuanOCR: column, row and number of an image, and before
these perhaps the index of the token in its request.

All are that index for a token of text, and for those at the beginning and the end of an image. A
row of an image has one more token than columns, which ends it. So what follows an image counts on,
as in the authors' code and in vLLM.

This module must not know how a step is made, nor what an image is besides its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shmllm.worker.arrays import LongArray
from shmllm.worker.rope_positions import PlacedGrid

_OF_IMAGES = 3
"""The number of axes on which tokens of images have places of their own: the last ones."""


class GridPositions:
    """Knows the images of the request of each row.

    Args:
        num_axes: the number of axes, at least 3.
    """

    def __init__(self, num_axes: int) -> None:
        self._num_axes = num_axes
        self._grids: dict[int, _Grids] = {}

    def update(self, row: int, grids: Sequence[PlacedGrid], prompt: Sequence[int]) -> None:
        """Assign a row to a request.

        Args:
            row: the row.
            grids: the images in its prompt, in their order, without what ends rows.
            prompt: its token ids, which have no influence.
        """
        self._grids.pop(row, None)
        if grids:
            self._grids[row] = _Grids.of(grids)

    def fill(self, rows: LongArray, positions: LongArray) -> LongArray:
        """Return the positions of tokens on the axes, (axes, T) int64, not to be written: they may
        be a view of `positions`.

        Args:
            rows: (T,) int64, the row of each token.
            positions: (T,) int64, the index of each token in its request.
        """
        found = np.broadcast_to(positions, (self._num_axes, len(positions)))
        if not self._grids:
            return found
        found = found.copy()
        for row in self._grids.keys() & set(np.unique(rows).tolist()):
            chosen = rows == row
            found[-_OF_IMAGES:, chosen] = self._grids[row].place(positions[chosen])
        return found


class _Grids(NamedTuple):
    """The G images of a request.

    Attributes:
        begins, ends: (G,) int64, the indices of the first token in their first row, and of that
            behind the last row.
        widths: (G,) int64, the number of tokens in a row.
    """

    begins: LongArray
    ends: LongArray
    widths: LongArray

    @classmethod
    def of(cls, grids: Sequence[PlacedGrid]) -> _Grids:
        begins, heights, columns = np.array(
            [(each.begin + 1, each.rows, each.columns) for each in grids], np.int64
        ).T
        return cls(begins, begins + heights * (columns + 1), columns + 1)

    def place(self, positions: LongArray) -> LongArray:
        """Return column, row and number, (3, T) int64, of the request's tokens with these
        indices."""
        number = np.searchsorted(self.begins, positions, side="right") - 1
        grid = np.maximum(number, 0)
        is_inside = (number >= 0) & (positions < self.ends[grid])
        rows, columns = np.divmod(positions - self.begins[grid], self.widths[grid])
        return np.where(is_inside, np.stack((columns, rows, number)), positions)
