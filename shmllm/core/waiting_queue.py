"""The queue of waiting requests under the policy "fcfs".

The requests of one front end are served in the order of their arrival. Front ends are served round
robin, so that one with ten thousand queued requests does not delay another one's single request.
Preempted requests are served before all others, because their tokens have been computed once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator

from shmllm.core.request import Request


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
        self._by_client: dict[int, deque[Request]] = {}
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
            yield from self._by_client[client]

    def add(self, request: Request) -> None:
        queue = self._by_client.get(request.client)
        if queue is None:
            queue = self._by_client[request.client] = deque()
            self._turns.append(request.client)
        queue.append(request)
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

    def next(self, excluded: Container[int] = ()) -> Request | None:
        """The request to admit next; None if no request may be admitted.

        Args:
            excluded: more front ends whose requests must not be admitted now.
        """
        for request in self._preempted:
            if request.client not in self.paused and request.client not in excluded:
                return request
        for client in self._turns:
            if client not in self.paused and client not in excluded:
                return self._by_client[client][0]
        return None

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
        queue = self._by_client[request.client]
        queue.remove(request)  # almost always the first one, so the linear search is short
        self._size -= 1
        if not queue:
            del self._by_client[request.client]
            self._turns.remove(request.client)
