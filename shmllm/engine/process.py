"""The engine process: its main loop and its front ends.

One turn of the loop accepts new front ends and dismisses those that left, takes their records, runs
one step and publishes its outputs. If there is nothing to do, the process parks. The loop never
blocks on a front end: outputs that find no room wait, and meanwhile that front end's requests are
not scheduled. `__main__` starts the process.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from pathlib import Path

from shmllm.config.engine import ClientConfig, EngineConfig
from shmllm.engine import garbage
from shmllm.engine.calls import failure_of, reply_to
from shmllm.engine.client_acceptor import ClientAcceptor
from shmllm.engine.core import EngineCore
from shmllm.engine.ending import Ending
from shmllm.engine.output_publisher import OutputPublisher
from shmllm.engine.reporter import Reporter
from shmllm.engine.rpc_server import RpcServer
from shmllm.engine.session import Session
from shmllm.engine.tracing import EngineTracing
from shmllm.errors import ProtocolMismatchError, ShmLLMError
from shmllm.ipc import registry
from shmllm.ipc.control import ControlPage
from shmllm.ipc.core_waiter import CoreWaiter
from shmllm.ipc.error_log import front_end
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import EngineState
from shmllm.ipc.wait import WaitPolicy
from shmllm.params.request import EngineCoreRequest
from shmllm.wire import codec
from shmllm.wire.messages import (
    PROTOCOL_VERSION,
    SHUTTING_DOWN,
    Abort,
    Call,
    Failed,
    Hello,
    Method,
    PromptEmbeds,
    PromptItem,
    RecordKind,
    Rejected,
    Reply,
    Text,
    Weights,
    Work,
)
from shmllm.wire.weight_bucket import pieces_of

LIVENESS_PERIOD_S = 0.1
EXIT_FAILED_START = 2
STALL_DUMP_AFTER_S = 5.0


class EngineProcess:
    """
    Args:
        control: the engine's segment; this process becomes its owner.
        path: the path of the segment's name; None for a private engine.
        client: the options for front ends. A private engine receives them later, with INIT.
    """

    def __init__(
        self, control: Segment, path: Path | None, client: ClientConfig | None = None
    ) -> None:
        control.take_ownership()
        self._control = control
        self._path = path
        self._page = ControlPage(control)
        self._waiter = CoreWaiter(control)
        self._acceptor = ClientAcceptor(
            control,
            self._page,
            path,
            (client or ClientConfig()).timeout_s,
            self._forget_client,
            self._holds_up_others,
        )
        self._sessions: dict[int, Session] = self._acceptor.sessions
        self._tracing = EngineTracing(self._sessions, path)
        self._publisher = OutputPublisher(self._sessions)
        self._next_liveness = 0.0
        self._ending = Ending(self._page, self._waiter.wake, self._withdraw)
        self._reporter = Reporter(self._page)
        self._init: Text | None = None
        self._core: EngineCore | None = None
        self._rpc_server: RpcServer | None = None
        self._dumps_stalls = os.environ.get("SHMLLM_STALL_DUMP") == "1"

    def run_private(self, session: Session) -> int:
        """Serve one front end, which sends the configuration.

        Returns:
            The exit code: 0 if the engine was asked to end, 1 after an exception, 2 if it could
            not start. The traceback of an exception is in the last words on the control page.
        """
        self._sessions[session.place] = session
        session.on_error = self._page.errors.record
        self._tracing.joined(session)
        try:
            session.send(RecordKind.HELLO, codec.encode_hello(Hello(PROTOCOL_VERSION, os.getpid())))
            # The import of torch takes longest, so it begins before INIT arrives.
            with session.exit_if_front_end_dies():
                import shmllm.worker.make_runner  # noqa: F401

            self._await_init()
            if not self._ending.is_running or self._init is None:
                return 0
            failed = self._load(EngineConfig.from_json(self._init.json))
            if failed is not None:
                session.send(RecordKind.FAILED, codec.encode_failed(failed))
                self._page.set_state(EngineState.FAILED)
                return EXIT_FAILED_START
            self._send_ready(session)
            return self._serve()
        except Exception:
            return self._record_crash()

    def run_named(self, config: EngineConfig) -> int:
        """Serve every front end that attaches. Returns the exit code, as `run_private` does."""
        try:
            failed = self._load(config)
            if failed is not None:
                self._page.set_last_words(failed.message)
                self._page.set_state(EngineState.FAILED)
                print(f"{failed.traceback}shmllm: {failed.message}", file=sys.stderr)
                return EXIT_FAILED_START
            return self._serve()
        except Exception:
            print(traceback.format_exc(), file=sys.stderr)
            return self._record_crash()
        finally:
            self._withdraw()

    def _withdraw(self) -> None:
        """Take the engine's name back, if it has one."""
        if self._path is not None:
            registry.withdraw(self._control, self._path)

    def _record_crash(self) -> int:
        """Write the traceback to the control page. Returns the exit code."""
        self._page.set_last_words(traceback.format_exc())
        self._page.set_state(EngineState.FAILED)
        return 1

    def _await_init(self) -> None:
        while self._init is None and self._ending.is_running:
            self._tend_sessions()
            self._take_requests()
            if self._init is None:
                self._waiter.wait(self._has_work, busy=True)

    def _load(self, config: EngineConfig) -> Failed | None:
        """Create the engine core. Returns the problem if that fails."""
        from shmllm.plugins.entry_points import keep_vllm_names, search_also
        from shmllm.worker.make_runner import make_runner

        search_also(config.plugins.search_path)
        keep_vllm_names(is_needed=config.plugins.runs_code_of_others)
        garbage.freeze_imports()
        self._reporter.imported(config.load.model_name)
        self._tracing.loading()
        try:
            runner = make_runner(config, self._report_loading, self._report_capturing)
            runner.watch(self._reporter.stopped_rank)
            core = EngineCore(config, runner, self._waiter.wake, self._page.errors.record)
            allow_functions = self._path is None or config.client.allow_callables
            self._rpc_server = RpcServer(core, allow_functions)
        except Exception as problem:
            if isinstance(problem, ShmLLMError):
                return Failed(str(problem), "")
            return Failed(f"{type(problem).__name__}: {problem}", traceback.format_exc())
        self._core = self._publisher.core = core
        self._tracing.loaded(core)
        self._waiter.set_policy(WaitPolicy.named(config.client.wait_policy))
        garbage.enable()
        self._reporter.ready(core)
        return None

    def _report_loading(self, done: int, total: int) -> None:
        self._reporter.loading(done, total)
        self._exit_if_unwanted()

    def _report_capturing(self, done: int, total: int) -> None:
        self._reporter.capturing(done, total)
        self._exit_if_unwanted()

    def _exit_if_unwanted(self) -> None:
        """End a process that still loads, if an operator, a signal or its front end's end asks for
        that. Front ends that already ask to attach wait until the engine is ready."""
        self._tend_sessions()
        if not self._ending.is_running:
            raise SystemExit(0)

    def _serve(self) -> int:
        core = self._core
        assert core is not None
        while not self._ending.is_stopping:
            self._page.beat()
            if self._dumps_stalls:
                faulthandler.dump_traceback_later(STALL_DUMP_AFTER_S)
            self._accept_sessions()
            self._tend_sessions()
            self._take_requests()
            if core.has_unfinished and self._step(core):
                continue
            if self._ending.is_draining and not core.has_unfinished:
                break
            self._reporter.write_state(core)
            self._waiter.wait(
                self._has_work,
                busy=core.has_unfinished,
                for_room=any(session.is_stuck for session in self._sessions.values()),
            )
        self._page.set_state(EngineState.SHUTTING_DOWN)
        self._abort_all(core)
        core.close()
        return 0

    def _has_work(self) -> bool:
        return (
            any(s.has_work() for s in self._sessions.values())
            or self._ending.is_stopping
            or self._acceptor.has_pending()
        )

    def _accept_sessions(self) -> None:
        for session in self._acceptor.accept_new():
            self._tracing.joined(session)
            self._send_ready(session)
            self._share_rows()

    def _tend_sessions(self) -> None:
        """Obey the operator, publish what waits for room, and dismiss front ends that have ended
        within the liveness period."""
        self._ending.obey_operator()
        self._flush_stuck_sessions()
        now = time.monotonic()
        if now < self._next_liveness and not self._acceptor.has_leaving():
            return
        self._control.check_intact("the segment of this engine")
        self._next_liveness = now + LIVENESS_PERIOD_S
        self._reporter.parked(self._waiter.times_parked)
        if self._core is not None:
            self._core.runner.check()
        for session in self._sessions.values():
            session.maintain()
        self._acceptor.dismiss_ended()
        if self._path is None and not self._sessions:
            self._ending.stop()
        self._ending.end_drain(now)

    def _holds_up_others(self, place: int) -> bool:
        return (
            self._core is not None and len(self._sessions) > 1 and self._core.holds_up_others(place)
        )

    def _flush_stuck_sessions(self) -> None:
        for session in self._sessions.values():
            if session.is_stuck:
                session.flush()
                if not session.is_stuck and self._core is not None:
                    self._core.scheduler.resume_client(session.place)

    def _forget_client(self, place: int) -> None:
        if self._core is not None:
            self._core.forget_client(place)
            self._reporter.write_state(self._core)
            self._share_rows()
        self._tracing.left(place)

    def _share_rows(self) -> None:
        if self._core is not None:
            self._core.scheduler.rows.share(len(self._sessions) > 1)

    def _send_ready(self, session: Session) -> None:
        assert self._core is not None
        self._publisher.send(
            session, RecordKind.READY, codec.encode_text(Text(self._core.info.to_json()))
        )
        self._publisher.send_version(session, self._core.weights.version)

    def _take_requests(self) -> None:
        senders = [s for s in self._sessions.values() if s.has_requests()]
        if not senders:
            return
        began_ns = time.perf_counter_ns()
        in_turns = len(self._sessions) > 1
        for session in senders:
            session.take(self._handle, in_turns)
        ended_ns = time.perf_counter_ns()
        self._reporter.drain_ns += ended_ns - began_ns
        self._tracing.observer.drained(began_ns, ended_ns)

    def _step(self, core: EngineCore) -> bool:
        """Run a step and publish its outputs. Returns False if nothing could run."""
        num_steps = core.timings.num_steps
        outputs = core.step()
        stepped_ns = time.perf_counter_ns()
        self._reporter.write_state_if_due(core, stepped_ns)
        for place, columns in outputs.items():
            self._publisher.publish(place, columns)
        for failure in core.take_failures():
            self._publisher.reject(failure.client, Rejected(failure.number, failure.message))
        has_run = core.timings.num_steps > num_steps
        if has_run:
            self._reporter.step(core.timings, stepped_ns, time.perf_counter_ns(), outputs)
            self._tracing.observer.published(stepped_ns)
        return has_run or core.is_in_flight or core.has_saves

    def _abort_all(self, core: EngineCore) -> None:
        core.settle()
        self._publisher.publish_call_effects(core)
        for place, numbers in core.scheduler.unfinished().items():
            self._publisher.publish(place, core.abort(place, numbers))
        for session in self._sessions.values():
            session.flush()

    def _handle(self, session: Session, kind: int, record: memoryview) -> None:
        message = codec.decode(kind, record)
        core = self._core
        match message:
            case Text() if core is None:
                self._init = message
            case PromptEmbeds() if core is not None:
                session.keep_embeds(message, core.info.max_embeds_bytes)
            case PromptItem() if core is not None:
                session.items.keep(message, core.info.max_model_len, core.info.items.cache_bytes)
            case EngineCoreRequest() if core is not None:
                self._add(core, session, message)
            case Abort() if core is not None:
                columns = core.abort(session.place, message.numbers)
                self._reporter.write_state(core)
                self._publisher.publish(session.place, columns)
            case Call(method=Method.TRACE):
                reply = self._tracing.reply_to(message)
                self._reply(session, reply, message.method)
            case Call() if core is not None:
                reply = reply_to(core, session.place, message)
                self._reporter.write_state(core)
                self._publisher.publish_call_effects(core)
                self._reply(session, reply, message.method)
            case Work() if core is not None and self._rpc_server is not None:
                reply = self._rpc_server.reply_to(session.place, session.channel, message)
                self._reporter.write_state(core)
                self._publisher.publish_call_effects(core)
                self._reply(session, reply)
            case Weights() if core is not None:
                with session.slot_memory(message.slot) as bucket:
                    pieces = pieces_of(message.json, len(bucket))
                    core.weights.stage(session.place, pieces, bucket)
            case _:
                raise ProtocolMismatchError(f"{RecordKind(kind).name} cannot be handled now")

    def _reply(self, session: Session, reply: Reply, method: Method | None = None) -> None:
        if failure := failure_of(reply, method):
            text = f"{front_end(session.pid, session.place)}: {failure}"
            self._page.errors.record(text, session.place)
        self._publisher.send(session, RecordKind.REPLY, codec.encode_reply(reply))

    def _add(self, core: EngineCore, session: Session, request: EngineCoreRequest) -> None:
        request.embeds = session.take_embeds(request.number)
        request.items = session.items.take(request.number)
        rejected: Rejected | None = Rejected(request.number, SHUTTING_DOWN)
        if self._ending.is_running:
            rejected = core.add(session.place, request)
        if rejected is not None:
            self._tracing.observer.rejected(session.place, rejected.number)
            self._publisher.reject(session.place, rejected)
