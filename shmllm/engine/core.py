"""The engine core: it schedules a step, runs it, and applies its results.

If the runner overlaps steps, the core schedules and submits a step while the previous one runs, and
then applies the previous one's results: two steps are submitted at a time. What depends on the
previous step's tokens waits for `Step.release`. If the runner is a pipeline, it has as many steps
as batches, and a request samples in one of them at a time. Else steps follow each other.

This module contains no transport, no signals and no process; those are in `engine.process`. The
same core runs in the caller's process for `LLM(multiprocess=False)`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter_ns

from shmllm.config.engine import EngineConfig
from shmllm.core.encoder_cache import EncoderCache
from shmllm.core.grammar_queue import GrammarQueue
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.observer import Observer
from shmllm.core.pausing import PAUSES, PauseMode, Pauses
from shmllm.core.plan import StepPlan
from shmllm.core.request import Request
from shmllm.core.scheduler import Scheduler
from shmllm.core.scheduler_stats import Failure
from shmllm.core.step_outputs import StepOutputs
from shmllm.core.weak_calls import weak_call
from shmllm.engine.adapters import Adapters
from shmllm.engine.blocks_elsewhere import WeightsSource, info_with, make_blocks_elsewhere
from shmllm.engine.drafting.make import make_drafting
from shmllm.engine.encoder_text import take_encoder_text
from shmllm.engine.request_checks import check_tensors, refusal_of
from shmllm.engine.runner import Runner, Step
from shmllm.engine.sleep import Level, Sleeper, SleepResult
from shmllm.engine.step_timings import StepTimings
from shmllm.engine.weight_transfer import WeightTransfer
from shmllm.engine.weight_updates import WeightUpdates
from shmllm.errors import EnginePausedError, RequestError
from shmllm.outputs.columns import FinishReason, OutputColumns
from shmllm.outputs.sleep_report import SleepState
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.wire.messages import Rejected

logger = logging.getLogger(__name__)


def _do_nothing() -> None:
    """The default of `wake`."""


class EngineCore:
    """
    Args:
        config: the configuration of the engine.
        runner: owns the model and the KV cache, and executes plans.
        wake: called from any thread when `step` has something to do again.
        report: called with a sentence about something that failed and ends no request.

    Attributes:
        info: the information that the engine reports to front ends.
        extension: the name of the class that extends workers; empty: there is none.
        timings: the time that steps took.
        pauses: the pauses in force.
        sleeper: releases memory and restores it.
        weights: the weight update in progress and the version of the weights in force.
        transfer: the connection with a trainer.
        adapters: the low-rank adapters.
        drafting: drafts tokens; None: nobody does.
        elsewhere: the KV blocks outside of the engine's cache.
        first_weights: where the weights of its start are from.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        wake: Callable[[], None] = _do_nothing,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        self.info = runner.info
        self.first_weights = WeightsSource.of_start(config, runner)
        self.extension = config.plugins.worker_extension_cls
        self.timings = StepTimings()
        self.runner = runner
        self._kv_cache = KVCacheManager(
            num_blocks=self.info.num_blocks + 1,
            block_size=self.info.block_size,
            enable_prefix_caching=self.info.enable_prefix_caching,
            groups=runner.kv_groups,
            num_states=self.info.num_states + 1,
        )
        self.scheduler = Scheduler(
            config.scheduler,
            self._kv_cache,
            config.lora.most_in_step,
            max_drafts=config.max_drafts,
            num_batches=config.parallel.pipeline_parallel_size,
            longest_whole=self.info.max_model_len if self.info.pooling.both_ways else 0,
            longest_span=self.info.items.longest_span,
            encoder_cache=EncoderCache.of(self.info.items),
        )
        self.drafting = make_drafting(config.speculative, self.scheduler, runner.keeps_state_of)
        self.adapters = Adapters(config.lora, runner.read_lora, self.scheduler)
        self.pauses = Pauses()
        self.sleeper = Sleeper(self.scheduler, self._kv_cache, self.pauses, runner.memory)
        self._in_flight: deque[tuple[StepPlan, Step]] = deque()
        self._unsent: list[tuple[int, OutputColumns]] = []
        own_calls = weak_call(self.weights_written), weak_call(self.abort_all)
        self.weights = WeightUpdates(lambda: runner.model, *own_calls)
        self.transfer = WeightTransfer(
            config.transfer.backend, config.parallel.num_processes, self.weights
        )
        self.elsewhere = make_blocks_elsewhere(
            config, runner, self.first_weights, self._kv_cache, self.scheduler, report
        )
        self.info = info_with(self.info, self.elsewhere)
        self._grammars = GrammarQueue(self.scheduler, runner.compile_grammar, wake)

    @property
    def observer(self) -> Observer:
        """The observer of requests and steps."""
        return self.scheduler.observer

    @observer.setter
    def observer(self, observer: Observer) -> None:
        self.scheduler.observer = observer

    @property
    def num_used_blocks(self) -> int:
        return self._kv_cache.num_used_blocks

    @property
    def is_in_flight(self) -> bool:
        """Whether a step was submitted and its results have not been applied."""
        return bool(self._in_flight)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request has not ended or a submitted step has to be applied."""
        return self.is_in_flight or self.scheduler.has_unfinished() or self.has_saves

    @property
    def has_saves(self) -> bool:
        """Whether a step can copy blocks to where other engines find them."""
        return self._kv_cache.lenders.has_saves and not self.pauses.is_frozen

    def add(self, client: int, request: EngineCoreRequest) -> Rejected | None:
        """Queue a request of a front end.

        Returns:
            The rejection to send to the front end; None if the request is queued. The method
            raises no exception, because an invalid request must not end the others.
        """
        try:
            refusal = self._add(client, request)
        except EnginePausedError as pause:
            return Rejected(request.number, str(pause), is_retryable=True)
        except RequestError as problem:
            refusal = str(problem)
        except Exception as problem:
            refusal = f"{type(problem).__name__}: {problem}"
        return None if refusal is None else Rejected(request.number, refusal)

    def _add(self, client: int, request: EngineCoreRequest) -> str | None:
        """Queue a request. Returns why it cannot be served; None if it is queued.

        Raises:
            EnginePausedError: a pause forbids new requests.
            RequestError: embeddings, images, the adapter or parameters cannot be used.
        """
        take_encoder_text(request)
        refusal = self._refuse(client, request)
        if refusal is not None:
            return refusal
        if request.lora is not None:
            self.adapters.expect(request.lora)
        check_tensors(request, self.runner)
        scheduled = Request(
            client,
            request,
            seed=request.seed,
            max_model_len=self.info.max_model_len,
            eos_token_ids=self.info.eos_token_ids,
            num_encoded=self.info.items.num_encoded,
        )
        if request.grammar:
            return self._grammars.add(scheduled, request.grammar)
        self.scheduler.add(scheduled)
        return None

    def _refuse(self, client: int, request: EngineCoreRequest) -> str | None:
        """Why a request cannot be served; None if it can."""
        if refusal := self.pauses.refusal:
            raise EnginePausedError(refusal)
        if self.scheduler.has_request(client, request.number):
            return f"request number {request.number} is in use"
        if problem := refusal_of(request, self.info):
            return problem
        if isinstance(request.params, SamplingParams):
            self.runner.check_params(request.params)
        return None

    def abort(self, client: int, numbers: Sequence[int]) -> OutputColumns:
        """End requests now. Returns the last row of each that had not ended before."""
        outputs = StepOutputs(self.scheduler.stats.steps)
        for number in numbers:
            if (request := self.scheduler.abort(client, number)) is not None:
                outputs.add_row(request, FinishReason.ABORT)
        return outputs.by_client.get(client, OutputColumns(step=self.scheduler.stats.steps))

    def pause(self, client: int, mode: PauseMode) -> int:
        """Pause for a front end until it resumes or disconnects. The last rows of requests that
        this ends are in `take_outputs`.

        Returns:
            The number of requests that have not ended.

        Raises:
            RequestError: the mode is WAIT, but requests cannot end because the engine sleeps.
        """
        unfinished = self.scheduler.has_unfinished()
        if mode is PauseMode.WAIT and unfinished and self.sleeper.is_frozen:
            raise RequestError(
                "the engine sleeps, so its requests cannot end: call wake_up() first, or pause "
                "with mode 'keep' or 'abort'"
            )
        if mode is PauseMode.ABORT:
            self.abort_all()
        self.pauses.add(client, PAUSES[mode])
        return self.scheduler.num_running + self.scheduler.num_waiting

    def resume(self, client: int) -> bool:
        """End a front end's pause. Returns whether the engine continues: no pause is left."""
        self.pauses.drop(client)
        return not self.pauses

    def sleep(self, client: int, level: Level, mode: PauseMode) -> SleepResult | int:
        """Put the engine to sleep for a front end, until any front end wakes it up.

        The last rows of requests that this ends are in `take_outputs`.

        Returns:
            The report. With WAIT, the number of requests that have not ended, as long as there
            are requests that can end; the caller then has to call again.
        """
        if mode is PauseMode.WAIT and (unfinished := self.sleeper.drain(client)):
            return unfinished
        if mode is PauseMode.ABORT:
            self.abort_all()
        result = self.sleeper.sleep(client, level, mode)
        if SleepState.KV_CACHE in self.sleeper.state:
            self.elsewhere.sleep()
        return result

    def forget_client(self, client: int) -> None:
        """End the requests of a disconnected front end, and what it has begun and not ended."""
        self.resume(client)
        self.sleeper.stop_draining(client)
        self.transfer.forget_client(client)
        self.weights.abandon(client)
        self.scheduler.abort_client(client)
        self.adapters.forget_client(client)

    def holds_up_others(self, client: int) -> bool:
        """Whether others wait until this front end ends what it has begun; see `forget_client`."""
        is_waited_for = client in self.pauses or self.adapters.holds(client)
        return is_waited_for or self.sleeper.drains(client) or self.weights.updates(client)

    def abort_all(self) -> None:
        """End all requests now. Their last rows are in `take_outputs`."""
        for client, numbers in self.scheduler.unfinished().items():
            self._unsent.append((client, self.abort(client, numbers)))

    def settle(self) -> None:
        """Wait for the steps in flight, if any, and apply them; their rows are in `take_outputs`.

        No step runs afterwards, so the caller may change weights and memory.
        """
        while self._in_flight:
            now_ns = perf_counter_ns()
            self._unsent += self._finish(now_ns, now_ns).items()

    def take_outputs(self) -> list[tuple[int, OutputColumns]]:
        """The rows produced outside of `step` since the last call, by front end."""
        outputs, self._unsent = self._unsent, []
        return outputs

    def step(self) -> dict[int, OutputColumns]:
        """Run one step.

        Returns:
            The columns of each front end; empty if no step has ended yet.
        """
        began_ns = perf_counter_ns()
        plan = self._schedule()
        planned_ns = perf_counter_ns()
        submitted = (plan, self.runner.submit(plan)) if plan is not None else None
        most = self.runner.max_in_flight
        outputs: dict[int, OutputColumns] = {}
        try:
            if submitted is None or len(self._in_flight) >= most - 1:
                outputs = self._finish(began_ns, planned_ns)
        finally:
            # Without this release, a failure above would block all later steps.
            if submitted is not None:
                self._in_flight.append(submitted)
                submitted[1].release()
        if submitted is not None and most == 1:
            return self._finish(began_ns, planned_ns)
        return outputs

    def _schedule(self) -> StepPlan | None:
        if self.pauses.is_frozen:
            return None
        self.elsewhere.poll()
        self._grammars.release_ready()
        if self.drafting is not None:
            self.drafting.draft()
        plan = self.scheduler.schedule()
        if not plan.num_tokens and not plan.saves_before:
            return None
        self._kv_cache.lenders.step_submitted()
        return plan

    def _finish(self, began_ns: int, planned_ns: int) -> dict[int, OutputColumns]:
        """Wait for the first of the steps in flight, if any, and give its tokens to the
        requests."""
        if not self._in_flight:
            return {}
        plan, step = self._in_flight.popleft()
        submitted_ns = perf_counter_ns()
        result = step.result()
        sampled_ns = perf_counter_ns()
        self._kv_cache.lenders.step_run((*plan.saves_before, *plan.saves_after), plan.loads)
        if not plan.num_tokens:
            return {}
        num_accepted = self.scheduler.stats.accepted_tokens
        outputs = self.scheduler.apply(plan, result)
        num_accepted = self.scheduler.stats.accepted_tokens - num_accepted
        self.timings.add(plan, result, num_accepted, began_ns, planned_ns, submitted_ns, sampled_ns)
        if self.drafting is not None:
            self.drafting.applied(plan, self.timings.total_ns)
        self.scheduler.observer.stepped(plan, self.timings.moments_ns)
        return outputs

    def close(self) -> None:
        """Apply the steps in flight, and end what the engine is connected with."""
        self.transfer.close()
        while self._in_flight:  # they read and write blocks that are elsewhere
            with suppress(Exception):  # such as RankDeadError, which the engine has ended with
                self.settle()
        self.elsewhere.close()
        self.runner.close()

    def take_failures(self) -> list[Failure]:
        """The requests that ended with an error since the last call."""
        failures, self.scheduler.failures = self.scheduler.failures, []
        return failures

    def weights_written(
        self, forget_prefixes: bool = True, source: WeightsSource | None = None
    ) -> None:
        """Take note that weights were written. Running requests keep their keys and values.

        Args:
            forget_prefixes: forget every cached prefix, including those of running requests, so
                that no other request can hit them.
            source: where all weights were read from; None: from no directory.
        """
        if forget_prefixes:
            self.scheduler.forget_prefixes()
        self.sleeper.weights_written()
        # Cached prefixes of other weights may not get the name of those in the directory.
        self.elsewhere.weights_written(source if forget_prefixes else None)

    def reset_prefix_cache(
        self, preempt_running: bool = False, clear_elsewhere: bool = False
    ) -> bool:
        """Forget every cached prefix.

        Args:
            preempt_running: preempt running requests first; they are recomputed.
            clear_elsewhere: also forget what the engine has put elsewhere.

        Returns:
            False, without any change, if requests are running.
        """
        if preempt_running:
            self.scheduler.preempt_all()
        if self.scheduler.num_running:
            return False
        self._kv_cache.reset_prefix_cache()
        if clear_elsewhere:
            self.elsewhere.reset()
        return True
