"""Wrappers around the ends of a ring that report each record to a watcher, for tracing.

A channel uses the wrappers only while it has a watcher, so a channel without one has no extra
cost. This module must not know the meaning of a record, nor what the watcher does.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, Protocol

from shmllm.ipc.ring import BytesLike, RingWriter, record_span
from shmllm.ipc.ring_reader import Decode, Handler, RingReader


class RecordWatcher(Protocol):
    """Gets a call for each record of a channel. Both ends of a ring identify a record by the
    same position, the end of the record. Times are on `time.perf_counter_ns()`."""

    def sent(self, kind: int, position: int, num_bytes: int, began_ns: int) -> None:
        """This end published a record; the write began at `began_ns`."""

    def received(self, kind: int, position: int, num_bytes: int, began_ns: int) -> None:
        """This end handled a record; the handler began at `began_ns` and has just ended."""


def watched_writing(writer: RingWriter, watcher: RecordWatcher) -> Callable[..., bool]:
    """A function like `writer.try_write` that reports each published record."""

    def try_write(kind: int, *parts: BytesLike) -> bool:
        began_ns = perf_counter_ns()
        if not writer.try_write(kind, *parts):
            return False
        num_bytes = sum(map(_num_bytes, parts))
        watcher.sent(kind, writer.position, num_bytes, began_ns)
        return True

    return try_write


def watched_draining(reader: RingReader, watcher: RecordWatcher) -> Callable[[Handler, int], int]:
    """A function like `reader.drain` that reports each handled record."""

    def drain(handler: Handler, limit: int = 0) -> int:
        def handle(kind: int, payload: memoryview) -> None:
            began_ns = perf_counter_ns()
            position, num_bytes = reader.position, len(payload)
            try:
                handler(kind, payload)
            finally:
                watcher.received(kind, position, num_bytes, began_ns)

        return reader.drain(handle, limit)

    return drain


def watched_receiving(
    reader: RingReader, watcher: RecordWatcher
) -> Callable[[Decode, Callable[[Any], None]], int]:
    """A function like `reader.receive` that reports each decoded record."""

    def receive(decode: Decode, release: Callable[[Any], None]) -> int:
        def watched(kind: int, payload: memoryview) -> Any:
            began_ns = perf_counter_ns()
            decoded = decode(kind, payload)
            end = reader.position + record_span(len(payload))
            watcher.received(kind, end, len(payload), began_ns)
            return decoded

        return reader.receive(watched, release)

    return receive


def _num_bytes(part: BytesLike) -> int:
    return len(part) if isinstance(part, bytes | bytearray) else part.nbytes
