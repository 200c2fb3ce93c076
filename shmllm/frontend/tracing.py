"""FrontEndTracing: records the work of a front end while a trace is being recorded.

While it records, wrappers replace the input processor and the output processor of the front end.
Without a trace, the front end runs without any wrapper. This module must not know how the records
are evaluated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Protocol

from shmllm.client.protocol import EngineClient, EngineOutput
from shmllm.frontend.dispatcher import Dispatcher
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.prompts import Prompt
from shmllm.frontend.request_group import Outputs
from shmllm.frontend.request_state import RequestState
from shmllm.frontend.text.truncation import Truncation
from shmllm.params.sampling import SamplingParams
from shmllm.tracing.layout import REASONS, Event, Slice, Type
from shmllm.tracing.process import recorder_if_possible, recorder_of_environment
from shmllm.tracing.recorder import Recorder

ROLE = "front end"


class Inputs(Protocol):
    """The method of InputProcessor that a front end uses."""

    def prepare(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[Any],
        names: Sequence[str] | None = None,
        min_room: int = 1,
        truncation: Truncation | None = None,
    ) -> list[PreparedRequest]: ...


class TracedFrontEnd(Protocol):
    """The parts of a FrontEnd that tracing replaces."""

    inputs: Inputs
    dispatcher: Dispatcher


class TracedInputs:
    """Wraps an InputProcessor and records the duration of each call."""

    def __init__(self, inputs: Inputs, recorder: Recorder) -> None:
        self.inputs = inputs
        self._recorder = recorder

    def prepare(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        names: Sequence[str] | None = None,
        min_room: int = 1,
        truncation: Truncation | None = None,
    ) -> list[PreparedRequest]:
        began_ns = perf_counter_ns()
        try:
            return self.inputs.prepare(prompts, params, names, min_room, truncation)
        finally:
            ended_ns = perf_counter_ns()
            self._recorder.add(Type.SLICE, Slice.TOKENIZE, began_ns, ended_ns, len(prompts))


class TracedOutputs:
    """Wraps an OutputProcessor and records events of its requests.

    Args:
        outputs: the OutputProcessor.
        recorder: where to record.
        connection: the id of the connection on which the requests are sent.
    """

    def __init__(self, outputs: Outputs, recorder: Recorder, connection: int) -> None:
        self.outputs = outputs
        self._add = recorder.add
        self._connection = connection

    def add_all(
        self,
        request: PreparedRequest,
        index: int,
        streaming: bool,
        time_tokens: bool = False,
        request_id: str | None = None,
    ) -> list[RequestState]:
        states = self.outputs.add_all(request, index, streaming, time_tokens, request_id)
        for state in states:
            size = len(state.request.prompt_token_ids)
            self._record_event(Event.SUBMITTED, perf_counter_ns(), state.number, size)
        return states

    def discard(self, numbers: Iterable[int]) -> list[int]:
        known = self.outputs.discard(numbers)
        for number in known:
            self._record_event(Event.DISCARDED, perf_counter_ns(), number)
        return known

    def discard_all_but(self, numbers: Container[int]) -> None:
        self.outputs.discard_all_but(numbers)

    def process(self, events: Iterable[EngineOutput]) -> tuple[list[RequestState], list[int]]:
        events = list(events)
        began_ns = perf_counter_ns()
        changed, to_abort = self.outputs.process(events)
        ended = [state for state in changed if state.finish_reason is not None]
        for state in ended:
            reason = REASONS.index(state.finish_reason or REASONS[0])
            self._record_event(Event.FINISHED, began_ns, state.number, reason, len(state.token_ids))
        if events:
            counts = len(events), len(changed), len(ended)
            self._add(Type.SLICE, Slice.PROCESS, began_ns, perf_counter_ns(), *counts)
        return changed, to_abort

    def _record_event(self, event: Event, began_ns: int, number: int, *values: int) -> None:
        now_ns = perf_counter_ns()
        self._add(Type.EVENT, event, began_ns, now_ns, self._connection, number, *values)


class FrontEndTracing:
    """Switches the recording of one front end on and off.

    Recording begins with the construction if an environment variable of `shmllm trace` asks for
    it, and otherwise when the engine asks for it.

    Only the front end refers to this object. The recorder, which may live as long as the process,
    has weak references to it, so that it keeps neither the front end nor the engine alive.

    Args:
        client: the client of the engine.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._front_end: Callable[[], TracedFrontEnd | None] = _no_front_end
        self._recorder: Recorder | None = None
        self._began_ns = perf_counter_ns()
        client.on_trace = _weakly(self._begin_in)
        if (recorder := recorder_of_environment(ROLE)) is not None:
            self._begin(recorder)

    def attach(self, front_end: TracedFrontEnd) -> None:
        """Trace this front end from now on, whenever a trace is being recorded."""
        self._front_end = weakref.ref(front_end)
        if self._recorder is not None:
            self._replace_parts(front_end, self._recorder)

    def record_slice(self, what: Slice) -> None:
        """Record work that lasted from the previous call, or from the construction, until now."""
        began_ns, self._began_ns = self._began_ns, perf_counter_ns()
        if self._recorder is not None:
            self._recorder.add(Type.SLICE, what, began_ns, self._began_ns)

    def _begin_in(self, directory: str) -> None:
        if self._recorder is not None:
            self._recorder.end_if_over(perf_counter_ns())
        if self._recorder is None:
            recorder = recorder_if_possible(Path(directory), ROLE)
            if recorder is not None:
                self._begin(recorder)

    def _begin(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._client.trace(recorder)
        if (front_end := self._front_end()) is not None:
            self._replace_parts(front_end, recorder)
        recorder.at_end(_weakly(self._end))

    def _replace_parts(self, front_end: TracedFrontEnd, recorder: Recorder) -> None:
        front_end.inputs = TracedInputs(front_end.inputs, recorder)
        dispatcher, connection = front_end.dispatcher, self._client.connection
        dispatcher.outputs = TracedOutputs(dispatcher.outputs, recorder, connection)

    def _end(self) -> None:
        self._recorder = None
        self._client.trace(None)
        if (front_end := self._front_end()) is None:
            return
        if isinstance(front_end.inputs, TracedInputs):
            front_end.inputs = front_end.inputs.inputs
        if isinstance(front_end.dispatcher.outputs, TracedOutputs):
            front_end.dispatcher.outputs = front_end.dispatcher.outputs.outputs


def _no_front_end() -> None:
    return None


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A function that calls `method` as long as its object exists."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        if (alive := reference()) is not None:
            alive(*arguments)

    return call
