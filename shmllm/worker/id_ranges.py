"""Gives ranges of block ids to regions."""

from __future__ import annotations


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
