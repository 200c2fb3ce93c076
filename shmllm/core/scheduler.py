"""The scheduler: it chooses the tokens that each step computes.

Every running request catches up with its own tokens under one token budget. A decoding request
needs one token, and a prompt gets a chunk: as many tokens as the budget leaves. Running requests
come first, in the order in which they were admitted. Waiting requests follow: first come, first
served within a front end, and round robin between front ends, but for those whose adapter would be
one too many in a step. If no block is free, the scheduler preempts the request that was admitted
last; it gives up its blocks and waits ahead of all others to be recomputed. Under the policy
"priority" all three orders are that of (priority, arrival), whose last request is preempted.

A step may be planned while the previous step still runs. The plan then includes a token whose value
is not known yet, and the scheduler notices one step late that a request has ended.

This module is pure Python. It must not know the model or the transport.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from time import monotonic_ns
from typing import Any

from shmllm.config.engine import SchedulerConfig
from shmllm.core.adapter_room import AdapterRoom
from shmllm.core.batches import Batches
from shmllm.core.drafts import Drafts
from shmllm.core.encoder_cache import EncoderCache
from shmllm.core.headroom import Headroom
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.kv_connector import NoConnector
from shmllm.core.observer import NULL_OBSERVER, Observer
from shmllm.core.plan import NewRequest, StepPlan, StepResult
from shmllm.core.priority_queue import PriorityQueue, sort_key
from shmllm.core.request import Request, RequestStatus
from shmllm.core.rows import Rows
from shmllm.core.scheduler_stats import Failure, SchedulerStats
from shmllm.core.steady_decode import SteadySteps
from shmllm.core.step_outputs import StepOutputs, attach_details
from shmllm.core.waiting_queue import WaitingQueue
from shmllm.errors import RequestError
from shmllm.outputs.columns import FinishReason, OutputColumns


class Scheduler:
    """
    Args:
        config: the number of rows, the token budget and the policy.
        kv_cache: allocates and frees the requests' blocks.
        max_loras: the largest number of different adapters in a step.
        max_drafts: the largest number of drafted tokens in a step.
        num_batches: how many batches of a pipeline are under way at a time. A request samples in
            one of them, and each has up to max_num_seqs requests.
        longest_whole, longest_span: see `Batches`.
        encoder_cache: see the attribute; None: no request has items.

    Attributes:
        encoder_cache: has the embeddings of items.
        adapters: the adapters of the running requests.
        connector: loads and saves blocks that another tier has.
        rows: the rows of the running requests.
        failures: requests that ended with an error; who reports them clears the list.
        observer: the scheduler calls it when a request is queued, admitted, preempted or ended.
        stats: counters.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        max_loras: int = 0,
        max_drafts: int = 0,
        num_batches: int = 1,
        longest_whole: int = 0,
        longest_span: int = 0,
        encoder_cache: EncoderCache | None = None,
    ) -> None:
        self._batches = Batches(config, num_batches, longest_whole, longest_span)
        self.encoder_cache = encoder_cache or EncoderCache(0)
        self.rows = Rows(self._batches.num_rows)
        self._kv_cache = kv_cache
        self._is_by_priority = config.policy == "priority"
        self._waiting = PriorityQueue() if self._is_by_priority else WaitingQueue()
        self._num_added = 0
        self._running: list[Request] = []
        self._requests: dict[tuple[int, int], Request] = {}
        self._headroom = Headroom(config, kv_cache, self._batches.longest_chunk)
        self._steady = SteadySteps(kv_cache)
        self.adapters = AdapterRoom(max_loras)
        self.connector = NoConnector()
        self.failures: list[Failure] = []
        self.observer: Observer = NULL_OBSERVER
        self.stats = SchedulerStats()
        self._drafts = Drafts(max_drafts, kv_cache, self.stats)

    @property
    def running(self) -> Sequence[Request]:
        """The requests that have rows, in their order."""
        return self._running

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._register(request)
        self._waiting.add(request)

    def hold(self, request: Request) -> None:
        """Add a request that must not be admitted before `release`."""
        self._register(request)
        self._waiting.hold(request)

    def release(self, request: Request) -> None:
        """Queue a held request."""
        self._waiting.release(request)

    def fail(self, request: Request, message: str) -> None:
        """End a request with an error. The caller takes it from the running ones."""
        self._finish(request, FinishReason.ERROR)
        self.failures.append(Failure(request.client, request.number, message))

    def _fail_computed(self, request: Request, message: str) -> None:
        """End a request whose keys and values are wrong with an error."""
        self._kv_cache.stop_registering(request)
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        self.fail(request, message)

    def has_request(self, client: int, number: int) -> bool:
        """Whether this request was added and has not ended."""
        return (client, number) in self._requests

    def abort(self, client: int, number: int) -> Request | None:
        """End a request now. Returns None if the request is unknown or has already ended."""
        request = self._requests.get((client, number))
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        self._finish(request, FinishReason.ABORT)
        return request

    def abort_client(self, client: int) -> None:
        """End all requests of a front end that has disconnected, and forget its pause."""
        for number in self.unfinished().get(client, ()):
            self.abort(client, number)
        self.resume_client(client)

    def requests(self) -> list[Request]:
        """The requests that have not ended."""
        return list(self._requests.values())

    def unfinished(self) -> dict[int, list[int]]:
        """The numbers of the requests that have not ended, by front end."""
        numbers: dict[int, list[int]] = {}
        for client, number in self._requests:
            numbers.setdefault(client, []).append(number)
        return numbers

    def pause_client(self, client: int) -> None:
        """Stop scheduling a front end's requests: its output ring has no room."""
        self._waiting.paused.add(client)

    def resume_client(self, client: int) -> None:
        """Schedule a front end's requests again."""
        self._waiting.paused.discard(client)

    def preempt_all(self) -> None:
        """Preempt all running requests. They keep their order."""
        while self._running:
            self._preempt(self._running.pop())

    def offer_drafts(self, drafts: Mapping[Request, Sequence[int]]) -> None:
        """Let the next step compute tokens that may follow the known ones of running requests."""
        self._drafts.offered = drafts

    def schedule(self) -> StepPlan:
        """Plan one step, and count its tokens as computed.

        Returns:
            The plan. Its `num_tokens` is 0 if there is nothing to compute.
        """
        plan = StepPlan(step=self.stats.steps, saves_before=self._kv_cache.lenders.take_saves())
        most = self._batches.most_requests(len(self._running) + len(self._waiting))
        if self._plan_steady(plan) or not self._schedule_running(plan, most):
            self._schedule_waiting(plan, most)
        self._drafts.offered = {}
        plan.is_repeat = self._steady.is_repeating
        if plan.num_tokens:
            self.stats.steps += 1
            plan.loads = self._kv_cache.lenders.take_loads()
            plan.saves_after = self._kv_cache.lenders.take_saves()
            plan.left_rows = self.rows.take_left()
            self.connector.planned(plan)
        return plan

    def apply(self, plan: StepPlan, result: StepResult) -> dict[int, OutputColumns]:
        """Append each sampled token to its request, and release the requests that end.

        A request that was preempted while the step ran gets its token as well.

        Returns:
            The columns of each front end for which the step produced anything.
        """
        self._batches.applied(plan.step)
        self.rows.release(plan.step)
        for request in self.connector.applied(plan, result, self._requests.values()):
            self._fail_computed(request, result.load_failure)
        outputs = self._steady.apply(plan, result)
        if outputs is None:
            outputs = self._apply_each(plan, result)
        attach_details(plan, result, outputs)
        self.stats.generated_tokens += sum(len(each.token_ids) for each in outputs.values())
        return outputs

    def _apply_each(self, plan: StepPlan, result: StepResult) -> dict[int, OutputColumns]:
        num_finished = self.stats.requests_finished
        outputs = StepOutputs(plan.step)
        outputs.add_results(plan, result, self._drafts, self._finish, self.fail)
        if self.stats.requests_finished > num_finished:
            self._running = [r for r in self._running if r.status is RequestStatus.RUNNING]
        return outputs.by_client

    def replace_adapter(self, lora_id: int, adapter: Any) -> None:
        """Let running requests continue with other contents of their adapter. They keep their keys
        and values, and register no more blocks."""
        self._steady.end()
        for request in self._running:
            if request.lora_id == lora_id:
                request.adapter = adapter
                self._kv_cache.stop_registering(request)

    def forget_prefixes(self) -> None:
        """Forget cached prefixes and items of other weights, also those of running requests."""
        self._kv_cache.reset_prefix_cache()
        self.encoder_cache.reset()
        for request in self._running:
            self._kv_cache.stop_registering(request)

    def check_integrity(self) -> None:
        """Raise AssertionError if rows, queues and blocks are inconsistent."""
        self._kv_cache.check_integrity()
        self.encoder_cache.check_integrity()
        rows = [*(request.row for request in self._running), *self.rows.unused]
        assert len(set(rows)) == len(rows), "a row is used twice"
        assert len(self._requests) == len(self._running) + len(self._waiting)
        assert self._running or not self._kv_cache.has_used_blocks, "blocks leaked"

    def _register(self, request: Request) -> None:
        self._requests[request.client, request.number] = request
        request.arrival = self._num_added
        self._num_added += 1
        self.observer.queued(request)

    def _plan_steady(self, plan: StepPlan) -> bool:
        """Plan an unchanged step if possible. Returns whether it was."""
        if self._batches.are_several or self._drafts.offered or self._waiting.paused:
            self._steady.end()
            return False
        return self._steady.plan(plan, self._running)

    def _schedule_running(self, plan: StepPlan, most_requests: int) -> bool:
        """Plan tokens of the running requests. Returns whether a request was preempted."""
        preempted, index = False, 0
        while index < len(self._running) and self._batches.has_room(plan, most_requests):
            request = self._running[index]
            index += 1
            if request.client in self._waiting.paused:
                continue
            start = request.num_computed_tokens
            most = min(self._batches.longest_chunk, self._batches.budget - plan.num_tokens)
            if self._batches.are_several and request.num_in_flight:
                continue  # its next token comes with another batch
            count = min(request.num_uncomputed_tokens, most)
            if not (count := self.encoder_cache.cut(request, start, count, plan.step)):
                continue
            drafts: Sequence[int] = ()
            if count == request.num_uncomputed_tokens:
                drafts = self._drafts.usable(request, plan, most - count)
            appended = self._kv_cache.extend(request, start + count + len(drafts))
            if appended is None and drafts:  # nobody gives way to a guess
                drafts, appended = (), self._kv_cache.extend(request, start + count)
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
            self._drafts.plan(request, plan, bool(drafts))
            self._plan_tokens(plan, request, count + len(drafts), drafts)
        return preempted

    def _schedule_waiting(self, plan: StepPlan, most_requests: int) -> None:
        self._headroom.begin()
        while self.rows.free and self._batches.has_room(plan, most_requests):
            excluded = self.rows.clients_with_enough()
            request = self._waiting.next(excluded, self.adapters.allowed)
            if request is None or self._batches.has(request):
                break
            if request.lora_id and (problem := self.adapters.prepare(request)) is not None:
                self.fail(request, problem)
                continue
            hit = self._kv_cache.longest_hit(request)
            num_hit = hit.num_blocks * self._kv_cache.block_size
            try:
                num_loaded = self.connector.num_loadable(request, num_hit)
            except RequestError as problem:
                self._kv_cache.drop(hit)
                self.fail(request, str(problem))
                continue
            start = num_hit + num_loaded
            begin = max(start, request.num_encoded)
            count = self._batches.chunk(request.num_tokens - begin, plan.num_tokens)
            end = start + self.encoder_cache.cut(request, start, begin + count - start, plan.step)
            spare = self._headroom.spare(request, end, self._running, self._waiting.paused)
            if end <= begin or not self._kv_cache.admit(request, hit, end, spare):
                self._kv_cache.drop(hit)
                break
            try:
                self.connector.admitted(request, num_hit, num_loaded)
            except RequestError as problem:
                self._kv_cache.release(request)
                self.fail(request, str(problem))
                continue
            self._waiting.pop(request)
            self._admit(plan, request, start, hit.num_shared_tokens + num_loaded)
            self._plan_tokens(plan, request, end - begin)

    def _admit(
        self, plan: StepPlan, request: Request, num_computed_tokens: int, num_elsewhere: int
    ) -> None:
        """Let a request run. Of its computed tokens, `num_elsewhere` are from outside of the own
        cache. An encoder computes what its prompt lacks before its text."""
        self._steady.end()
        request.row = self.rows.take(request.client)
        self.adapters.enter(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = max(num_computed_tokens, request.num_encoded)
        if self._is_by_priority:
            insort(self._running, request, key=sort_key)
        else:
            self._running.append(request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = max(num_computed_tokens - request.num_encoded, 0)
            request.scheduled_ns = monotonic_ns()
            is_shared = self._kv_cache.lenders.is_shared or self.connector.is_on
            self.stats.add_admitted(request, num_elsewhere if is_shared else None)
        self.observer.admitted(request)
        self.encoder_cache.use_prefix(request, num_computed_tokens, plan)
        plan.new_requests.append(NewRequest.of(request))

    def _plan_tokens(
        self, plan: StepPlan, request: Request, count: int, drafts: Sequence[int] = ()
    ) -> None:
        self.encoder_cache.use(request, request.num_computed_tokens, count, plan)
        request.num_computed_tokens += count
        request.last_step = plan.step
        self._kv_cache.register_full_blocks(request)
        plan.add_tokens(request, count, drafts)

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.stats.preemptions += 1
        self._waiting.add_preempted(request)
        self.observer.preempted(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.connector.finished(request)
        if request.status is RequestStatus.RUNNING:
            self._release(request)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.client, request.number]
        self.stats.requests_finished += 1
        self.observer.ended(request, reason)

    def _release(self, request: Request) -> None:
        self._steady.end()
        self._drafts.release(request)
        self._kv_cache.register_full_blocks(request)
        self._kv_cache.release(request)
        self.rows.give_back(request.row, request.client, self._batches.last_step_of_row(request))
        self.adapters.leave(request)
