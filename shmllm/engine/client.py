"""The front end's handle on an engine: in a process of its own, or in this one.

Both kinds take requests by number and give back events (output columns, rejections). The
process kind also notices the engine's death, within one park of the wait policy.
"""

from __future__ import annotations

import json
import os
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shmllm.config import EngineConfig, EngineFacts
from shmllm.engine.launch import EngineHandle
from shmllm.errors import EngineDeadError, EngineStartError, ProtocolMismatchError
from shmllm.ipc.channel import ClientChannel
from shmllm.ipc.layout import SegmentKind, Stat
from shmllm.ipc.segment import Segment
from shmllm.ipc.wait import WaitPolicy
from shmllm.outputs import OutputColumns
from shmllm.wire import codec
from shmllm.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    AddRequest,
    Call,
    Failed,
    Hello,
    Kind,
    Method,
    Rejected,
    Reply,
    Text,
)

Event = OutputColumns | Rejected
LoadProgress = Callable[[int, int], None]

CLOSE_GRACE_S = 5.0
CALL_TIMEOUT_S = 60.0


class EngineClient(Protocol):
    """What a front end needs of an engine."""

    facts: EngineFacts

    def add(self, request: AddRequest) -> None:
        """Submit a request; its number was never used before."""

    def abort(self, numbers: Sequence[int]) -> None:
        """End requests; those that still ran report it as an event."""

    def poll(self, timeout_s: float) -> list[Event]:
        """Events in order; waits at most `timeout_s` for the first. May return early, empty."""

    def call(self, method: Method) -> Any:
        """Ask the engine for something and wait for the answer."""

    def stats(self) -> dict[str, int]:
        """The engine's counters and gauges, by lower-case name."""

    def close(self) -> None:
        """End the engine. Idempotent."""


class ProcessEngineClient:
    """An engine process of this front end's own.

    Args:
        config: what the engine is started with.
        startup_timeout_s: how long it may take to become ready.
        shm_directory: the file system for the segments.

    The engine starts at once; `wait_ready` waits for it, so that the caller can do
    something useful meanwhile.
    """

    facts: EngineFacts

    def __init__(
        self,
        config: EngineConfig,
        *,
        startup_timeout_s: float = 120.0,
        shm_directory: str = "/dev/shm",
    ) -> None:
        self._config = config
        self._startup_timeout_s = startup_timeout_s
        self._inbox: deque[Event] = deque()
        self._startup: Hello | Text | Failed | None = None
        self._replies: dict[int, Reply] = {}
        self._next_call = 0
        control = Segment.create(SegmentKind.CONTROL, directory=shm_directory)
        try:
            client = Segment.create(SegmentKind.CLIENT, directory=shm_directory)
        except BaseException:
            control.close()
            raise
        client.take_ownership()
        self._channel = ClientChannel(control, client, WaitPolicy.named("idle"))
        self._engine = EngineHandle((control.fd, client.fd))
        self._finalizer = weakref.finalize(
            self, _shut_down, os.getpid(), self._channel, self._engine, (control, client)
        )

    def wait_ready(self, on_progress: LoadProgress | None = None) -> EngineFacts:
        """Complete the handshake.

        Args:
            on_progress: called with (bytes read, bytes in all) while the model loads.

        Raises:
            EngineStartError: the engine failed, died or did not become ready in time.
        """
        try:
            deadline = time.monotonic() + self._startup_timeout_s
            hello = self._wait_startup(deadline, None)
            if not isinstance(hello, Hello) or hello.protocol_version != PROTOCOL_VERSION:
                raise EngineStartError(f"the engine answered {hello!r} instead of HELLO")
            self._send(Kind.INIT, codec.encode_text(Text(self._config.to_json())))
            ready = self._wait_startup(deadline, on_progress)
            if isinstance(ready, Failed):
                raise EngineStartError(ready.message, ready.traceback)
            if not isinstance(ready, Text):
                raise EngineStartError(f"the engine answered {ready!r} instead of READY")
        except EngineDeadError as death:
            self.close()
            raise EngineStartError(
                f"the engine process ended while starting: {death.args[0]}",
                death.remote_traceback,
            ) from death
        except BaseException:
            self.close()
            raise
        self.facts = EngineFacts.from_json(ready.json)
        cores = len(os.sched_getaffinity(0))
        self._channel.set_policy(WaitPolicy.for_machine("balanced", self.facts.num_threads, cores))
        return self.facts

    def add(self, request: AddRequest) -> None:
        self._send(Kind.ADD, codec.encode_add(request))

    def abort(self, numbers: Sequence[int]) -> None:
        most = self._channel.requests.max_payload_bytes // 8
        for begin in range(0, len(numbers), most):
            part = list(numbers[begin : begin + most])
            self._send(Kind.ABORT, codec.encode_abort(Abort(part)))

    def poll(self, timeout_s: float) -> list[Event]:
        self._drain()
        if (
            not self._inbox
            and timeout_s > 0
            and not self._channel.wait(time.monotonic() + timeout_s)
        ):
            self._check_alive()
        self._drain()
        events = list(self._inbox)
        self._inbox.clear()
        return events

    def call(self, method: Method) -> Any:
        self._next_call += 1
        number = self._next_call
        self._send(Kind.CALL, codec.encode_call(Call(number, method)))
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while number not in self._replies:
            if not self._channel.wait(deadline):
                self._check_alive()
                if time.monotonic() >= deadline:
                    raise EngineDeadError(f"no answer to {method.name} in {CALL_TIMEOUT_S:.0f} s")
            self._drain()
        return json.loads(self._replies.pop(number).json)

    def stats(self) -> dict[str, int]:
        return self._channel.stats()

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._engine.pid

    def close(self) -> None:
        self._finalizer()

    def _send(self, kind: Kind, parts: codec.Parts) -> None:
        size = sum(map(len, parts))
        if size > self._channel.requests.max_payload_bytes:
            kind, parts = Kind.IN_SLOT, self._put_in_slot(kind, parts, size)
        self._channel.send(kind, *parts, on_full=self._make_room, deadline=None)

    def _put_in_slot(self, kind: Kind, parts: codec.Parts, size: int) -> codec.Parts:
        slot = self._channel.slots.claim(size)
        while slot is None:
            self._make_room()
            self._channel.wait(time.monotonic() + 0.001)
            slot = self._channel.slots.claim(size)
        offset = 0
        for part in parts:
            slot.buffer[offset : offset + len(part)] = part
            offset += len(part)
        return codec.encode_in_slot(kind, slot.publish())

    def _make_room(self) -> None:
        """Drain, or an engine that waits for room in the output ring and this end, which
        waits for room in the request ring, would block each other."""
        self._drain()
        self._check_alive()

    def _drain(self) -> None:
        self._channel.drain(self._handle)

    def _handle(self, kind: int, record: memoryview) -> None:
        message = codec.decode(kind, record)
        match message:
            case OutputColumns() | Rejected():
                self._inbox.append(message)
            case Reply():
                self._replies[message.number] = message
            case Hello() | Text() | Failed():
                self._startup = message
            case _:
                raise ProtocolMismatchError(f"the engine sent {type(message).__name__}")

    def _wait_startup(
        self, deadline: float, on_progress: LoadProgress | None
    ) -> Hello | Text | Failed:
        self._startup = None
        while True:
            if not self._channel.wait(deadline):
                self._check_alive()
            self._drain()
            if on_progress is not None and (total := self._channel.stat(Stat.WEIGHT_BYTES_TOTAL)):
                on_progress(self._channel.stat(Stat.WEIGHT_BYTES_LOADED), total)
            if self._startup is not None:
                return self._startup
            if time.monotonic() >= deadline:
                raise EngineStartError(
                    f"the engine was not ready after {self._startup_timeout_s:.0f} s; a large "
                    "model on a slow disk needs a larger startup_timeout"
                )

    def _check_alive(self) -> None:
        """Raise EngineDeadError if the engine is gone and left nothing unread."""
        if not self._engine.wait(0):
            return
        self._drain()
        if self._inbox or self._startup is not None:
            return
        exit_code, number = self._engine.exit_status()
        if number is not None:
            cause = f"killed by {signal.Signals(number).name}"
        elif exit_code is not None:
            cause = f"exit code {exit_code}"
        else:
            cause = "its exit status is lost"
        raise EngineDeadError(
            f"engine process {self._engine.pid} died ({cause})",
            exit_code=exit_code,
            signal=number,
            remote_traceback=self._channel.last_words(),
        )


def _shut_down(
    pid: int, channel: ClientChannel, engine: EngineHandle, segments: Sequence[Segment]
) -> None:
    if os.getpid() != pid:
        return
    if not engine.wait(0):
        channel.set_closing()
    engine.stop(CLOSE_GRACE_S)
    channel.close()
    for segment in segments:
        segment.close()
