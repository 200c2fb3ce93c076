"""Records the records that one end of a connection sends and receives through its two rings."""

from __future__ import annotations

from time import perf_counter_ns

from shmllm.tracing.layout import Direction, Type
from shmllm.tracing.recorder import Recorder


class RingTracer:
    """A `RecordWatcher` of a channel.

    Args:
        recorder: the recorder.
        ring_id: the connection's nonce, which is the same at both ends.
        sends: the ring into which this process writes.
    """

    def __init__(self, recorder: Recorder, ring_id: int, sends: Direction) -> None:
        self._add = recorder.add
        self._ring_id = ring_id
        self._sends = sends
        self._receives = Direction(1 - sends)

    def sent(self, kind: int, position: int, num_bytes: int, began_ns: int) -> None:
        now_ns = perf_counter_ns()
        sends = self._sends
        self._add(Type.SENT, kind, began_ns, now_ns, self._ring_id, position, num_bytes, sends)

    def received(self, kind: int, position: int, num_bytes: int, began_ns: int) -> None:
        now_ns = perf_counter_ns()
        receives = self._receives
        self._add(
            Type.RECEIVED, kind, began_ns, now_ns, self._ring_id, position, num_bytes, receives
        )
