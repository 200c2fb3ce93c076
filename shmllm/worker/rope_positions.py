"""The positions of tokens on three axes, time, row and column, which rotate queries and keys (Wang
et al., "Qwen2-VL", 2024, section 2.1).

The three are alike for a token of text. The tokens of an image of r x c tokens, one row of it after
the other, have the time of its first token, and rows and columns from there on; what follows begins
max(r, c) behind that. A video has several such frames, whose times differ; what follows it begins
where it would behind one of them, as in transformers 5 (vLLM begins behind the largest time), but
in Qwen2.5-Omni behind its last time, too. So the positions of a request differ from the indices of
its tokens.

This module must not know how a step is made, nor what an image is besides its size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shmllm.models.rope_config import NUM_AXES
from shmllm.worker.arrays import FloatArray, LongArray


@dataclass(frozen=True, slots=True)
class PlacedGrid:
    """An image or a video of a request.

    Attributes:
        begin: the index of its first token.
        frames, rows, columns: how many of each its tokens have.
        interval: the difference of the times of two frames.
        factor: how many positions a unit of these is.
        moves_text: whether what follows begins behind the last time, too.
    """

    begin: int
    frames: int
    rows: int
    columns: int
    interval: float = 1.0
    factor: float = 1.0
    moves_text: bool = False

    @property
    def length(self) -> int:
        """How many positions it has on the longest of the axes that count for what follows."""
        sides = max(self.rows, self.columns)
        if not self.moves_text:
            return sides
        last = _times(np.array([self.frames - 1]), self.interval, self.factor)
        return max(sides, 1 + int(last[0]))


class Placed(Protocol):
    """The images of one request.

    Attributes:
        end: the index of the first token behind all of them.
        shift: the difference of position and index from there on.
    """

    @property
    def end(self) -> int: ...

    @property
    def shift(self) -> int: ...

    def place(self, positions: LongArray) -> LongArray:
        """Return the positions on the axes, (3, T) int64, of tokens with these indices, all before
        `end`."""


class PlacedPositions(ABC):
    """Knows the images of the request of each row, behind which text counts on.

    Args:
        num_rows: the largest number of requests that run at once.
    """

    def __init__(self, num_rows: int) -> None:
        self._placed: dict[int, Placed] = {}
        self._ends = np.zeros(num_rows, np.int64)
        self._shifts = np.zeros(num_rows, np.int64)

    @abstractmethod
    def _place(self, grids: Sequence[PlacedGrid], prompt: Sequence[int]) -> Placed:
        """Find the places of a request's images, which are at least one; see `update`."""

    def update(self, row: int, grids: Sequence[PlacedGrid], prompt: Sequence[int]) -> None:
        """Assign a row to a request.

        Args:
            row: the row.
            grids: the images and frames in its prompt, in their order.
            prompt: its token ids.
        """
        self._placed.pop(row, None)
        self._ends[row] = self._shifts[row] = 0
        if grids:
            placed = self._placed[row] = self._place(grids, prompt)
            self._ends[row], self._shifts[row] = placed.end, placed.shift

    def fill(self, rows: LongArray, positions: LongArray) -> LongArray:
        """Return the positions of tokens on the axes, (3, T) int64, not to be written: they may be
        a view of `positions`.

        Args:
            rows: (T,) int64, the row of each token.
            positions: (T,) int64, the index of each token in its request.
        """
        if not self._placed:
            return _alike(positions)
        behind = _alike(positions + self._shifts[rows])
        is_earlier = positions < self._ends[rows]
        if not is_earlier.any():
            return behind
        found = behind.copy()
        for row in np.unique(rows[is_earlier]).tolist():
            chosen = is_earlier & (rows == row)
            found[:, chosen] = self._placed[row].place(positions[chosen])
        return found


class RopePositions(PlacedPositions):
    """The positions that the module describes."""

    def _place(self, grids: Sequence[PlacedGrid], prompt: Sequence[int]) -> Placed:
        return _Grids.of(grids)


@dataclass(frozen=True, slots=True)
class _Grids:
    """The G images and videos of a request.

    Attributes:
        begins, ends: (G,) int64, the indices of their first tokens, and of those behind the last.
        starts: (G,) int64, their first positions.
        widths, sizes: (G,) int64, their numbers of columns, and of tokens of a frame.
        intervals, factors: (G,) float32, those of the times of frames.
        shifts: (G + 1,) int64, the difference of position and index of text behind that many.
    """

    begins: LongArray
    ends: LongArray
    starts: LongArray
    widths: LongArray
    sizes: LongArray
    intervals: FloatArray
    factors: FloatArray
    shifts: LongArray

    @classmethod
    def of(cls, grids: Sequence[PlacedGrid]) -> _Grids:
        begins, frames, heights, widths = np.array(
            [(each.begin, each.frames, each.rows, each.columns) for each in grids], np.int64
        ).T
        sizes = heights * widths
        lengths = np.array([each.length for each in grids], np.int64)
        shifts = np.append(0, np.cumsum(lengths - frames * sizes))
        return cls(
            begins,
            begins + frames * sizes,
            begins + shifts[:-1],
            widths,
            sizes,
            np.array([each.interval for each in grids], np.float32),
            np.array([each.factor for each in grids], np.float32),
            shifts,
        )

    @property
    def end(self) -> int:
        return int(self.ends[-1])

    @property
    def shift(self) -> int:
        return int(self.shifts[-1])

    def place(self, positions: LongArray) -> LongArray:
        """See `Placed`. Times are rounded as in transformers."""
        num_begun = np.searchsorted(self.begins, positions, side="right")
        grid = np.maximum(num_begun - 1, 0)
        is_inside = (num_begun > 0) & (positions < self.ends[grid])
        frames, places = np.divmod(positions - self.begins[grid], self.sizes[grid])
        rows, columns = np.divmod(places, self.widths[grid])
        times = _times(frames, self.intervals[grid], self.factors[grid])
        inside = self.starts[grid] + np.stack((times, rows, columns))
        return np.where(is_inside, inside, positions + self.shifts[num_begun])


def _times(
    frames: LongArray, intervals: FloatArray | float, factors: FloatArray | float
) -> LongArray:
    """Return the positions on the axis of time of frames, from that of the first one on. Products
    are rounded to float32, one after the other."""
    seconds = frames.astype(np.float32) * np.float32(intervals)
    return (seconds * np.float32(factors)).astype(np.int64)


def _alike(positions: LongArray) -> LongArray:
    return np.broadcast_to(positions, (NUM_AXES, len(positions)))
