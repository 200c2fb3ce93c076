"""Decides what each step computes.

Every running request catches up with its own tokens under one token budget: a decode
needs one token, a prompt as many as the budget leaves (a chunk). Running requests come
first, in the order they were admitted; then waiting ones, first come, first served within
a front end and in turns between front ends. When blocks run out, the running request
admitted last gives its blocks back and waits before all others to be recomputed. Under the
policy "priority" all three orders are that of (priority, arrival), and the last of the
running requests is the worst.

A step may be planned while the one before it still runs: then a token is computed whose value
is not known here, and a request is found to have ended one step late.

Pure Python: knows neither the model nor the transport.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass
from time import monotonic_ns

from shmllm.config.engine import SchedulerConfig
from shmllm.core.block_pool import KVBlock
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.observer import NOBODY, Observer
from shmllm.core.plan import NewRequest, StepPlan, StepResult
from shmllm.core.pooling import plan_pool, take_vectors
from shmllm.core.priority_queue import PriorityQueue, order
from shmllm.core.request import Request, RequestStatus
from shmllm.core.scores import plan_prompt_scores, take_logprobs, take_prompt_logprobs
from shmllm.core.steady_decode import SteadyDecode
from shmllm.core.waiting_queue import WaitingQueue
from shmllm.outputs.columns import FinishReason, OutputColumns

RESERVED_FRACTION = 8
RUN_AFTER_STEPS = 4
"""A decode run is tried every so many steps in which nobody enters or leaves."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that ended because it could not be served on."""

    client: int
    number: int
    message: str


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start; `prefix_*` count tokens and leave recomputed requests out."""

    steps: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    requests_finished: int = 0


class Scheduler:
    """
    Args:
        config: rows and token budget.
        kv_cache: gives and takes blocks.

    Attributes:
        failures: not yet reported; whoever reports them clears the list.
        observer: hears of requests.
    """

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager) -> None:
        self._budget = config.max_num_batched_tokens
        # More rows than the budget has tokens would let the last of them starve.
        num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._kv_cache = kv_cache
        self._is_by_priority = config.policy == "priority"
        self._waiting = PriorityQueue() if self._is_by_priority else WaitingQueue()
        self._num_added = 0
        self._running: list[Request] = []
        self._requests: dict[tuple[int, int], Request] = {}
        self._num_rows = num_rows
        self._reserved_rows = 0
        self._rows_held: Counter[int] = Counter()
        self._run: SteadyDecode | None = None
        self._num_quiet_steps = 0
        self.failures: list[Failure] = []
        self.observer: Observer = NOBODY
        self.stats = SchedulerStats()

    def share_rows(self, is_shared: bool) -> None:
        """Say whether there are several front ends. If so, a part of the rows is kept for
        those that hold none: a flood of one would fill all rows, and another's request would
        wait until requests of that flood end."""
        self._reserved_rows = self._num_rows // RESERVED_FRACTION if is_shared else 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        self._register(request)
        self._waiting.add(request)

    def hold(self, request: Request) -> None:
        """Add a request that may not run before `release`."""
        self._register(request)
        self._waiting.hold(request)

    def release(self, request: Request) -> None:
        """Let a held request run."""
        self._waiting.release(request)

    def fail(self, request: Request, message: str) -> None:
        """End a waiting request that cannot be served."""
        self._finish(request, FinishReason.ERROR)
        self.failures.append(Failure(request.client, request.number, message))

    def knows(self, client: int, number: int) -> bool:
        """Whether such a request was added and has not ended."""
        return (client, number) in self._requests

    def abort(self, client: int, number: int) -> Request | None:
        """End a request now; None if it is not known, because it had already ended."""
        request = self._requests.get((client, number))
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        self._finish(request, FinishReason.ABORT)
        return request

    def abort_client(self, client: int) -> None:
        """End all requests of a front end that is gone, and forget that it was paused."""
        for number in self.unfinished().get(client, ()):
            self.abort(client, number)
        self.resume_client(client)

    def requests(self) -> list[Request]:
        """Those that have not ended."""
        return list(self._requests.values())

    def unfinished(self) -> dict[int, list[int]]:
        """Numbers of the requests that have not ended, by front end."""
        numbers: dict[int, list[int]] = {}
        for client, number in self._requests:
            numbers.setdefault(client, []).append(number)
        return numbers

    def pause_client(self, client: int) -> None:
        """Schedule nothing of this front end until it is resumed: its outputs have no room."""
        self._waiting.paused.add(client)
        self._end_run()

    def resume_client(self, client: int) -> None:
        self._waiting.paused.discard(client)

    def preempt_all(self) -> None:
        """Have all running requests wait to be recomputed, in the order they are in."""
        while self._running:
            self._preempt(self._running.pop())

    def schedule(self) -> StepPlan:
        """Plan one step, and count its tokens as computed. `num_tokens` 0: nothing to do."""
        plan = StepPlan(step=self.stats.steps)
        if self._continue_run(plan) or not self._schedule_running(plan):
            self._schedule_waiting(plan)
        plan.is_repeat = self._run is not None and self._run.num_steps > 1
        if plan.num_tokens:
            self.stats.steps += 1
        return plan

    def apply(self, plan: StepPlan, result: StepResult) -> dict[int, OutputColumns]:
        """Give each sampled token to its request; requests that end leave. One that was
        preempted while the step ran gets its token, too.

        Returns:
            For each front end with a sampled token or prompt log-probabilities, its columns.
        """
        outputs: dict[int, OutputColumns] | None = None
        if self._run is not None and plan.run is self._run:
            outputs = self._run.apply(plan.step, result.token_ids)
        if outputs is None:
            outputs = self._apply_each(plan, result)
        if result.logprobs is not None:
            take_logprobs(plan, result.logprobs, outputs)
        self.stats.generated_tokens += len(result.token_ids)
        return outputs

    def _apply_each(self, plan: StepPlan, result: StepResult) -> dict[int, OutputColumns]:
        outputs: dict[int, OutputColumns] = {}
        take_prompt_logprobs(plan, result, outputs)
        any_finished = False
        for request in take_vectors(plan, result, outputs):
            self._finish(request, FinishReason.STOP)
            any_finished = True
        for index, token_id in zip(plan.samples, result.token_ids, strict=True):
            request = plan.requests[index]
            if request.status is RequestStatus.FINISHED:
                continue
            columns = outputs.get(request.client)
            if columns is None:
                columns = outputs[request.client] = OutputColumns(step=plan.step)
            if len(request.token_ids) == request.num_prompt_tokens:
                columns.cached_rows.append(len(columns.numbers))
                columns.cached_counts.append(request.num_cached_tokens or 0)
                columns.queued_ns.append(request.queued_ns)
                columns.scheduled_ns.append(request.scheduled_ns)
            finish = request.append(token_id)
            if finish:
                finish = self._end(request, finish)
                any_finished = True
                if request.num_preemptions:
                    columns.preempted_rows.append(len(columns.numbers))
                    columns.preempted_counts.append(request.num_preemptions)
            columns.numbers.append(request.number)
            columns.counts.append(1)
            columns.token_ids.append(token_id)
            columns.finishes.append(finish)
        if any_finished:
            self._running = [r for r in self._running if r.status is RequestStatus.RUNNING]
        return outputs

    def forget_prefixes(self) -> None:
        """Forget every cached prefix, and let no request that runs register more blocks: the
        keys and values that it has already were made with other weights."""
        self._kv_cache.reset_prefix_cache()
        for request in self._running:
            self._kv_cache.stop_registering(request)

    def check_integrity(self) -> None:
        """Raise AssertionError if rows, queues and blocks contradict each other."""
        self._kv_cache.check_integrity()
        rows = [request.row for request in self._running] + self._free_rows
        assert len(set(rows)) == len(rows), "a row is used twice"
        assert len(self._requests) == len(self._running) + len(self._waiting)
        assert self._running or self._kv_cache.num_used_blocks == 0, "blocks leaked"

    def _register(self, request: Request) -> None:
        self._requests[request.client, request.number] = request
        request.arrival = self._num_added
        self._num_added += 1
        self.observer.queued(request)

    def _continue_run(self, plan: StepPlan) -> bool:
        """Plan a step like the one before, if that is possible."""
        if self._run is None:
            self._num_quiet_steps += 1
            if self._num_quiet_steps % RUN_AFTER_STEPS or not self._can_begin_run():
                return False
            self._run = SteadyDecode(self._running, self._kv_cache)
        if self._run.plan(plan):
            return True
        self._end_run()
        return False

    def _can_begin_run(self) -> bool:
        return (
            0 < len(self._running) <= self._budget
            and not self._waiting.paused
            and all(request.is_only_decoding for request in self._running)
            and len({request.num_under_way for request in self._running}) == 1
        )

    def _end_run(self) -> None:
        self._run = None
        self._num_quiet_steps = 0

    def _schedule_running(self, plan: StepPlan) -> bool:
        """Returns whether a request was preempted."""
        preempted = False
        index = 0
        while index < len(self._running) and plan.num_tokens < self._budget:
            request = self._running[index]
            index += 1
            if request.client in self._waiting.paused:
                continue
            start = request.num_computed_tokens
            count = min(request.num_uncomputed_tokens, self._budget - plan.num_tokens)
            if not count:
                continue
            appended = self._kv_cache.extend(request, start + count)
            while appended is None:
                preempted = True
                victim = self._running.pop()
                self._preempt(victim)
                if victim is request:
                    break
                appended = self._kv_cache.extend(request, start + count)
            if appended is None:
                break
            plan.append_blocks(request, appended)
            self._plan_tokens(plan, request, count)
        return preempted

    def _schedule_waiting(self, plan: StepPlan) -> None:
        while self._free_rows and plan.num_tokens < self._budget:
            request = self._waiting.next(self._clients_with_enough_rows())
            if request is None:
                break
            hit = self._kv_cache.longest_hit(request)
            num_hit = len(hit) * self._kv_cache.block_size
            count = min(request.num_tokens - num_hit, self._budget - plan.num_tokens)
            if not self._kv_cache.admit(request, hit, num_hit + count):
                break
            self._waiting.pop(request)
            self._admit(plan, request, hit)
            self._plan_tokens(plan, request, count)

    def _clients_with_enough_rows(self) -> Container[int]:
        return self._rows_held if len(self._free_rows) <= self._reserved_rows else ()

    def _admit(self, plan: StepPlan, request: Request, hit: list[KVBlock]) -> None:
        self._end_run()
        request.row = self._free_rows.pop()
        self._rows_held[request.client] += 1
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = len(hit) * self._kv_cache.block_size
        if self._is_by_priority:
            insort(self._running, request, key=order)
        else:
            self._running.append(request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            request.scheduled_ns = monotonic_ns()
            if request.params.reads_prefix_cache:
                self.stats.prefix_query_tokens += request.num_prompt_tokens
                self.stats.prefix_hit_tokens += request.num_cached_tokens
            self.stats.prompt_tokens += request.num_prompt_tokens
        self.observer.admitted(request)
        plan.new_requests.append(NewRequest.of(request))

    def _plan_tokens(self, plan: StepPlan, request: Request, count: int) -> None:
        start = request.num_computed_tokens
        request.num_computed_tokens = start + count
        self._kv_cache.register_full_blocks(request)
        if request.pooling is not None:
            plan_pool(plan, request)
        elif request.num_computed_tokens >= len(request.token_ids):
            if request.constraint is not None:
                plan.constraints.append((len(plan.samples), request.constraint))
            plan.samples.append(len(plan.requests))
        if request.params.prompt_logprobs is not None:
            plan_prompt_scores(plan, request, request.params.prompt_logprobs)
        plan.requests.append(request)
        plan.rows.append(request.row)
        plan.starts.append(start)
        plan.counts.append(count)
        plan.num_tokens += count

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.stats.preemptions += 1
        self._waiting.add_preempted(request)
        self.observer.preempted(request)

    def _end(self, request: Request, finish: FinishReason) -> FinishReason:
        """End a running request; what its last output says of that. An error follows on its
        own, since it comes with a message."""
        self._finish(request, finish)
        if finish is not FinishReason.ERROR or request.constraint is None:
            return finish
        message = request.constraint.error
        self.failures.append(Failure(request.client, request.number, message))
        return FinishReason.NONE

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            self._release(request)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.client, request.number]
        self.stats.requests_finished += 1
        self.observer.ended(request, reason)

    def _release(self, request: Request) -> None:
        self._end_run()
        self._kv_cache.register_full_blocks(request)
        self._kv_cache.release(request)
        self._free_rows.append(request.row)
        self._rows_held[request.client] -= 1
        if not self._rows_held[request.client]:
            del self._rows_held[request.client]
