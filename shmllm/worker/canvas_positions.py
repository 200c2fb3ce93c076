"""The positions of tokens on three axes, time, row and column, in models whose images have detailed
slices (MiniCPM-V 4.7).

A picture is the whole image and perhaps slices of it, between marks. All of its tokens have the
time of its origin. Slices lie on a canvas as they do in the image, and the whole is stretched over
all of it; without slices the canvas is the whole. Marks lie at the corners of what they begin or
end, and at the ends of rows of slices. What follows begins behind the longer side of the canvas.

A position depends on the picture's identity and on tokens before it, so that tokens with equal
ones have equal positions. This module must not know how a step is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from shmllm.models.vision.canvas import CanvasMarks
from shmllm.worker.arrays import LongArray
from shmllm.worker.rope_positions import PlacedGrid, PlacedPositions

_BETWEEN = 2
"""The marks between two slices of a row."""


@dataclass(slots=True)
class _Picture:
    """
    Attributes:
        whole: the whole image.
        slices: its slices, row by row.
    """

    whole: PlacedGrid
    slices: list[PlacedGrid] = field(default_factory=list)

    @property
    def columns(self) -> int:
        """The number of slices in a row: the first gap that is wider than others ends one."""
        count = len(self.slices)
        gaps = (b.begin - _end_of(a) for a, b in pairwise(self.slices))
        columns = next((n for n, gap in enumerate(gaps, 1) if gap > _BETWEEN), count)
        return columns if columns and count % columns == 0 else count

    @property
    def canvas(self) -> tuple[int, int]:
        """Its rows and columns."""
        if not self.slices:
            return self.whole.rows, self.whole.columns
        first, columns = self.slices[0], self.columns
        return len(self.slices) // columns * first.rows, columns * first.columns


class _Canvases(NamedTuple):
    """The pictures of a request.

    Attributes:
        positions: (3, end) int64, the positions of all tokens up to the end of the last one.
        behind: the position of the token behind it.
    """

    positions: LongArray
    behind: int

    @property
    def end(self) -> int:
        return int(self.positions.shape[1])

    @property
    def shift(self) -> int:
        return self.behind - self.end

    def place(self, positions: LongArray) -> LongArray:
        """See `rope_positions.Placed`."""
        return self.positions[:, positions]


class CanvasPositions(PlacedPositions):
    """The positions that the module describes.

    Args:
        num_rows: the largest number of requests that run at once.
        marks: the tokens around images and slices.
    """

    def __init__(self, num_rows: int, marks: CanvasMarks) -> None:
        super().__init__(num_rows)
        self._marks = marks

    def _place(self, grids: Sequence[PlacedGrid], prompt: Sequence[int]) -> _Canvases:
        found = np.zeros((3, len(prompt)), np.int64)
        end = position = 0
        for picture in self._pictures(grids, prompt):
            begin = max(picture.whole.begin - 1, 0)
            if begin > end:  # text before it
                found[:, end:begin] = np.arange(position, position + begin - end)
                position += begin - end
            end = self._end_of(picture, prompt)
            _place_picture(picture, position, found[:, :end], begin)
            position += max(picture.canvas) + 1
        if end == len(prompt):
            position = int(found.max()) + 1
        return _Canvases(found[:, :end], position)

    def _pictures(self, grids: Sequence[PlacedGrid], prompt: Sequence[int]) -> Iterator[_Picture]:
        picture: _Picture | None = None
        for grid in grids:
            if picture and grid.begin and prompt[grid.begin - 1] == self._marks.slice_begin:
                picture.slices.append(grid)
                continue
            if picture:
                yield picture
            picture = _Picture(grid)
        if picture:
            yield picture

    def _end_of(self, picture: _Picture, prompt: Sequence[int]) -> int:
        """The index of the token behind a picture, and behind all marks that follow it."""
        end = _end_of(picture.slices[-1] if picture.slices else picture.whole)
        while end < len(prompt) and prompt[end] in self._marks:
            end += 1
        return end


def _end_of(grid: PlacedGrid) -> int:
    return grid.begin + grid.rows * grid.columns


def _place_picture(picture: _Picture, origin: int, found: LongArray, begin: int) -> None:
    """Write the positions of a picture.

    Args:
        picture: the picture.
        origin: its first position.
        found: (3, T), those of all tokens up to its end.
        begin: the index of the mark before it.
    """
    whole, (rows, columns), end = picture.whole, picture.canvas, found.shape[1]
    found[:, begin:] = origin
    found[1:, begin] = max(origin - 1, 0)
    if (behind := _end_of(whole)) < end:
        found[1:, behind] = origin + rows, origin + columns
    _place_grid(whole, _spread(rows, whole.rows), _spread(columns, whole.columns), origin, found)
    if not picture.slices:
        return
    first, per_row = picture.slices[0], picture.columns
    for number, each in enumerate(picture.slices):
        above, left = number // per_row * first.rows, number % per_row * first.columns
        found[1:, each.begin - 1] = origin + above, origin + left
        if (behind := _end_of(each)) < end:
            found[1:, behind] = origin + above + each.rows - 1, origin + left + each.columns - 1
        down, right = above + np.arange(each.rows), left + np.arange(each.columns)
        _place_grid(each, down, right, origin, found)
    for number, (each, following) in enumerate(pairwise(picture.slices)):
        bottom = (number // per_row + 1) * first.rows - 1
        between = slice(_end_of(each) + 1, following.begin - 1)
        found[1, between], found[2, between] = origin + bottom, origin + columns


def _place_grid(
    grid: PlacedGrid, rows: LongArray, columns: LongArray, origin: int, found: LongArray
) -> None:
    """Write the positions of tokens at these rows and columns of a canvas."""
    places = slice(grid.begin, _end_of(grid))
    found[0, places] = origin
    found[1, places] = origin + np.repeat(rows, grid.columns)
    found[2, places] = origin + np.tile(columns, grid.rows)


def _spread(length: int, count: int) -> LongArray:
    """Return so many places that lie evenly, from 0 to length - 1. They are computed as in
    transformers: numpy's rounding differs."""
    found: LongArray = torch.linspace(0, length - 1, count).round().long().numpy()
    return found
