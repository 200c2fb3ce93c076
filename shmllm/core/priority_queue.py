"""The queue of waiting requests under the policy "priority".

The request with the lowest priority value is served first; of equal values, the one that arrived
first. Front ends and preemptions make no difference. Requests whose adapter has no room are passed
over, by any number of others: their priority says whether that may last.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator

from shmllm.core.request import Request

Entry = tuple[int, int, Request]


def sort_key(request: Request) -> tuple[int, int]:
    """The sort key of a request: the smaller key is served first."""
    return request.priority, request.arrival


class PriorityQueue:
    """The queue of waiting requests, with the same interface as `WaitingQueue`.

    Attributes:
        paused: the front ends whose requests must not be admitted now.
    """

    def __init__(self) -> None:
        # One heap for each front end and adapter, so that `next` can skip them as a whole.
        self._heaps: dict[tuple[int, int], list[Entry]] = {}
        # The arrivals of requests that were removed, but whose entries are still in a heap.
        self._removed: set[int] = set()
        self._held: set[Request] = set()
        self._size = 0
        self.paused: set[int] = set()

    def __len__(self) -> int:
        return self._size + len(self._held)

    def __iter__(self) -> Iterator[Request]:
        yield from self._held
        entries = [entry for heap in self._heaps.values() for entry in heap]
        yield from (entry[2] for entry in sorted(entries) if entry[1] not in self._removed)

    def add(self, request: Request) -> None:
        self._size += 1
        if request.arrival in self._removed:  # its old entry is still in the heap
            self._removed.remove(request.arrival)
            return
        heap = self._heaps.setdefault((request.client, request.lora_id), [])
        heapq.heappush(heap, (*sort_key(request), request))

    def hold(self, request: Request) -> None:
        """Add a request that must not be admitted before `release`."""
        self._held.add(request)

    def release(self, request: Request) -> None:
        """Queue a held request, at the place that its priority and arrival give it."""
        self._held.remove(request)
        self.add(request)

    def add_preempted(self, request: Request) -> None:
        """Queue a preempted request, at the place that it had before."""
        self.add(request)

    def next(
        self, excluded: Container[int] = (), adapters: Container[int] | None = None
    ) -> Request | None:
        """The request to admit next; None if no request may be admitted.

        Args:
            excluded: more front ends whose requests must not be admitted now.
            adapters: the adapters that have room; None: all have.
        """
        heaps = (
            heap
            for (client, lora_id), heap in self._heaps.items()
            if client not in self.paused
            and client not in excluded
            and (adapters is None or lora_id in adapters)
        )
        best = min((heap[0] for heap in heaps), default=None)
        return None if best is None else best[2]

    def pop(self, request: Request) -> None:
        """Remove the request that `next` returned."""
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Remove any waiting request."""
        if request in self._held:
            self._held.remove(request)
            return
        self._size -= 1
        self._removed.add(request.arrival)
        key = request.client, request.lora_id
        heap = self._heaps[key]
        # A removed entry stays in its heap until it comes to the top, so that the top is always a
        # waiting request.
        while heap and heap[0][1] in self._removed:
            self._removed.discard(heapq.heappop(heap)[1])
        if not heap:
            del self._heaps[key]
