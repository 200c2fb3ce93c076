"""Requests that wait for a row: fair between front ends, in order within one.

A front end with ten thousand queued requests must not hold up another that sends one: the
front ends take turns. Preempted requests go before all others, since their tokens so far
are paid for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator

from shmllm.core.request import Request


class WaitingQueue:
    """
    `next()` is the request whose turn it is; `pop()` takes it and passes the turn on.
    Requests of paused front ends keep their place and are passed over. Held requests are
    counted, and have no place until they are released.

    Attributes:
        paused: front ends whose requests may not be admitted now.
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
        """Take in a request that may not be admitted yet."""
        self._held.add(request)

    def release(self, request: Request) -> None:
        """Let a held request be admitted; it queues up now."""
        self._held.remove(request)
        self.add(request)

    def add_preempted(self, request: Request) -> None:
        """The latest one preempted was admitted before the earlier ones, so it goes first."""
        self._preempted.appendleft(request)
        self._size += 1

    def next(self, excluded: Container[int] = ()) -> Request | None:
        """The request to admit next; None if there is none that may be.

        Args:
            excluded: front ends that may not have one admitted now.
        """
        for request in self._preempted:
            if request.client not in self.paused and request.client not in excluded:
                return request
        for client in self._turns:
            if client not in self.paused and client not in excluded:
                return self._by_client[client][0]
        return None

    def pop(self, request: Request) -> None:
        """Take out what `next` returned; its front end's next turn comes after the others'."""
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
        """Take out any waiting request."""
        if request in self._held:
            self._held.remove(request)
        elif request in self._preempted:
            self._preempted.remove(request)
            self._size -= 1
        else:
            self._drop(request)

    def _drop(self, request: Request) -> None:
        queue = self._by_client[request.client]
        queue.remove(request)  # from the front in almost all cases
        self._size -= 1
        if not queue:
            del self._by_client[request.client]
            self._turns.remove(request.client)
