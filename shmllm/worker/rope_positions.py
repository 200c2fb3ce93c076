"""The positions of tokens on three axes, time, row and column, which rotate queries and keys (Wang
et al., "Qwen2-VL", 2024, section 2.1).

The three are alike for a token of text. The tokens of an image of r x c tokens, one row of it after
the other, have the time of its first token, and rows and columns from there on; what follows begins
max(r, c) behind that. So the positions of a request fall behind the indices of its tokens.

This module must not know how a step is made, nor what an image is besides its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shmllm.models.rope_config import NUM_AXES
from shmllm.worker.arrays import LongArray

PlacedGrid = tuple[int, tuple[int, int, int]]
"""The index of an image's first token in its request, and the numbers of frames, rows and columns
of its tokens. The number of frames is 1."""


class RopePositions:
    """Knows the images of the request of each row.

    Args:
        num_rows: the largest number of requests that run at once.
    """

    def __init__(self, num_rows: int) -> None:
        self._images: dict[int, _Images] = {}
        self._ends = np.zeros(num_rows, np.int64)
        self._shifts = np.zeros(num_rows, np.int64)

    def update(self, row: int, items: Sequence[PlacedGrid]) -> None:
        """Assign a row to a request.

        Args:
            row: the row.
            items: the images in its prompt, in their order.
        """
        self._images.pop(row, None)
        self._ends[row] = self._shifts[row] = 0
        if items:
            images = self._images[row] = _Images.of(items)
            self._ends[row], self._shifts[row] = images.ends[-1], images.shifts[-1]

    def fill(self, rows: LongArray, positions: LongArray) -> LongArray:
        """Return the positions of tokens on the axes, (3, T) int64, not to be written: they may be
        a view of `positions`.

        Args:
            rows: (T,) int64, the row of each token.
            positions: (T,) int64, the index of each token in its request.
        """
        if not self._images:
            return _alike(positions)
        behind = _alike(positions + self._shifts[rows])
        is_earlier = positions < self._ends[rows]
        if not is_earlier.any():
            return behind
        found = behind.copy()
        for row in np.unique(rows[is_earlier]).tolist():
            chosen = is_earlier & (rows == row)
            found[:, chosen] = self._images[row].place(positions[chosen])
        return found


@dataclass(frozen=True, slots=True)
class _Images:
    """The I images of a request.

    Attributes:
        begins, ends: (I,) int64, the indices of their first tokens, and of those behind the last.
        starts: (I,) int64, their first positions.
        widths: (I,) int64, their numbers of columns.
        shifts: (I + 1,) int64, the difference of position and index of text behind that many
            images.
    """

    begins: LongArray
    ends: LongArray
    starts: LongArray
    widths: LongArray
    shifts: LongArray

    @classmethod
    def of(cls, items: Sequence[PlacedGrid]) -> _Images:
        begins, grids = (np.array(part, np.int64) for part in zip(*items, strict=True))
        frames, heights, widths = grids.T
        assert (frames == 1).all(), "an image has one frame"
        counts = heights * widths
        shifts = np.append(0, np.cumsum(np.maximum(heights, widths) - counts))
        return cls(begins, begins + counts, begins + shifts[:-1], widths, shifts)

    def place(self, positions: LongArray) -> LongArray:
        """Return the positions on the axes, (3, T) int64, of the request's tokens with these
        indices."""
        num_begun = np.searchsorted(self.begins, positions, side="right")
        image = np.maximum(num_begun - 1, 0)
        is_inside = (num_begun > 0) & (positions < self.ends[image])
        rows, columns = np.divmod(positions - self.begins[image], self.widths[image])
        inside = self.starts[image] + np.stack((np.zeros_like(rows), rows, columns))
        return np.where(is_inside, inside, positions + self.shifts[num_begun])


def _alike(positions: LongArray) -> LongArray:
    return np.broadcast_to(positions, (NUM_AXES, len(positions)))
