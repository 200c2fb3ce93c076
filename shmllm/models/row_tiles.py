"""Numbers of rows with which a function gives every row the same bits.

Owns the search for such numbers and the cutting of a batch into them. Must not know what is
computed. Libraries choose their kernels by the number of rows, and cut large arrays between
threads in the middle of a row: then a row's last bits depend on how many others came with it.
Among the numbers found here they do not, nor on the row's place, nor on what the others hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
REFERENCES = (16, 32, 64, 8, 4, 2, 1)
"""What all others are compared with: the first one that agrees with itself wherever it begins."""

MARGIN = 69
"""Rows behind the longest tile: room to begin it elsewhere, at odd places too."""

PADDING_LIMIT = 1.5
"""Rows are padded to the next number if that makes them at most this many times as many, and
else begin another tile."""

RowFunction = Callable[[Tensor], Tensor]
"""[rows, in] -> [rows, out], each row of the result made of one row."""


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits, NaN and signs of zero
    included."""
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread in this block: small steps do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def find_row_counts(function: RowFunction, rows: Tensor) -> tuple[int, ...]:
    """The numbers of rows that give each row the same bits, ascending, with one thread and with
    as many as are set; none if the function does not even agree with itself.

    Args:
        function: what will be called.
        rows: [rows, in]; should be numbers of which any difference in the order of additions
            shows. Numbers up to len(rows) - MARGIN are tried.
    """
    most = max(len(rows) - MARGIN, 1)
    for reference in REFERENCES:
        if reference > most:
            continue
        whole = len(rows) // reference * reference
        parts = [function(rows[i : i + reference]) for i in range(0, whole, reference)]
        expected = torch.cat(parts)
        found = [n for n in ROW_COUNTS if n <= most and _agrees(function, rows, expected, n)]
        if reference in found:
            return tuple(found)
    return ()


def _agrees(function: RowFunction, rows: Tensor, expected: Tensor, count: int) -> bool:
    def has_bits(place: int) -> bool:
        return same_bits(function(rows[place : place + count]), expected[place : place + count])

    if not all(has_bits(place) for place in (0, 5, len(expected) - count)):
        return False
    with one_thread():
        return has_bits(0)


class RowTiles:
    """The function for any number of rows, called with the given numbers alone.

    Args:
        function: gives the rows of a tile bits that depend on nothing but the row.
        counts: of rows, ascending, for which it does.
        padding_limit: as PADDING_LIMIT.
    """

    def __init__(
        self,
        function: RowFunction,
        counts: Sequence[int],
        padding_limit: float = PADDING_LIMIT,
    ) -> None:
        self._function = function
        self._counts = tuple(counts)
        self._padding_limit = padding_limit
        self._covers: dict[int, list[tuple[int, int]]] = {}

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        cover = self._covers.get(len(rows)) or self._cover(len(rows))
        if len(cover) == 1:
            return self._tile(rows, cover[0][1])
        parts, begin = [], 0
        for used, size in cover:
            parts.append(self._tile(rows[begin : begin + used], size))
            begin += used
        return torch.cat(parts)

    def _tile(self, rows: Tensor, size: int) -> Tensor:
        if len(rows) == size:
            return self._function(rows)
        # What the padding holds does not matter: no row depends on another.
        padded = rows.new_empty(size, rows.shape[1])
        padded[: len(rows)] = rows
        return self._function(padded)[: len(rows)]

    def _cover(self, num_rows: int) -> list[tuple[int, int]]:
        """(rows used, rows computed) of each tile."""
        cover, left = [], num_rows
        while left:
            above = [n for n in self._counts if n >= left]
            below = [n for n in self._counts if n <= left]
            if above and (above[0] <= self._padding_limit * left or not below):
                size = above[0]
            else:
                size = below[-1]
            cover.append((min(left, size), size))
            left -= cover[-1][0]
        self._covers[num_rows] = cover
        return cover
