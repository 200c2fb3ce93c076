"""Links: what carries a message between the two processes of an arm.

Owns the interface and the arms of the standard library and faster-fifo. Must not know what
a message means. A link is opened by the front end, whose handles travel to the core when
it is spawned; the core opens its end from them.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from importlib import import_module
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, Protocol

from shmllm.bench.cases import MIB
from shmllm.bench.loads import Parts
from shmllm.ipc.ring import BytesLike

Take = Callable[[BytesLike], bytes]

PATIENCE_S = 60.0
FIFO_BYTES = 40 * MIB


class Transport(Protocol):
    """One end. Both calls wait: for room, for a message."""

    def send(self, parts: Parts) -> None:
        """Send one message of any size."""

    def receive(self, take: Take) -> bytes:
        """Give the next message to `take`, whose result comes back. It keeps no reference."""

    def greet(self) -> None:
        """Front end only, once the core is there: whatever has to happen before messages."""

    def close(self) -> None:
        """Let go of everything."""


class FdHandle:
    """A descriptor that goes along when a process is spawned.

    Args:
        fd: stays the caller's; the other process gets a duplicate.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _received_fd, (reduction.DupFd(self.fd),)


def _received_fd(duplicate: Any) -> FdHandle:
    return FdHandle(duplicate.detach())


class PipeLink:
    """`multiprocessing.Pipe`, with its calls for bytes, which pickle nothing."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    def send(self, parts: Parts) -> None:
        (message,) = parts
        self._connection.send_bytes(message)  # type: ignore[arg-type]

    def receive(self, take: Take) -> bytes:
        return take(self._connection.recv_bytes())

    def greet(self) -> None:
        pass

    def close(self) -> None:
        self._connection.close()


def open_pipe(option: str, directory: str) -> tuple[Transport, tuple[Any, ...]]:
    """The front end's end of a pipe, and what the core needs."""
    ours, theirs = multiprocessing.Pipe()
    return PipeLink(ours), (theirs,)


def attach_pipe(connection: Connection[Any, Any]) -> Transport:
    """The core's end of a pipe."""
    return PipeLink(connection)


class QueueLink:
    """A pair of queues: `multiprocessing.Queue` or faster-fifo's class of the same name."""

    def __init__(self, outgoing: Any, incoming: Any) -> None:
        self._outgoing = outgoing
        self._incoming = incoming

    def send(self, parts: Parts) -> None:
        (message,) = parts
        self._outgoing.put(message)

    def receive(self, take: Take) -> bytes:
        return take(self._incoming.get(timeout=PATIENCE_S))

    def greet(self) -> None:
        pass

    def close(self) -> None:
        self._outgoing.close()
        self._outgoing.join_thread()


def open_queue(option: str, directory: str) -> tuple[Transport, tuple[Any, ...]]:
    """The front end's end of two queues, and what the core needs."""
    queues: list[Any]
    if option == "faster-fifo":
        import_module("faster_fifo_reduction")
        fifo: Any = import_module("faster_fifo")
        queues = [fifo.Queue(max_size_bytes=FIFO_BYTES) for _ in range(2)]
    else:
        queues = [multiprocessing.get_context("spawn").Queue() for _ in range(2)]
    return QueueLink(queues[0], queues[1]), (queues[1], queues[0])


def attach_queue(outgoing: Any, incoming: Any) -> Transport:
    """The core's end of two queues."""
    return QueueLink(outgoing, incoming)
