"""Requests that wait for a row, under the policy "priority": the lowest value goes first, and
of equal values the one that arrived first, whichever front end it came from and whether or
not it was preempted before.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator

from shmllm.core.request import Request

Entry = tuple[int, int, Request]


def order(request: Request) -> tuple[int, int]:
    """Less means: goes first."""
    return request.priority, request.arrival


class PriorityQueue:
    """The same to the scheduler as `WaitingQueue`.

    Attributes:
        paused: front ends whose requests may not be admitted now.
    """

    def __init__(self) -> None:
        # One heap each, so that those of a paused front end are passed over at once.
        self._by_client: dict[int, list[Entry]] = {}
        self._gone: set[int] = set()
        self._held: set[Request] = set()
        self._size = 0
        self.paused: set[int] = set()

    def __len__(self) -> int:
        return self._size + len(self._held)

    def __iter__(self) -> Iterator[Request]:
        yield from self._held
        entries = [entry for heap in self._by_client.values() for entry in heap]
        yield from (entry[2] for entry in sorted(entries) if entry[1] not in self._gone)

    def add(self, request: Request) -> None:
        self._size += 1
        if request.arrival in self._gone:  # its old entry has not come to the top yet
            self._gone.remove(request.arrival)
            return
        heap = self._by_client.setdefault(request.client, [])
        heapq.heappush(heap, (*order(request), request))

    def hold(self, request: Request) -> None:
        """Take in a request that may not be admitted yet."""
        self._held.add(request)

    def release(self, request: Request) -> None:
        """Let a held request be admitted, in the place of its arrival."""
        self._held.remove(request)
        self.add(request)

    def add_preempted(self, request: Request) -> None:
        """It goes where it was before."""
        self.add(request)

    def next(self, excluded: Container[int] = ()) -> Request | None:
        """The request to admit next; None if there is none that may be."""
        heaps = (
            heap
            for client, heap in self._by_client.items()
            if client not in self.paused and client not in excluded
        )
        best = min((heap[0] for heap in heaps), default=None)
        return None if best is None else best[2]

    def pop(self, request: Request) -> None:
        """Take out what `next` returned."""
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Take out any waiting request."""
        if request in self._held:
            self._held.remove(request)
            return
        self._size -= 1
        self._gone.add(request.arrival)
        heap = self._by_client[request.client]
        # What is gone leaves its heap when it comes to the top, which is always one that waits.
        while heap and heap[0][1] in self._gone:
            self._gone.discard(heapq.heappop(heap)[1])
        if not heap:
            del self._by_client[request.client]
