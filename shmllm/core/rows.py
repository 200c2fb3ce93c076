"""The rows of the running requests, and how many of them each front end holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

RESERVED_FRACTION = 8


class Rows:
    """
    Args:
        count: the largest number of running requests.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count - 1, -1, -1))
        self._num_reserved = 0
        self._held: Counter[int] = Counter()
        self._left: list[int] = []

    @property
    def free(self) -> Sequence[int]:
        """The rows that belong to no request."""
        return self._free

    def share(self, is_shared: bool) -> None:
        """Reserve a part of the rows for front ends that hold none, if there are several.

        Otherwise one front end could fill all rows with a large batch, and another one's request
        would wait until requests of that batch end.
        """
        self._num_reserved = self._count // RESERVED_FRACTION if is_shared else 0

    def clients_with_enough(self) -> Container[int]:
        """The front ends that get no more rows for now."""
        return self._held if len(self._free) <= self._num_reserved else ()

    def take(self, client: int) -> int:
        """Give a free row to a request of a front end."""
        self._held[client] += 1
        return self._free.pop()

    def give_back(self, row: int, client: int) -> None:
        """Free the row of a front end's request."""
        self._free.append(row)
        self._left.append(row)
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]

    def take_left(self) -> list[int]:
        """The rows that were given back since the last call."""
        left, self._left = self._left, []
        return left
