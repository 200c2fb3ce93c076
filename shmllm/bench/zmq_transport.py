"""ZeroMQ as vLLM uses it: ROUTER to DEALER for requests, PUSH to PULL for outputs, over ipc://.

This module owns the sockets; it must not know the content of a message. Both ends block in the
socket. vLLM adds a thread and a queue on each side, and a frame with the message's type. This
transport leaves them out, in ZeroMQ's favour. The module is imported only where pyzmq is installed.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from shmllm.bench.loads import Parts
from shmllm.bench.transports import RECEIVE_TIMEOUT_S, Decode, Transport

zmq: Any = import_module("zmq")

CORE_IDENTITY = b"core"
NO_COPY = "nocopy"


class ZmqTransport:
    """One end: one socket to send, one socket to receive.

    Args:
        context: the ZeroMQ context of both sockets.
        outgoing: the socket to send on.
        incoming: the socket to receive from.
        envelope: frames before each message.
        copies: False passes buffers to ZeroMQ and reads its frames without a copy.
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

    def receive(self, decode: Decode) -> bytes:
        if self._copies:
            return decode(self._incoming.recv())
        return decode(self._incoming.recv(copy=False).buffer)

    def handshake(self) -> None:
        # A ROUTER drops messages to an unknown peer, so the core sends an empty message first.
        self._outgoing.recv_multipart()

    def close(self) -> None:
        self._context.destroy(linger=0)


def _socket(context: Any, kind: int) -> Any:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.setsockopt(zmq.RCVTIMEO, int(1000 * RECEIVE_TIMEOUT_S))
    return socket


def _addresses(directory: str) -> tuple[str, str]:
    return f"ipc://{Path(directory) / 'input'}", f"ipc://{Path(directory) / 'output'}"


def open_zmq(option: str, directory: str) -> tuple[Transport, tuple[Any, ...]]:
    """Opens the front end's end; also returns the handles for the core."""
    context = zmq.Context()
    router, pull = _socket(context, zmq.ROUTER), _socket(context, zmq.PULL)
    for socket, address in zip((router, pull), _addresses(directory), strict=True):
        socket.bind(address)
    transport = ZmqTransport(context, router, pull, (CORE_IDENTITY,), option != NO_COPY)
    return transport, (option, directory)


def attach_zmq(option: str, directory: str) -> Transport:
    """Opens the core's end."""
    context = zmq.Context()
    push, dealer = _socket(context, zmq.PUSH), _socket(context, zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, CORE_IDENTITY)
    for socket, address in zip((dealer, push), _addresses(directory), strict=True):
        socket.connect(address)
    dealer.send(b"")
    return ZmqTransport(context, push, dealer, (), option != NO_COPY)
