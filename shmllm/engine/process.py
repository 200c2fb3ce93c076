"""The engine process: its loop, its signals, its channel to the front end.

    python -m shmllm.engine.process CONTROL_FD CLIENT_FD FRONT_END_PIDFD

One turn of the loop: take what the front end sent, run one step, publish what it
produced; with nothing to do, park. Ends when the front end closes or dies, or on SIGTERM
or SIGINT. The loop never blocks on a front end: outputs that find no room wait here, and
while they do that front end's requests are not scheduled.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import time
import traceback
from collections import deque
from enum import Enum, auto
from types import FrameType

from shmllm.config import EngineConfig
from shmllm.engine.core import EngineCore
from shmllm.errors import ProtocolMismatchError, ShmLLMError
from shmllm.ipc.channel import ControlPage, CoreChannel, CoreWaiter
from shmllm.ipc.layout import ClientState, EngineState, SegmentKind, Stat
from shmllm.ipc.segment import Segment
from shmllm.ipc.slots import SlotRef
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

LIVENESS_PERIOD_S = 0.1
CLIENT = 0


class Shutdown(Enum):
    """
    RUNNING       -> REQUESTED      a signal came, the front end closes or is gone
    REQUESTED     -> SHUTTING_DOWN  the loop saw it: no further step is run
    """

    RUNNING = auto()
    REQUESTED = auto()
    SHUTTING_DOWN = auto()


class EngineProcess:
    """
    Args:
        control: the engine's segment, which it takes ownership of.
        client: the front end's segment.
        front_end_pidfd: becomes readable when the front end is gone.
    """

    def __init__(self, control: Segment, client: Segment, front_end_pidfd: int) -> None:
        control.take_ownership()
        self._page = ControlPage(control)
        self._waiter = CoreWaiter(control)
        self._channel = CoreChannel(control, client)
        self._front_end = select.poll()
        self._front_end.register(front_end_pidfd, select.POLLIN)
        self._next_liveness = 0.0
        self._shutdown = Shutdown.RUNNING
        self._init: Text | None = None
        self._core: EngineCore | None = None
        self._backlog: deque[tuple[Kind, codec.Parts]] = deque()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._request_shutdown_signal_safe)

    def run(self) -> int:
        """Returns the exit code."""
        try:
            core = self._start()
            if core is not None:
                self._page.set_state(EngineState.READY)
                self._loop(core)
        except BaseException:
            self._page.set_last_words(traceback.format_exc())
            self._page.set_state(EngineState.FAILED)
            raise
        if core is None and self._shutdown is Shutdown.RUNNING:
            self._page.set_state(EngineState.FAILED)
            return 2
        self._page.set_state(EngineState.SHUTTING_DOWN)
        return 0

    def _request_shutdown_signal_safe(self, _number: int, _frame: FrameType | None) -> None:
        if self._shutdown is Shutdown.RUNNING:
            self._shutdown = Shutdown.REQUESTED
        self._waiter.wake()

    def _start(self) -> EngineCore | None:
        """HELLO, INIT, load, READY. None if that failed and the front end was told, or if
        the front end went away."""
        self._send(Kind.HELLO, codec.encode_hello(Hello(PROTOCOL_VERSION, os.getpid())))
        # Importing torch takes longest of all, so it happens while INIT is on its way.
        from shmllm.worker.runner import ModelRunner

        while self._init is None:
            self._check_front_end()
            if self._shutdown is not Shutdown.RUNNING:
                return None
            self._channel.drain(self._handle)
            self._flush_backlog()
            if self._init is None:
                self._waiter.wait(self._channel.has_requests, busy=True)
        try:
            config = EngineConfig.from_json(self._init.json)
            core = EngineCore(config, ModelRunner(config, self._report_loading))
        except Exception as problem:
            expected = isinstance(problem, ShmLLMError)
            failed = Failed(
                str(problem) if expected else f"{type(problem).__name__}: {problem}",
                "" if expected else traceback.format_exc(),
            )
            self._send(Kind.FAILED, codec.encode_failed(failed))
            return None
        self._core = core
        gc.collect()
        gc.freeze()
        self._send(Kind.READY, codec.encode_text(Text(core.facts.to_json())))
        self._page.set_stat(Stat.KV_BLOCKS_TOTAL, core.facts.num_blocks)
        return core

    def _report_loading(self, done: int, total: int) -> None:
        self._page.set_stat(Stat.WEIGHT_BYTES_LOADED, done)
        self._page.set_stat(Stat.WEIGHT_BYTES_TOTAL, total)
        self._page.beat()
        self._check_front_end()
        if self._shutdown is not Shutdown.RUNNING:
            raise SystemExit(0)

    def _loop(self, core: EngineCore) -> None:
        while self._shutdown is Shutdown.RUNNING:
            self._page.beat()
            self._check_front_end()
            self._channel.drain(self._handle)
            self._flush_backlog()
            if core.scheduler.has_unfinished() and not self._backlog:
                self._step(core)
            else:
                self._waiter.wait(self._has_work, busy=bool(self._backlog))
        self._shutdown = Shutdown.SHUTTING_DOWN

    def _has_work(self) -> bool:
        return (
            self._channel.has_requests()
            or self._shutdown is not Shutdown.RUNNING
            or self._channel.client_state is ClientState.CLOSING
        )

    def _step(self, core: EngineCore) -> None:
        began_ns = time.perf_counter_ns()
        for columns in core.step().values():
            self._publish(columns)
        self._report_statistics(core, time.perf_counter_ns() - began_ns)

    def _publish(self, columns: OutputColumns) -> None:
        if columns.numbers:
            columns.time_ns = time.monotonic_ns()
            self._send(Kind.OUTPUTS, codec.encode_outputs(columns))

    def _send(self, kind: Kind, parts: codec.Parts) -> None:
        if self._backlog or not self._channel.try_send(kind, *parts):
            self._backlog.append((kind, parts))
            if self._core is not None:
                self._core.scheduler.pause_client(CLIENT)

    def _flush_backlog(self) -> None:
        if not self._backlog:
            return
        while self._backlog:
            kind, parts = self._backlog[0]
            if not self._channel.try_send(kind, *parts):
                return
            self._backlog.popleft()
        if self._core is not None:
            self._core.scheduler.resume_client(CLIENT)

    def _check_front_end(self) -> None:
        now = time.monotonic()
        if now < self._next_liveness:
            return
        self._next_liveness = now + LIVENESS_PERIOD_S
        closing = self._channel.client_state is ClientState.CLOSING
        if (closing or self._front_end.poll(0)) and self._shutdown is Shutdown.RUNNING:
            self._shutdown = Shutdown.REQUESTED

    def _handle(self, kind: int, record: memoryview) -> None:
        if kind == Kind.IN_SLOT:
            inner_kind, ref = codec.decode_in_slot(record)
            with self._channel.slots.view(SlotRef(*ref)) as view:
                self._handle(inner_kind, view)
            self._channel.slots.release(SlotRef(*ref))
            return
        message = codec.decode(kind, record)
        match message:
            case Text():
                self._init = message
            case AddRequest() if self._core is not None:
                self._add(self._core, message)
            case Abort() if self._core is not None:
                self._publish(self._core.abort(CLIENT, message.numbers))
            case Call() if self._core is not None:
                self._send(Kind.REPLY, codec.encode_reply(self._answer(self._core, message)))
            case _:
                raise ProtocolMismatchError(f"{Kind(kind).name} cannot be handled now")

    def _add(self, core: EngineCore, message: AddRequest) -> None:
        refusal = core.add(
            CLIENT, message.number, message.prompt_token_ids, message.params, message.cache_salt
        )
        if refusal is not None:
            rejected = Rejected(message.number, refusal)
            self._send(Kind.REJECTED, codec.encode_rejected(rejected))

    def _answer(self, core: EngineCore, call: Call) -> Reply:
        match call.method:
            case Method.RESET_PREFIX_CACHE:
                return Reply(call.number, True, json.dumps(core.reset_prefix_cache()))

    def _report_statistics(self, core: EngineCore, step_ns: int) -> None:
        scheduler, page = core.scheduler, self._page
        stats = scheduler.stats
        page.set_stat(Stat.STEPS, stats.steps)
        page.set_stat(Stat.RUNNING, scheduler.num_running)
        page.set_stat(Stat.WAITING, scheduler.num_waiting)
        page.set_stat(Stat.KV_BLOCKS_USED, core.num_used_blocks)
        page.set_stat(Stat.PREFIX_QUERY_TOKENS, stats.prefix_query_tokens)
        page.set_stat(Stat.PREFIX_HIT_TOKENS, stats.prefix_hit_tokens)
        page.set_stat(Stat.PREEMPTIONS, stats.preemptions)
        page.set_stat(Stat.PROMPT_TOKENS, stats.prompt_tokens)
        page.set_stat(Stat.GENERATED_TOKENS, stats.generated_tokens)
        page.set_stat(Stat.REQUESTS_FINISHED, stats.requests_finished)
        page.set_stat(Stat.STEP_NS, step_ns)


def main() -> int:
    control_fd, client_fd, front_end_pidfd = map(int, sys.argv[1:4])
    control = Segment.attach(control_fd, SegmentKind.CONTROL)
    client = Segment.attach(client_fd, SegmentKind.CLIENT)
    os.set_inheritable(front_end_pidfd, False)
    return EngineProcess(control, client, front_end_pidfd).run()


if __name__ == "__main__":
    sys.exit(main())
