"""ZeroMQ as vLLM uses it: ROUTER to DEALER for requests, PUSH to PULL for outputs, ipc://.

Owns the sockets; must not know what a message means. Both ends block in the socket. vLLM
adds a thread and a queue on both sides and a frame with the message's type, which are left
out here, in ZeroMQ's favour. Only imported where pyzmq is installed.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from shmllm.bench.loads import Parts
from shmllm.bench.transports import PATIENCE_S, Take, Transport

zmq: Any = import_module("zmq")

CORE_IDENTITY = b"core"
NO_COPY = "nocopy"


class ZmqLink:
    """One end: a socket out, a socket in.

    Args:
        context: owns the sockets.
        outgoing: to send on.
        incoming: to receive from.
        envelope: frames in front of each message.
        copies: False hands buffers to ZeroMQ and takes its frames, both without copying.
    """

    def __init__(
        self,
        context: Any,
        outgoing: Any,
        incoming: Any,
        envelope: tuple[bytes, ...],
        copies: bool,
    ) -> None:
        self._context = context
        self._outgoing = outgoing
        self._incoming = incoming
        self._envelope = envelope
        self._copies = copies

    def send(self, parts: Parts) -> None:
        if self._envelope:
            self._outgoing.send_multipart((*self._envelope, *parts), copy=self._copies)
        else:
            self._outgoing.send(parts[0], copy=self._copies)

    def receive(self, take: Take) -> bytes:
        if self._copies:
            return take(self._incoming.recv())
        return take(self._incoming.recv(copy=False).buffer)

    def greet(self) -> None:
        # A ROUTER drops what it cannot route yet, so the core announces itself first.
        self._outgoing.recv_multipart()

    def close(self) -> None:
        self._context.destroy(linger=0)


def _socket(context: Any, kind: int) -> Any:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
    return socket


def _addresses(directory: str) -> tuple[str, str]:
    return f"ipc://{Path(directory) / 'input'}", f"ipc://{Path(directory) / 'output'}"


def open_zmq(option: str, directory: str) -> tuple[Transport, tuple[Any, ...]]:
    """The front end's end, and what the core needs."""
    context = zmq.Context()
    router, pull = _socket(context, zmq.ROUTER), _socket(context, zmq.PULL)
    for socket, address in zip((router, pull), _addresses(directory), strict=True):
        socket.bind(address)
    transport = ZmqLink(context, router, pull, (CORE_IDENTITY,), option != NO_COPY)
    return transport, (option, directory)


def attach_zmq(option: str, directory: str) -> Transport:
    """The core's end."""
    context = zmq.Context()
    push, dealer = _socket(context, zmq.PUSH), _socket(context, zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, CORE_IDENTITY)
    for socket, address in zip((dealer, push), _addresses(directory), strict=True):
        socket.connect(address)
    dealer.send(b"")
    return ZmqLink(context, push, dealer, (), option != NO_COPY)
