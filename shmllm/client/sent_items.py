"""Which items an engine has from earlier requests of this front end, so that their data need not be
sent again.

The front end decides what the engine keeps: it names the identities that the engine may forget in
the records of other items. Records arrive in order, so it knows what the engine has. An exception
of a signal handler may come between any two statements, and nobody knows then whether the record
was sent. So an identity is in doubt from before its record is sent until it is counted, and from
before it is no longer counted until a record has named it: the engine never keeps an item for long
that is not counted, and it always has those that are.
"""

from __future__ import annotations

from collections import OrderedDict

from shmllm.params.items import Item


class SentItems:
    """
    Args:
        most_bytes: the most bytes of data that the engine keeps for this front end.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._in_doubt: dict[bytes, None] = {}

    def has(self, item: Item) -> bool:
        """Whether the engine has an item's data; if so, it was used now."""
        if item.identity not in self._sizes:
            return False
        self._sizes.move_to_end(item.identity)
        return True

    def make_room(self, item: Item) -> list[bytes]:
        """Forget items so that there is room for another one, before it is sent.

        Returns:
            The identities that the engine has to forget when it has the item; among them the
            item's own if it is too large to be kept.
        """
        size = item.data.nbytes
        excess = sum(self._sizes.values()) + size - self._most_bytes
        while self._sizes and excess > 0:
            identity = next(iter(self._sizes))
            self._in_doubt[identity] = None
            excess -= self._sizes.pop(identity)
        self._in_doubt[item.identity] = None
        is_kept = size <= self._most_bytes
        return [
            identity
            for identity in self._in_doubt
            if identity not in self._sizes and not (is_kept and identity == item.identity)
        ]

    def sent(self, item: Item) -> None:
        """Take note that an item for which `make_room` was called has been sent."""
        size = item.data.nbytes
        if size <= self._most_bytes:
            self._sizes[item.identity] = size
        self._in_doubt.clear()
