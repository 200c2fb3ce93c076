"""Which items an engine has from earlier requests of this front end, so that their pixels need not
be sent again.

The front end decides what the engine keeps: it names the identities that the engine may forget in
the records of other items. Records arrive in order, so it knows what the engine has. An exception
of a signal handler may come between any two statements; then the engine may keep an item that this
module no longer counts, but never the other way round.
"""

from __future__ import annotations

from collections import OrderedDict

from shmllm.params.items import Item


class SentItems:
    """
    Args:
        most_bytes: the most bytes of pixels that the engine keeps for this front end.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._num_bytes = 0

    def has(self, item: Item) -> bool:
        """Whether the engine has an item's pixels; if so, it was used now."""
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
        size = item.pixels.nbytes
        forgotten: list[bytes] = []
        while self._sizes and self._num_bytes + size > self._most_bytes:
            identity, other = self._sizes.popitem(last=False)
            self._num_bytes -= other
            forgotten.append(identity)
        return forgotten if size <= self._most_bytes else [*forgotten, item.identity]

    def sent(self, item: Item) -> None:
        """Take note that an item for which `make_room` was called has been sent."""
        size = item.pixels.nbytes
        if size <= self._most_bytes:
            self._sizes[item.identity] = size
            self._num_bytes += size
