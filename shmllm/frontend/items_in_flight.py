"""How many bytes the items of unfinished requests have: what bounds the requests of a stream.

Front end and engine keep the items of requests that wait. Requests with the same item keep it
once.
"""

from __future__ import annotations

from collections.abc import Iterable

from shmllm.params.items import Item

MOST_BYTES = 2**28
"""The bytes with which no further prompts are read. A model that gets 10 MB of an item would
otherwise need gigabytes for the usual number of requests in flight."""


class ItemsInFlight:
    """
    Attributes:
        num_bytes: of all items of the requests.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._of_requests: dict[int, tuple[Item, ...]] = {}
        self._users: dict[bytes, int] = {}

    @property
    def is_full(self) -> bool:
        """Whether further requests should wait."""
        return self.num_bytes >= MOST_BYTES

    def add(self, index: int, items: tuple[Item, ...]) -> None:
        """Add a request.

        Args:
            index: its number.
            items: its items, perhaps none.
        """
        if items:
            self._of_requests[index] = items
            self._count(items, 1)

    def remove(self, index: int) -> None:
        """Remove a request, if it was added."""
        self._count(self._of_requests.pop(index, ()), -1)

    def _count(self, items: Iterable[Item], change: int) -> None:
        for item in items:
            before = self._users.get(item.identity, 0)
            after = before + change
            self.num_bytes += item.data.nbytes * ((after > 0) - (before > 0))
            self._users[item.identity] = after
            if not after:
                del self._users[item.identity]
