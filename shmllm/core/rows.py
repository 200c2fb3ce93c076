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
        self._used: list[tuple[int, int]] = []
        self._num_reserved = 0
        self._held: Counter[int] = Counter()
        self._left: list[int] = []

    @property
    def free(self) -> Sequence[int]:
        """The rows that a request can take."""
        return self._free

    @property
    def unused(self) -> Sequence[int]:
        """The rows that belong to no request."""
        return [*self._free, *(row for row, _ in self._used)]

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

    def give_back(self, row: int, client: int, last_step: int | None = None) -> None:
        """Take the row of a front end's request back.

        Args:
            row: the row.
            client: the front end.
            last_step: the last step that uses the row, which is free after `release` of that
                step; None: it is free now.
        """
        if last_step is None:
            self._set_free(row)
        else:
            self._used.append((row, last_step))
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]

    def release(self, step: int) -> None:
        """Free the rows that no step behind this one uses."""
        used, self._used = self._used, []
        for row, last_step in used:
            if last_step > step:
                self._used.append((row, last_step))
            else:
                self._set_free(row)

    def _set_free(self, row: int) -> None:
        self._free.append(row)
        self._left.append(row)

    def take_left(self) -> list[int]:
        """The rows that became free since the last call."""
        left, self._left = self._left, []
        return left
