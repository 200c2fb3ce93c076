"""Begins and ends the recording of a trace in an engine process.

A recording begins at the start of the process, if the environment asks for it, or with a TRACE
call. This module owns that switch, and asks the front ends to record, too. `engine.tracer` makes
the records of steps and requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter_ns

from shmllm.core.observer import NULL_OBSERVER, Observer
from shmllm.engine.calls import reply_with
from shmllm.engine.core import EngineCore
from shmllm.engine.session import Session
from shmllm.engine.tracer import EngineTracer
from shmllm.errors import RequestError
from shmllm.tracing.layout import Direction, Event, Slice, Type
from shmllm.tracing.process import recorder_in, recorder_of_environment
from shmllm.tracing.recorder import Recorder
from shmllm.tracing.rings import RingTracer
from shmllm.wire.codec import encode_trace
from shmllm.wire.messages import Call, RecordKind, Reply, Trace


class EngineTracing:
    """
    Args:
        sessions: the sessions of the front ends, by place.
        path: the path of the engine's named segment; None for a private engine, whose front end
            reads the same environment variable as this process.

    Attributes:
        observer: the observer of this process: a tracer during a recording, and otherwise the
            NULL_OBSERVER.
    """

    def __init__(self, sessions: Mapping[int, Session], path: Path | None) -> None:
        self._sessions = sessions
        self._is_named = path is not None
        self._role = "engine" if path is None else f"engine {path.name}"
        self._began_ns = perf_counter_ns()
        self._recorder: Recorder | None = None
        self._directory = ""
        self._core: EngineCore | None = None
        self.observer: Observer = NULL_OBSERVER
        if (recorder := recorder_of_environment(self._role)) is not None:
            self._begin(recorder)

    def loading(self) -> None:
        """The runner's modules are imported; the engine loads the model next."""
        self._add_slice(Slice.IMPORT)

    def loaded(self, core: EngineCore) -> None:
        """The engine core is loaded."""
        self._add_slice(Slice.LOAD_MODEL)
        self._core = core
        core.observer = self.observer
        if isinstance(self.observer, EngineTracer):
            self.observer.core = core

    def joined(self, session: Session) -> None:
        """The engine accepted a front end, or a recording began with this front end attached."""
        if (recorder := self._recorder) is None:
            return
        channel, now_ns = session.channel, perf_counter_ns()
        channel.watch(RingTracer(recorder, channel.nonce, Direction.OUTPUTS))
        client = session.place, session.connection, session.pid
        recorder.add(Type.EVENT, Event.JOINED, now_ns, now_ns, *client)
        if self._is_named:
            record = encode_trace(Trace(self._directory))
            session.send(RecordKind.TRACE, record, is_urgent=False)

    def left(self, place: int) -> None:
        """The engine dismissed the front end in this place."""
        if self._recorder is not None:
            now_ns = perf_counter_ns()
            self._recorder.add(Type.EVENT, Event.LEFT, now_ns, now_ns, place)

    def reply_to(self, call: Call) -> Reply:
        """Begin a recording in the directory that the CALL names, and return the reply."""
        return reply_with(call.number, lambda: json.dumps(self._begin_in(json.loads(call.json))))

    def _begin_in(self, directory: object) -> bool:
        if self._recorder is not None:
            self._recorder.end_if_over(perf_counter_ns())
        if self._recorder is not None:
            raise RequestError("this engine is being traced already: try again when that is over")
        if not isinstance(directory, str):
            raise RequestError(f"a trace needs a directory, not {directory!r}")
        try:
            recorder = recorder_in(Path(directory), self._role)
        except (OSError, ValueError, TypeError) as problem:
            raise RequestError(f"the engine cannot record in {directory}: {problem}") from problem
        self._begin(recorder)
        if self._core is not None:
            self._core.runner.trace(Path(directory))
        return True

    def _begin(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._directory = str(recorder.path.parent)
        self.observer = tracer = EngineTracer(recorder, self._core)
        for session in self._sessions.values():
            self.joined(session)
        if self._core is not None:
            self._core.observer = tracer
            tracer.record_existing(self._core)
        recorder.at_end(self._end)

    def _end(self) -> None:
        self._recorder = None
        self.observer = NULL_OBSERVER
        if self._core is not None:
            self._core.observer = NULL_OBSERVER
        for session in self._sessions.values():
            session.channel.watch(None)

    def _add_slice(self, name: Slice) -> None:
        """Record a part of the start that ends now; it began when the previous part ended."""
        began_ns, self._began_ns = self._began_ns, perf_counter_ns()
        if self._recorder is not None:
            self._recorder.add(Type.SLICE, name, began_ns, self._began_ns)
