"""Transports: how a message gets from one process of a variant's pair to the other.

This module owns the interface and the transports of the standard library and faster-fifo. It must
not know the content of a message. The front end opens a transport; its handles travel to the core
when the front end spawns the core; the core opens its own end from these handles.
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

Decode = Callable[[BytesLike], bytes]

RECEIVE_TIMEOUT_S = 60.0
FIFO_BYTES = 40 * MIB


class Transport(Protocol):
    """One end of a transport. `send` and `receive` block until they can proceed."""

    def send(self, parts: Parts) -> None:
        """Sends one message of any size."""

    def receive(self, decode: Decode) -> bytes:
        """Passes the next message to `decode`, which must not keep a reference to it.

        Returns:
            The result of `decode`.
        """

    def handshake(self) -> None:
        """Completes the connection. Only the front end calls this, before the first message."""

    def close(self) -> None:
        """Releases all resources."""


class FdHandle:
    """A file descriptor that can be passed to a process when it is spawned.

    Args:
        fd: the descriptor; the caller keeps it, and the other process gets a duplicate.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _received_fd, (reduction.DupFd(self.fd),)


def _received_fd(duplicate: Any) -> FdHandle:
    return FdHandle(duplicate.detach())


class PipeTransport:
    """`multiprocessing.Pipe` with its calls for bytes, which use no pickle."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    def send(self, parts: Parts) -> None:
        (message,) = parts
        self._connection.send_bytes(message)  # type: ignore[arg-type]

    def receive(self, decode: Decode) -> bytes:
        return decode(self._connection.recv_bytes())

    def handshake(self) -> None:
        pass

    def close(self) -> None:
        self._connection.close()


def open_pipe(option: str, directory: str) -> tuple[Transport, tuple[Any, ...]]:
    """Opens the front end's end of a pipe; also returns the handles for the core."""
    ours, theirs = multiprocessing.Pipe()
    return PipeTransport(ours), (theirs,)


def attach_pipe(connection: Connection[Any, Any]) -> Transport:
    """Opens the core's end of a pipe."""
    return PipeTransport(connection)


class QueueTransport:
    """A pair of queues: `multiprocessing.Queue` or faster-fifo's class of the same name."""

    def __init__(self, outgoing: Any, incoming: Any) -> None:
        self._outgoing = outgoing
        self._incoming = incoming

    def send(self, parts: Parts) -> None:
        (message,) = parts
        self._outgoing.put(message)

    def receive(self, decode: Decode) -> bytes:
        return decode(self._incoming.get(timeout=RECEIVE_TIMEOUT_S))

    def handshake(self) -> None:
        pass

    def close(self) -> None:
        self._outgoing.close()
        self._outgoing.join_thread()


def open_queue(option: str, directory: str) -> tuple[Transport, tuple[Any, ...]]:
    """Opens the front end's end of two queues; also returns the handles for the core."""
    queues: list[Any]
    if option == "faster-fifo":
        import_module("faster_fifo_reduction")
        fifo: Any = import_module("faster_fifo")
        queues = [fifo.Queue(max_size_bytes=FIFO_BYTES) for _ in range(2)]
    else:
        queues = [multiprocessing.get_context("spawn").Queue() for _ in range(2)]
    return QueueTransport(queues[0], queues[1]), (queues[1], queues[0])


def attach_queue(outgoing: Any, incoming: Any) -> Transport:
    """Opens the core's end of two queues."""
    return QueueTransport(outgoing, incoming)
