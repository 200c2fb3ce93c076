"""The client of an engine in another process.

This module owns the exchange of messages over a channel: it sends requests, receives events, and
notices the engine's death within one park of the wait policy. It must not know how the engine was
started; its subclasses in `private` and `attached` do.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from shmllm.client.protocol import BucketMemory, DeviceSharing, EngineHandle, EngineOutput
from shmllm.client.rpc_client import pack_call, release_result, unpack_result
from shmllm.config.info import EngineInfo
from shmllm.errors import (
    REFUSALS,
    CallError,
    EngineDeadError,
    IpcTimeoutError,
    ProtocolMismatchError,
)
from shmllm.ipc.channel import ClientChannel
from shmllm.ipc.device_memory import CudaSharing
from shmllm.ipc.error_log import LoggedError
from shmllm.ipc.slots import Slot, SlotRef
from shmllm.ipc.tensors import TensorWriter
from shmllm.ipc.wait import WaitPolicy
from shmllm.outputs.columns import Embeddings, OutputColumns
from shmllm.outputs.logprobs import PromptLogprobs
from shmllm.params.pooling import Pooling
from shmllm.params.request import EngineCoreRequest
from shmllm.tracing.layout import Direction
from shmllm.tracing.recorder import Recorder
from shmllm.tracing.rings import RingTracer
from shmllm.wire import codec
from shmllm.wire.messages import (
    Abort,
    Call,
    Failed,
    Hello,
    Method,
    PromptEmbeds,
    RecordKind,
    Rejected,
    Reply,
    Text,
    Trace,
    Weights,
    WeightVersion,
    Work,
)
from shmllm.wire.rpc import RpcCall
from shmllm.wire.weight_bucket import BUCKET_BYTES

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0


class ChannelEngineClient:
    """An `EngineClient` for an engine in another process.

    Args:
        channel: the channel to the engine.
        engine: the handle of the engine's process.
    """

    info: EngineInfo

    def __init__(self, channel: ClientChannel, engine: EngineHandle) -> None:
        self._channel = channel
        self._engine = engine
        self._inbox: deque[EngineOutput] = deque()
        self._startup: Hello | Text | Failed | None = None
        self._replies: dict[int, Reply] = {}
        self._timed_out: set[int] = set()
        self._next_call = 0
        self._stall_reported = False
        self.sharing: DeviceSharing = CudaSharing()
        self.connection = channel.nonce
        self.on_trace: Callable[[str], None] = _ignore_trace

    @property
    def pid(self) -> int:
        """The pid of the engine process."""
        return self._engine.pid

    def add(self, request: EngineCoreRequest) -> None:
        if request.embeds is not None:
            slots = TensorWriter(self._channel.slots)
            ref = slots.put(request.embeds, deadline=None, on_full=self._make_room).encode()
            message = PromptEmbeds(request.number, ref)
            self._send(RecordKind.PROMPT_EMBEDS, codec.encode_prompt_embeds(message))
        if isinstance(request.params, Pooling):
            self._send(RecordKind.POOL, codec.encode_pool(request))
        else:
            self._send(RecordKind.ADD, codec.encode_add(request))

    def abort(self, numbers: Sequence[int]) -> None:
        most = self._channel.requests.max_payload_bytes // 8
        for begin in range(0, len(numbers), most):
            part = list(numbers[begin : begin + most])
            self._send(RecordKind.ABORT, codec.encode_abort(Abort(part)))

    def poll(self, timeout_s: float, *, urgent_only: bool = False) -> list[EngineOutput]:
        self._channel.beat()
        self._drain()
        if (
            not self._inbox
            and timeout_s > 0
            and not self._channel.wait(time.monotonic() + timeout_s, urgent_only=urgent_only)
        ):
            self._check_alive()
            self._report_stall()
        self._drain()
        events = list(self._inbox)
        self._inbox.clear()
        return events

    def wake(self) -> None:
        self._channel.wake()

    def call(self, method: Method, argument: Any = None) -> Any:
        number = self._next_call_number()
        message = Call(number, method, json.dumps(argument))
        self._send(RecordKind.CALL, codec.encode_call(message))
        reply = self._await_reply(number, time.monotonic() + CALL_TIMEOUT_S)
        if reply is None:
            raise EngineDeadError(f"no answer to {method.name} in {CALL_TIMEOUT_S:.0f} s")
        return _content(reply)

    def run_on_worker(self, call: RpcCall, timeout_s: float | None = None) -> Any:
        number = self._next_call_number()
        text = pack_call(self._channel, call, self._wait_for_slot)
        self._send(RecordKind.WORK, codec.encode_work(Work(number, text)))
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        reply = self._await_reply(number, deadline)
        if reply is None:
            self._timed_out.add(number)
            raise IpcTimeoutError(f"the worker did not answer in {timeout_s:g} s")
        return unpack_result(self._channel, call, _content(reply))

    def claim_bucket(self) -> Slot:
        return self._claim_slot(BUCKET_BYTES)

    def send_bucket(self, bucket: BucketMemory, pieces: str) -> None:
        assert isinstance(bucket, Slot)
        message = Weights(bucket.publish(), pieces)
        self._send(RecordKind.WEIGHTS, codec.encode_weights(message))

    def _next_call_number(self) -> int:
        self._next_call += 1
        return self._next_call

    def _await_reply(self, number: int, deadline: float | None) -> Reply | None:
        """Wait for a reply until a deadline on `time.monotonic()`, or without limit."""
        while number not in self._replies:
            if not self._channel.wait(deadline):
                self._check_alive(number)
                if deadline is not None and time.monotonic() >= deadline:
                    return None
            self._drain()
        return self._replies.pop(number)

    def trace(self, recorder: Recorder | None) -> None:
        if recorder is None:
            self._channel.watch(None)
        else:
            self._channel.watch(RingTracer(recorder, self.connection, Direction.REQUESTS))

    def stats(self) -> dict[str, int]:
        return self._channel.stats()

    def health(self) -> str:
        if self._engine.wait(0):
            return "dead"
        return self._channel.describe_engine()

    def errors(self) -> list[LoggedError]:
        return self._channel.engine_errors()

    def _send(self, kind: RecordKind, parts: codec.Parts) -> None:
        self._channel.beat()
        size = sum(map(len, parts))
        if size > self._channel.requests.max_payload_bytes:
            kind, parts = RecordKind.IN_SLOT, self._put_in_slot(kind, parts, size)
        self._channel.send(kind, *parts, on_full=self._make_room, deadline=None)

    def _put_in_slot(self, kind: RecordKind, parts: codec.Parts, size: int) -> codec.Parts:
        slot = self._claim_slot(size)
        offset = 0
        for part in parts:
            slot.buffer[offset : offset + len(part)] = part
            offset += len(part)
        return codec.encode_in_slot(kind, slot.publish())

    def _claim_slot(self, size: int) -> Slot:
        while (slot := self._channel.slots.claim(size)) is None:
            self._wait_for_slot()
        return slot

    def _wait_for_slot(self) -> None:
        """Wait at most 1 ms for outputs; the engine releases slots meanwhile."""
        self._make_room()
        self._channel.wait(time.monotonic() + 0.001)

    def _make_room(self) -> None:
        """Read all outputs. Otherwise this process, which waits for room in the request ring, and
        an engine that waits for room in the output ring could block each other."""
        self._drain()
        if self._engine.wait(0):
            # Raises even if unread outputs are left, because the request cannot be sent.
            self._raise_death()

    def _drain(self) -> None:
        self._channel.drain(self._handle)

    def _handle(self, kind: int, record: memoryview) -> None:
        if kind == RecordKind.IN_SLOT:
            inner_kind, place = codec.decode_in_slot(record)
            ref = SlotRef(*place)
            with self._channel.output_slots.view(ref) as view:
                self._handle(inner_kind, view)
            self._channel.output_slots.release(ref)
            return
        message = codec.decode(kind, record)
        match message:
            case OutputColumns() | PromptLogprobs() | Embeddings() | Rejected() | WeightVersion():
                self._inbox.append(message)
            case Reply():
                self._take_reply(message)
            case Trace():
                self.on_trace(message.directory)
            case Hello() | Text() | Failed():
                self._startup = message
            case _:
                raise ProtocolMismatchError(f"the engine sent {type(message).__name__}")

    def _take_reply(self, reply: Reply) -> None:
        if reply.number not in self._timed_out:
            self._replies[reply.number] = reply
            return
        self._timed_out.remove(reply.number)
        if reply.ok:
            release_result(self._channel, json.loads(reply.json))

    def _report_stall(self) -> None:
        """Log a warning if the engine has stalled, once for each stall."""
        state = self._channel.describe_engine()
        is_stalled = state.startswith("stalled")
        if is_stalled and not self._stall_reported:
            logger.warning("waiting for engine process %d, which is %s", self._engine.pid, state)
        self._stall_reported = is_stalled

    def _receive_startup(self) -> Hello | Text | Failed | None:
        """Wait for one park. Returns the message of the engine's start that arrived, if any."""
        if not self._channel.wait():
            self._check_alive()
        self._drain()
        startup, self._startup = self._startup, None
        return startup

    def _become_ready(self, ready: Text) -> EngineInfo:
        self.info = EngineInfo.from_json(ready.json)
        cores = len(os.sched_getaffinity(0))
        policy = WaitPolicy.for_machine(self.info.wait_policy, self.info.num_threads, cores)
        self._channel.set_policy(policy)
        return self.info

    def _check_alive(self, call: int | None = None) -> None:
        """Raise EngineDeadError if the engine has ended and the awaited message has not arrived.

        Args:
            call: the number of the call whose reply is awaited; None if an event is awaited.
        """
        if not self._engine.wait(0):
            return
        self._drain()
        if not self._has_unread(call):
            self._raise_death()

    def _has_unread(self, call: int | None) -> bool:
        if call is not None:
            return call in self._replies
        return bool(self._inbox) or self._startup is not None

    def _raise_death(self) -> NoReturn:
        """Raise EngineDeadError with the known cause."""
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


def _ignore_trace(directory: str) -> None:
    """The default of `on_trace`."""


def _content(reply: Reply) -> Any:
    """The result in a reply. Raises the error of a failed call."""
    content = json.loads(reply.json)
    if reply.ok:
        return content
    kind, message, trace = content
    if kind in REFUSALS:
        raise REFUSALS[kind](message)
    raise CallError(f"{kind}: {message}", trace)
