"""The client of an engine in another process.

This module owns the exchange of messages over a channel: it sends requests, receives events, and
notices the engine's death within one park of the wait policy. It must not know how the engine was
started; its subclasses in `private` and `attached` do.

An exception of a signal handler may end any method. Slots, replies and events are then as before
the method, or as after it.
"""

from __future__ import annotations

import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from shmllm.client.client_bucket import ClientBucket
from shmllm.client.protocol import (
    NO_PROGRESS,
    BucketMemory,
    DeviceSharing,
    EngineHandle,
    EngineOutput,
    StartProgress,
    death_of,
    ignore_trace,
)
from shmllm.client.request_sender import RequestSender
from shmllm.client.rpc_client import content_of, release_result
from shmllm.client.sending import send
from shmllm.client.worker_call import WorkerCall
from shmllm.config.info import EngineInfo
from shmllm.errors import ProtocolMismatchError
from shmllm.ipc.client_channel import ClientChannel
from shmllm.ipc.device_memory import CudaSharing
from shmllm.ipc.error_log import LoggedError
from shmllm.ipc.output_waiter import OutputWaiter
from shmllm.ipc.ring import RingWriter
from shmllm.ipc.slots import Slot, SlotRef
from shmllm.ipc.states import EngineState
from shmllm.ipc.wait import WaitPolicy
from shmllm.outputs.columns import OutputColumns, PieceColumns
from shmllm.outputs.logprobs import PromptLogprobs
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
    RecordKind,
    Rejected,
    Reply,
    Text,
    Trace,
    WeightVersion,
)
from shmllm.wire.rpc import RpcCall

logger = logging.getLogger(__name__)


class ChannelEngineClient:
    """An `EngineClient` for an engine in another process.

    Args:
        channel: the channel to the engine.
        engine: the handle of the engine's process.

    Attributes:
        open_calls: the numbers of the calls on the worker that the engine has not answered, also of
            those whose caller has given up.
    """

    info: EngineInfo
    _finalizer: weakref.finalize[..., Any]

    def __init__(self, channel: ClientChannel, engine: EngineHandle) -> None:
        self._channel = channel
        self._engine = engine
        self._inbox: list[EngineOutput] = []
        self._letters: list[Reply | Trace | Hello | Text | Failed] = []
        self._startup: Hello | Text | Failed | None = None
        self._replies: dict[int, Reply | None] = {}
        self._bucket = ClientBucket(channel)
        self._sender = RequestSender(channel)
        self._num_calls = 0
        self.open_calls: set[int] = set()
        self._stall_reported = False
        self.sharing: DeviceSharing = CudaSharing()
        self.connection = self.seed = channel.nonce
        self.on_trace: Callable[[str], None] = ignore_trace

    def poll_ready(self, progress: StartProgress = NO_PROGRESS) -> EngineInfo | None:
        """As `wait_ready`, without waiting: go on with the start as far as the engine has come.
        Returns None while it is not ready."""
        raise NotImplementedError

    def wait_ready(self, progress: StartProgress = NO_PROGRESS) -> EngineInfo:
        """Wait until the engine is ready.

        Args:
            progress: the functions to call with the progress.

        Raises:
            EngineStartError: the engine failed, refused, died or did not become ready in time.
        """
        while (info := self.poll_ready(progress)) is None:
            self._channel.wait()
        return info

    def begin_stop(self) -> None:
        """As `stop`, without waiting."""
        raise NotImplementedError

    def stop(self) -> None:
        """See `EngineClient.stop`."""
        raise NotImplementedError

    @property
    def pid(self) -> int:
        """The pid of the engine process."""
        return self._engine.pid

    @property
    def channel(self) -> ClientChannel:
        """The channel to the engine."""
        return self._channel

    @property
    def ring(self) -> RingWriter:
        """The ring of requests, also after the engine's end."""
        return self._channel.requests

    @property
    def waiter(self) -> OutputWaiter:
        """Waits for outputs of this engine."""
        return self._channel.waiter

    def add(self, request: EngineCoreRequest) -> None:
        self._sender.send(request, self.make_room)

    def abort(self, numbers: Sequence[int]) -> None:
        most = self._channel.requests.max_payload_bytes // 8
        for begin in range(0, len(numbers), most):
            part = list(numbers[begin : begin + most])
            self._send(RecordKind.ABORT, codec.encode_abort(Abort(part)))

    def poll(self, timeout_s: float, *, urgent_only: bool = False) -> list[EngineOutput]:
        self._channel.beat()
        self._drain()
        if not self._inbox and timeout_s > 0:
            if not self._channel.wait(time.monotonic() + timeout_s, urgent_only=urgent_only):
                self.check_alive()
            self._drain()
        return self._inbox

    def wake(self) -> None:
        self._channel.wake()

    def before_wait(self) -> None:
        """See `ClientChannel.before_wait`."""
        self._channel.before_wait()

    def has_outputs(self) -> bool:
        """Whether the output ring has an unread record."""
        return self._channel.has_data()

    def has_urgent_outputs(self) -> bool:
        """Whether it has an urgent one."""
        return self._channel.has_urgent()

    @property
    def is_ending(self) -> bool:
        """Whether the engine ends by itself: it has aborted its requests, or is about to."""
        return self._channel.engine_state > EngineState.READY

    def check_alive(self) -> None:
        """Raise EngineDeadError if the engine has ended and all of its events were taken; log a
        warning if it has stalled."""
        self._check_alive()
        self._report_stall()

    def call(self, method: Method, argument: Any = None) -> Any:
        number = self.next_number(has_slot=False)
        try:
            self.expect_reply(number)
            message = Call(number, method, json.dumps(argument))
            self._send(RecordKind.CALL, codec.encode_call(message))
            reply = self.await_reply(number, None)
            assert reply is not None  # an engine that lives may take any time
            content = content_of(reply)
            self.end_call(number)
            return content
        except BaseException:
            self.end_call(number)
            raise

    def run_on_worker(self, call: RpcCall, timeout_s: float | None = None) -> Any:
        work = self.worker_call(call, timeout_s)
        try:
            work.prepare()
            work.send()
            result = work.result()
            work.end()
            return result
        except BaseException:
            work.end()
            raise

    def worker_call(self, call: RpcCall, timeout_s: float | None) -> WorkerCall:
        """As `run_on_worker`, in the steps of the object that this returns."""
        return WorkerCall(self, call, timeout_s)

    def claim_bucket(self) -> Slot:
        return self._bucket.claim(self.make_room)

    def send_bucket(self, bucket: BucketMemory, pieces: str) -> None:
        self._bucket.send(bucket, pieces, self.make_room)

    def discard_bucket(self) -> None:
        self._bucket.discard()

    def next_number(self, has_slot: bool) -> int:
        """A number for a call. An odd one says that the content of its reply may name a slot."""
        self._num_calls += 1
        return 2 * self._num_calls + has_slot

    def expect_reply(self, number: int) -> None:
        """Keep the reply to a call, until `end_call`."""
        self._replies[number] = None

    def await_reply(self, number: int, deadline: float | None) -> Reply | None:
        """Wait for a reply until a deadline on `time.monotonic()`, which gives None, or without
        limit."""
        while (reply := self._replies[number]) is None:
            if not self._channel.wait(deadline):
                self._check_alive(number)
                self._report_stall()
                if deadline is not None and time.monotonic() >= deadline:
                    return None
            self._drain()
        return reply

    def end_call(self, number: int) -> None:
        """Forget a call and release the slot of its result. A reply that comes later is dropped.
        Idempotent."""
        reply = self._replies.get(number)
        if reply is not None:
            self._release_result(reply)
        # No call may come between the release and this statement.
        if number in self._replies:
            del self._replies[number]

    def _release_result(self, reply: Reply) -> None:
        """Release the slot of a result; the release is the last action."""
        if reply.ok and reply.number % 2:
            release_result(self._channel, json.loads(reply.json))

    def trace(self, recorder: Recorder | None) -> None:
        if recorder is None:
            self._channel.watch(None)
        else:
            self._channel.watch(RingTracer(recorder, self.connection, Direction.REQUESTS))

    def stats(self) -> dict[str, int]:
        return self._channel.stats()

    def close(self) -> None:
        # The finalizer forgets its function before it calls it, so an exception would leave the
        # connection half closed for ever.
        alive = self._finalizer.peek()
        if alive is not None:
            _, shut_down, arguments, _ = alive
            shut_down(*arguments)
            self._finalizer.detach()

    def health(self) -> str:
        if self._engine.wait(0):
            return "dead"
        return self._channel.describe_engine()

    def errors(self) -> list[LoggedError]:
        return self._channel.engine_errors()

    def _send(self, kind: RecordKind, parts: codec.Parts) -> None:
        send(self._channel, kind, parts, self.make_room)

    def make_room(self) -> None:
        """Read all outputs. Otherwise this process, which waits for room in the request ring, and
        an engine that waits for room in the output ring could block each other."""
        self._drain()
        if self._engine.wait(0):
            # Raises even if unread outputs are left, because the request cannot be sent.
            self._raise_death()

    def _drain(self) -> None:
        self._channel.receive(self._decode)
        while self._letters:
            self._read(self._letters[0])
            # No call may come between the last action of `_read` and this statement.
            del self._letters[0]

    def _decode(self, kind: int, record: memoryview) -> tuple[Any, Callable[[Any], object], Any]:
        """The message in a record, the function that adds it to its inbox, and the slot in which
        it lies, if it does. Changes nothing."""
        ref = None
        if kind == RecordKind.IN_SLOT:
            inner_kind, place = codec.decode_in_slot(record)
            ref = SlotRef(*place)
            with self._channel.output_slots.view(ref) as view:
                message = codec.decode(inner_kind, view)
        else:
            message = codec.decode(kind, record)
        match message:
            case OutputColumns() | PromptLogprobs() | Rejected() | WeightVersion():
                return message, self._inbox.append, ref
            case PieceColumns():
                return message, self._inbox.append, ref
            case Reply() | Trace() | Hello() | Text() | Failed():
                return message, self._letters.append, ref
        raise ProtocolMismatchError(f"the engine sent {type(message).__name__}")

    def _read(self, letter: Reply | Trace | Hello | Text | Failed) -> None:
        """Handle a message that is no event. After an exception it is handled again."""
        match letter:
            case Trace():
                self.on_trace(letter.directory)
            case Reply():
                self.open_calls.discard(letter.number)
                if letter.number in self._replies:
                    self._replies[letter.number] = letter
                else:  # its caller has given up
                    self._release_result(letter)
            case _:
                self._startup = letter

    def _report_stall(self) -> None:
        """Log a warning if the engine has stalled, once for each stall."""
        state = self._channel.describe_engine()
        is_stalled = state.startswith("stalled")
        if is_stalled and not self._stall_reported:
            logger.warning("waiting for engine process %d, which is %s", self._engine.pid, state)
        self._stall_reported = is_stalled

    def _take_startup(self) -> Hello | Text | Failed | None:
        """Returns the message of the engine's start that has arrived, if any."""
        self._check_alive()
        self._drain()
        startup, self._startup = self._startup, None
        return startup

    def _become_ready(self, ready: Text) -> EngineInfo:
        self.info = EngineInfo.from_json(ready.json)
        self._sender.keep_items(self.info.items.cache_bytes)
        if self._channel.owns_waiter:
            self.set_policy(self.info.num_threads)
        return self.info

    def set_policy(self, num_threads: int) -> None:
        """Choose how to wait for outputs.

        Args:
            num_threads: the compute threads of all engines whose outputs are waited for.
        """
        cores = len(os.sched_getaffinity(0))
        self.waiter.set_policy(WaitPolicy.for_machine(self.info.wait_policy, num_threads, cores))

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
            return self._replies.get(call) is not None
        return bool(self._inbox) or self._startup is not None

    def _raise_death(self) -> NoReturn:
        """Raise EngineDeadError with the known cause."""
        raise death_of(self._engine, self._channel.last_words())
