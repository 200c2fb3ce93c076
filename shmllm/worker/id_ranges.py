"""Gives ranges of block ids to regions."""

from __future__ import annotations

from collections.abc import Sequence

from shmllm.shared_kv.layout import RegionLayout


class IdRanges:
    """
    Args:
        first: the first id.
        count: the number of ids.
    """

    def __init__(self, first: int, count: int) -> None:
        self._first, self._end = first, first + count
        self._taken: list[tuple[int, int]] = []

    def take(self, count: int) -> int | None:
        """Return the first of `count` ids that are free together; None: there are none."""
        begin = self._first
        for at, (first, end) in enumerate(self._taken):
            if first - begin >= count:
                self._taken.insert(at, (begin, begin + count))
                return begin
            begin = end
        if self._end - begin < count:
            return None
        self._taken.append((begin, begin + count))
        return begin

    def give_back(self, first: int) -> None:
        """Free the range that begins with an id."""
        self._taken = [each for each in self._taken if each[0] != first]


class RegionIds:
    """The ids of blocks of regions, which follow those of an engine's own blocks.

    Args:
        ranges: for each section the first id, and how many there are.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._ids = [IdRanges(*each) for each in ranges]

    def take(self, layout: RegionLayout) -> tuple[int, ...]:
        """Return for each section the id of its first block; 0 if it has no block.

        Raises:
            OSError: no ids are left.
        """
        firsts: list[int] = []
        for ids, section in zip(self._ids, layout.sections, strict=True):
            first = ids.take(section.num_blocks) if section.num_blocks else 0
            if first is None:
                self.give_back(firsts)
                raise OSError(0, "no block ids are left")
            firsts.append(first)
        return tuple(firsts)

    def give_back(self, firsts: Sequence[int]) -> None:
        """Free what `take` returned, or the beginning of it."""
        for ids, first in zip(self._ids, firsts, strict=False):
            ids.give_back(first)
