"""Records the steps and the requests of an engine core in a trace.

This module owns the records that an engine adds to a trace. It must not know sessions or when a
trace begins; `engine.tracing` does.
"""

from __future__ import annotations

from time import perf_counter_ns

from shmllm.core.observer import Observer
from shmllm.core.plan import StepPlan
from shmllm.core.request import Request, RequestStatus
from shmllm.engine.core import EngineCore
from shmllm.outputs.columns import FinishReason
from shmllm.tracing.layout import Event, Slice, Type
from shmllm.tracing.recorder import Recorder


class EngineTracer(Observer):
    """An observer that records every event.

    Args:
        recorder: the recorder of this process for the trace.
        core: the engine core; None until it is loaded.
    """

    def __init__(self, recorder: Recorder, core: EngineCore | None) -> None:
        self._add = recorder.add
        self.core = core

    def record_existing(self, core: EngineCore) -> None:
        """Record the requests that were added before the recording began."""
        for request in core.scheduler.requests():
            self.queued(request)
            if request.status is RequestStatus.RUNNING:
                num_cached = request.num_cached_tokens or 0
                at_ns = request.scheduled_ns
                self._add_event(Event.ADMITTED, request, num_cached, at_ns=at_ns)

    def queued(self, request: Request) -> None:
        at_ns = request.queued_ns
        self._add_event(Event.QUEUED, request, request.num_prompt_tokens, at_ns=at_ns)

    def admitted(self, request: Request) -> None:
        num_cached = request.num_computed_tokens
        self._add_event(Event.ADMITTED, request, num_cached, request.num_preemptions)

    def preempted(self, request: Request) -> None:
        self._add_event(Event.PREEMPTED, request, request.num_tokens)

    def ended(self, request: Request, reason: FinishReason) -> None:
        self._add_event(Event.ENDED, request, reason, request.num_output_tokens)

    def rejected(self, client: int, number: int) -> None:
        now_ns = perf_counter_ns()
        self._add(Type.EVENT, Event.REJECTED, now_ns, now_ns, client, number)

    def drained(self, began_ns: int, ended_ns: int) -> None:
        self._add(Type.SLICE, Slice.DRAIN, began_ns, ended_ns)

    def stepped(self, plan: StepPlan, moments_ns: tuple[int, ...]) -> None:
        began_ns, *inner_ns, ended_ns = moments_ns
        step = plan.step
        columns = zip(plan.requests, plan.starts, plan.counts, strict=True)
        for index, (request, start, count) in enumerate(columns):
            count -= len(plan.drafts.get(index, ()))
            if count > 1 or start < request.num_prompt_tokens:
                self._add_event(Event.PREFILL, request, start, count, step, at_ns=began_ns)
        self._add(Type.PHASES, 0, began_ns, ended_ns, step, *inner_ns)
        if self.core is not None:
            scheduler = self.core.scheduler
            waits = scheduler.num_running << 32 | scheduler.num_waiting
            tokens = plan.num_drafts << 32 | plan.num_tokens
            counts = len(plan.requests), tokens, waits, self.core.num_used_blocks
            self._add(Type.STEP, 0, began_ns, ended_ns, step, *counts)

    def published(self, began_ns: int) -> None:
        self._add(Type.SLICE, Slice.PUBLISH, began_ns, perf_counter_ns())

    def _add_event(
        self, event: Event, request: Request, c: int = 0, d: int = 0, e: int = 0, at_ns: int = 0
    ) -> None:
        at_ns = at_ns or perf_counter_ns()
        self._add(Type.EVENT, event, at_ns, at_ns, request.client, request.number, c, d, e)
