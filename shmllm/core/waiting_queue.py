"""The queue of waiting requests under the policy "fcfs".

The requests of one front end are served in the order of their arrival. Front ends are served round
robin, so that one with ten thousand queued requests does not delay another one's single request.
Preempted requests are served before all others, because their tokens have been computed once.
Requests whose adapter has no room are passed over, but not for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from itertools import chain

from shmllm.core.request import Request

MOST_PASSED = 1024
"""A request that is passed over because its adapter has no room lets no request pass that arrived
so many requests after it: then the adapters in use become fewer."""


def by_arrival(request: Request) -> int:
    return request.arrival


class WaitingQueue:
    """The queue of waiting requests.

    `next` finds the request to admit next, and `pop` removes it. `next` skips the requests of
    paused front ends; they keep their places. A held request counts as waiting, but it has no place
    in the queue until it is released.

    Attributes:
        paused: the front ends whose requests must not be admitted now.
    """

    def __init__(self) -> None:
        self._preempted: deque[Request] = deque()
        # The requests of each adapter have a queue of their own, so that `next` can skip them.
        self._by_client: dict[int, dict[int, deque[Request]]] = {}
        self._turns: deque[int] = deque()
        self.paused: set[int] = set()
        self._held: set[Request] = set()
        self._size = 0

    def __len__(self) -> int:
        return self._size + len(self._held)

    def __iter__(self) -> Iterator[Request]:
        yield from self._held
        yield from self._preempted
        for client in self._turns:
            queues = self._by_client[client].values()
            yield from sorted(chain.from_iterable(queues), key=by_arrival)

    def add(self, request: Request) -> None:
        queues = self._by_client.get(request.client)
        if queues is None:
            queues = self._by_client[request.client] = {}
            self._turns.append(request.client)
        queues.setdefault(request.lora_id, deque()).append(request)
        self._size += 1

    def hold(self, request: Request) -> None:
        """Add a request that must not be admitted before `release`."""
        self._held.add(request)

    def release(self, request: Request) -> None:
        """Append a held request to the queue."""
        self._held.remove(request)
        self.add(request)

    def add_preempted(self, request: Request) -> None:
        """Add a preempted request before all others. The scheduler preempts requests in the
        reverse order of their admission, so this restores that order."""
        self._preempted.appendleft(request)
        self._size += 1

    def next(
        self, excluded: Container[int] = (), adapters: Container[int] | None = None
    ) -> Request | None:
        """The request to admit next; None if no request may be admitted.

        Args:
            excluded: more front ends whose requests must not be admitted now.
            adapters: the adapters that have room; None: all have.
        """
        last = None if adapters is None else self._last_that_passes(excluded, adapters)
        for request in chain(self._preempted, self._heads(excluded, adapters)):
            if self._may_be_admitted(request, excluded, adapters):
                return request if last is None or request.arrival <= last else None
        return None

    def _may_be_admitted(
        self, request: Request, excluded: Container[int], adapters: Container[int] | None
    ) -> bool:
        is_served = request.client not in self.paused and request.client not in excluded
        return is_served and (adapters is None or request.lora_id in adapters)

    def _heads(
        self, excluded: Container[int], adapters: Container[int] | None
    ) -> Iterator[Request]:
        """The first request of each front end that has one with an adapter that has room."""
        for client in self._turns:
            if client in self.paused or client in excluded:
                continue
            queues = self._by_client[client].items()
            heads = [q[0] for lora, q in queues if adapters is None or lora in adapters]
            if heads:
                yield min(heads, key=by_arrival)

    def _last_that_passes(self, excluded: Container[int], adapters: Container[int]) -> int | None:
        """The arrival of the last request that may pass those whose adapter has no room; None if
        there are none of these."""
        heads = (queue[0] for queues in self._by_client.values() for queue in queues.values())
        passed = [
            request.arrival
            for request in chain(self._preempted, heads)
            if request.lora_id not in adapters and self._may_be_admitted(request, excluded, None)
        ]
        return min(passed) + MOST_PASSED if passed else None

    def pop(self, request: Request) -> None:
        """Remove the request that `next` returned. Its front end's turn ends, unless the request
        was a preempted one."""
        if request in self._preempted:
            self._preempted.remove(request)
            self._size -= 1
            return
        client = request.client
        self._drop(request)
        if client in self._by_client:
            self._turns.remove(client)
            self._turns.append(client)

    def remove(self, request: Request) -> None:
        """Remove any waiting request."""
        if request in self._held:
            self._held.remove(request)
        elif request in self._preempted:
            self._preempted.remove(request)
            self._size -= 1
        else:
            self._drop(request)

    def _drop(self, request: Request) -> None:
        queues = self._by_client[request.client]
        queue = queues[request.lora_id]
        queue.remove(request)  # almost always the first one, so the linear search is short
        self._size -= 1
        if not queue:
            del queues[request.lora_id]
        if not queues:
            del self._by_client[request.client]
            self._turns.remove(request.client)
