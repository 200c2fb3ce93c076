"""Keys and values of the running requests, each request's in one piece.

The blocks of the paged cache (`attention`) are the truth; a slab is a copy of one request's
blocks in which its tokens lie one behind the other, so that attention reads a view where it
would otherwise gather blocks in every step. A row has a place of its own in a mapping that
is as large as all rows at full length would need. The kernel gives pages only for what was
touched, and `cover` keeps those within a budget: a row that finds no room is not covered,
and attention gathers its blocks.

Owns that memory and which tokens lie in it. Must not know blocks, nor how attention works.
"""

from __future__ import annotations

import math
import mmap

import numpy as np
import numpy.typing as npt
import torch

from shmllm.models.config import ModelConfig
from shmllm.worker.arrays import LongArray

GROWTH = 32
"""Tokens by which a row's room grows."""

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class Slabs:
    """
    Args:
        config: layers, heads and dimensions.
        dtype: of keys and values.
        num_rows: requests that can run at once.
        max_model_len: tokens per request.
        num_bytes: the most that pages may take; 0 for no slabs at all.

    Attributes:
        keys: one per layer, (rows, kv heads, capacity, dim).
        values: as `keys`.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        num_rows: int,
        max_model_len: int,
        num_bytes: int,
    ) -> None:
        heads, dim = config.num_kv_heads, config.head_dim
        # Whole pages, so that a row can be given back, and an odd number of them, since rows
        # at a distance of a power of two would compete for the same places of the CPU's cache.
        page = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, dim * dtype.itemsize)
        self.capacity = (-(-(max_model_len + GROWTH) // page) // 2 * 2 + 1) * page
        self._row_bytes = heads * self.capacity * dim * dtype.itemsize
        self._halves = 2 * config.num_layers
        self._num_rows = num_rows
        self._budget = num_bytes // (self._halves * heads * dim * dtype.itemsize)
        self._pages = self._map() if self._budget else None
        shape = (config.num_layers, 2, num_rows, heads, self.capacity, dim)
        if self._pages is None:
            self._budget = 0
            shape = (config.num_layers, 2, 0, heads, self.capacity, dim)
            memory = torch.empty(shape, dtype=dtype)
        else:
            memory = torch.frombuffer(self._pages, dtype=dtype).view(shape)
        self.keys = [layer[0] for layer in memory]
        self.values = [layer[1] for layer in memory]
        self._bytes_per_token = self._halves * heads * dim * dtype.itemsize
        self._room: LongArray = np.zeros(num_rows, np.int64)
        self._held: LongArray = np.zeros(num_rows, np.int64)

    def _map(self) -> mmap.mmap | None:
        """The mapping, or None where the system does not lend addresses so generously."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            pages = mmap.mmap(-1, self._halves * self._num_rows * self._row_bytes, flags=flags)
            # A huge page would hold 512 times what a short request needs of it.
            pages.madvise(mmap.MADV_NOHUGEPAGE)
        except (OSError, OverflowError):
            return None
        return pages

    @property
    def resident_bytes(self) -> int:
        """Pages that were touched."""
        return int(self._room.sum()) * self._bytes_per_token

    def cover(
        self, rows: LongArray, starts: LongArray, ends: LongArray, fresh_rows: LongArray
    ) -> tuple[npt.NDArray[np.bool_], list[tuple[int, int, int]]]:
        """Make room for what a step adds to some rows.

        Args:
            rows: (S,) different ones.
            starts: (S,) tokens that each had before the step.
            ends: (S,) tokens that each has after it.
            fresh_rows: rows that have another request than in the last step.

        Returns:
            (S,) which rows are covered, and the (index, begin, end) of older tokens that those
            lack and the caller has to copy.
        """
        if not self._budget:
            return np.zeros(len(rows), np.bool_), []
        self._held[fresh_rows] = 0
        if (ends > self._room[rows]).any():
            self._make_room(rows, ends)
        is_covered = ends <= self._room[rows]
        held = self._held[rows]
        lacking = np.flatnonzero(is_covered & (held < starts))
        self._held[rows] = np.where(is_covered, ends, 0)
        missing = [(int(i), int(held[i]), int(starts[i])) for i in lacking]
        return is_covered, missing

    def advance(self, rows: LongArray, is_covered: npt.NDArray[np.bool_]) -> None:
        """As `cover`, where these rows were in the last step, too, with one token less each,
        and have room for another one."""
        self._held[rows] += is_covered

    def room(self, rows: LongArray) -> LongArray:
        """Tokens that each has pages for."""
        return self._room[rows]

    def release(self) -> None:
        """Give all pages back; nothing is held any more."""
        self._room[:] = 0
        self._held[:] = 0
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)

    def _make_room(self, rows: LongArray, ends: LongArray) -> None:
        """Grow rows within the budget, first those that come first; those that stay too small
        give back what they have, and so do rows that are not in this step if that helps."""
        wanted = np.maximum(self._room[rows], -(-ends // GROWTH) * GROWTH)
        if wanted.sum() > self._budget - (self._room.sum() - self._room[rows].sum()):
            idle = np.setdiff1d(np.flatnonzero(self._room), rows)
            self._give_back(idle)
        fits = np.cumsum(wanted) <= self._budget
        self._give_back(rows[~fits])
        self._room[rows[fits]] = wanted[fits]

    def _give_back(self, rows: LongArray) -> None:
        assert self._pages is not None
        for row in rows[self._room[rows] > 0].tolist():
            for half in range(self._halves):
                offset = (half * self._num_rows + row) * self._row_bytes
                self._pages.madvise(mmap.MADV_DONTNEED, offset, self._row_bytes)
        self._room[rows] = 0
        self._held[rows] = 0
