"""Channels whose records somebody watches: tracing.

Owns what stands in front of a ring's two ends meanwhile, so that a channel that nobody
watches costs nothing. Must not know what a record means or what the watcher does.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Protocol

from shmllm.ipc.ring import BytesLike, Handler, RingReader, RingWriter


class RecordWatcher(Protocol):
    """Hears of each record of a channel. Both ends of a ring call the same record by the
    same position: the one behind it."""

    def sent(self, kind: int, position: int, num_bytes: int, began_ns: int) -> None:
        """A record was published, by work that began at `began_ns`."""

    def received(self, kind: int, position: int, num_bytes: int, began_ns: int) -> None:
        """A record was handled, from `began_ns` until now."""


def watched_writing(writer: RingWriter, watcher: RecordWatcher) -> Callable[..., bool]:
    """`writer.try_write`, watched."""

    def try_write(kind: int, *parts: BytesLike) -> bool:
        began_ns = perf_counter_ns()
        if not writer.try_write(kind, *parts):
            return False
        num_bytes = sum(map(_num_bytes, parts))
        watcher.sent(kind, writer.position, num_bytes, began_ns)
        return True

    return try_write


def watched_draining(reader: RingReader, watcher: RecordWatcher) -> Callable[[Handler, int], int]:
    """`reader.drain`, watched."""

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


def _num_bytes(part: BytesLike) -> int:
    return len(part) if isinstance(part, bytes | bytearray) else part.nbytes
