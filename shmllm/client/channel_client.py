"""The front end's handle on an engine, whichever process that runs in.

Owns the conversation over a channel: requests out by number, events (output columns,
rejections) in, and noticing the engine's death within one park of the wait policy. How the
engine came to be there is the business of `private` and `attached`.
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

from shmllm.client.protocol import (
    EngineLife,
    EngineOutput,
    Lease,
)
from shmllm.client.rpc_client import decode_work, drop_answer, encode_work
from shmllm.config.info import EngineInfo
from shmllm.errors import (
    REFUSALS,
    CallError,
    EngineDeadError,
    IpcTimeoutError,
    ProtocolMismatchError,
)
from shmllm.ipc.channel import ClientChannel
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
    """An engine in another process.

    Args:
        channel: to the engine.
        engine: its life.
    """

    info: EngineInfo

    def __init__(self, channel: ClientChannel, engine: EngineLife) -> None:
        self._channel = channel
        self._engine = engine
        self._inbox: deque[EngineOutput] = deque()
        self._startup: Hello | Text | Failed | None = None
        self._replies: dict[int, Reply] = {}
        self._overdue: set[int] = set()
        self._next_call = 0
        self._stall_reported = False
        self.connection = channel.nonce
        self.on_trace: Callable[[str], None] = _ignore_trace

    @property
    def pid(self) -> int:
        """Of the engine process."""
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
        number = self._number_call()
        question = Call(number, method, json.dumps(argument))
        self._send(RecordKind.CALL, codec.encode_call(question))
        reply = self._await_reply(number, time.monotonic() + CALL_TIMEOUT_S)
        if reply is None:
            raise EngineDeadError(f"no answer to {method.name} in {CALL_TIMEOUT_S:.0f} s")
        return _content(reply)

    def run_on_worker(self, call: RpcCall, timeout_s: float | None = None) -> Any:
        number = self._number_call()
        text = encode_work(self._channel, call, self._pause)
        self._send(RecordKind.WORK, codec.encode_work(Work(number, text)))
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        reply = self._await_reply(number, deadline)
        if reply is None:
            self._overdue.add(number)
            raise IpcTimeoutError(f"the worker did not answer in {timeout_s:g} s")
        return decode_work(self._channel, call, _content(reply))

    def claim_bucket(self) -> Slot:
        while (slot := self._channel.slots.claim(BUCKET_BYTES)) is None:
            self._pause()
        return slot

    def send_bucket(self, bucket: Lease, pieces: str) -> None:
        assert isinstance(bucket, Slot)
        message = Weights(bucket.publish(), pieces)
        self._send(RecordKind.WEIGHTS, codec.encode_weights(message))

    def _number_call(self) -> int:
        self._next_call += 1
        return self._next_call

    def _await_reply(self, number: int, deadline: float | None) -> Reply | None:
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

    def _send(self, kind: RecordKind, parts: codec.Parts) -> None:
        size = sum(map(len, parts))
        if size > self._channel.requests.max_payload_bytes:
            kind, parts = RecordKind.IN_SLOT, self._put_in_slot(kind, parts, size)
        self._channel.send(kind, *parts, on_full=self._make_room, deadline=None)

    def _put_in_slot(self, kind: RecordKind, parts: codec.Parts, size: int) -> codec.Parts:
        slot = self._channel.slots.claim(size)
        while slot is None:
            self._pause()
            slot = self._channel.slots.claim(size)
        offset = 0
        for part in parts:
            slot.buffer[offset : offset + len(part)] = part
            offset += len(part)
        return codec.encode_in_slot(kind, slot.publish())

    def _pause(self) -> None:
        """While no slot is free."""
        self._make_room()
        self._channel.wait(time.monotonic() + 0.001)

    def _make_room(self) -> None:
        """Drain, or an engine that waits for room in the output ring and this end, which
        waits for room in the request ring, would block each other."""
        self._drain()
        if self._engine.wait(0):
            # What it left unread does not matter any more: this request cannot be sent.
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
        if reply.number not in self._overdue:
            self._replies[reply.number] = reply
            return
        self._overdue.remove(reply.number)
        if reply.ok:
            drop_answer(self._channel, json.loads(reply.json))

    def _report_stall(self) -> None:
        """Say once per stall whom this front end is waiting for, and in what state it is."""
        state = self._channel.describe_engine()
        is_stalled = state.startswith("stalled")
        if is_stalled and not self._stall_reported:
            logger.warning("waiting for engine process %d, which is %s", self._engine.pid, state)
        self._stall_reported = is_stalled

    def _receive_startup(self) -> Hello | Text | Failed | None:
        """Wait once; the start-up message that came, if any."""
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
        """Raise EngineDeadError if the engine is gone and left nothing of what is waited for:
        the reply to a call, or else events."""
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
        """Raise EngineDeadError with all that is known of the cause."""
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
    """Nothing is recorded."""


def _content(reply: Reply) -> Any:
    content = json.loads(reply.json)
    if reply.ok:
        return content
    kind, message, words = content
    if kind in REFUSALS:
        raise REFUSALS[kind](message)
    raise CallError(f"{kind}: {message}", words)
