"""The engine without its surroundings: schedule, run, apply.

Where the runner overlaps, a step is scheduled and submitted while the one before it runs, whose
tokens are taken then: at most two are submitted, and what a step needs of the tokens before it
waits for its `release`. Otherwise each step is run to its end.

No transport, no signals, no process: those are `engine.process`. The same core runs in
the caller's process when `LLM(multiprocess=False)` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np

from shmllm.config.engine import EngineConfig
from shmllm.core.grammar_queue import GrammarQueue
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.observer import Observer
from shmllm.core.pausing import PAUSES, PauseMode, Pauses
from shmllm.core.plan import StepPlan
from shmllm.core.request import Request
from shmllm.core.scheduler import Failure, Scheduler
from shmllm.core.sleeping import Level
from shmllm.engine.runner import Runner, Step
from shmllm.engine.sleep import Sleeper, Slept
from shmllm.engine.weight_updates import WeightUpdates
from shmllm.errors import EnginePausedError, RequestError
from shmllm.outputs.columns import FinishReason, OutputColumns
from shmllm.params.pooling import Pooling
from shmllm.params.sampling import SamplingParams, TokenSequences

UNSEEDED = 1 << 63


def _nobody_sleeps() -> None:
    pass


@dataclass(slots=True)
class StepTimings:
    """Time that the steps so far took, by phase, and the moments of the last one.

    Where steps overlap, schedule and prepare are those of the step after, and execute is what
    remained to be waited for.

    Attributes:
        num_steps: whose results were applied.
        moments_ns: when the last step began, and when schedule, prepare, execute, sample and
            apply ended, on `time.perf_counter_ns()`.
        num_tokens: computed in the last step.
        num_requests: that took part in it.
        device_ns: how long a device was busy with it; 0 where there is none.
    """

    num_steps: int = 0
    schedule_ns: int = 0
    prepare_ns: int = 0
    execute_ns: int = 0
    sample_ns: int = 0
    apply_ns: int = 0
    moments_ns: tuple[int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0)
    num_tokens: int = 0
    num_requests: int = 0
    device_ns: int = 0

    def add(
        self, plan: StepPlan, device_ns: int, *moments_ns: *tuple[int, int, int, int, int, int]
    ) -> None:
        """Count a step that had these moments."""
        self.num_steps += 1
        self.device_ns = device_ns
        self.num_tokens, self.num_requests = plan.num_tokens, len(plan.requests)
        began, planned, prepared, executed, sampled, applied = moments_ns
        self.schedule_ns += planned - began
        self.prepare_ns += prepared - planned
        self.execute_ns += executed - prepared
        self.sample_ns += sampled - executed
        self.apply_ns += applied - sampled
        self.moments_ns = moments_ns


class EngineCore:
    """
    Args:
        config: what the engine was started with.
        runner: holds the model and the KV cache.
        wake: called from any thread when there is something to do for `step` again.

    Attributes:
        phases: where the time went.
        holds: who has the engine hold still.
        sleeper: gives memory back, and has it again.
        weights: their updates, and the version in force.
    """

    def __init__(
        self, config: EngineConfig, runner: Runner, wake: Callable[[], None] = _nobody_sleeps
    ) -> None:
        self.facts = runner.facts
        self.phases = StepTimings()
        self.runner = runner
        self._kv_cache = KVCacheManager(
            num_blocks=self.facts.num_blocks + 1,
            block_size=self.facts.block_size,
            enable_prefix_caching=config.cache.enable_prefix_caching,
        )
        self.scheduler = Scheduler(config.scheduler, self._kv_cache)
        self.pauses = Pauses()
        self.sleeper = Sleeper(self.scheduler, self._kv_cache, self.pauses, runner.memory)
        self._under_way: tuple[StepPlan, Step] | None = None
        self._unsent: list[tuple[int, OutputColumns]] = []
        self.weights = WeightUpdates(
            lambda: self.runner.model, self.weights_written, self.abort_all
        )
        self._grammars = GrammarQueue(self.scheduler, runner.compile_grammar, wake)
        self._next_seed = UNSEEDED | (config.load.seed % 2**31 << 32)

    @property
    def observer(self) -> Observer:
        """Who hears of requests and steps."""
        return self.scheduler.observer

    @observer.setter
    def observer(self, observer: Observer) -> None:
        self.scheduler.observer = observer

    @property
    def num_used_blocks(self) -> int:
        return self._kv_cache.num_used_blocks

    @property
    def is_under_way(self) -> bool:
        """Whether a step was submitted whose tokens were not taken yet."""
        return self._under_way is not None

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do: a request, or what came of a step."""
        return self.is_under_way or self.scheduler.has_unfinished()

    def add(
        self,
        client: int,
        number: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        cache_salt: str = "",
        *,
        priority: int = 0,
        bad_words: TokenSequences = (),
        grammar: str = "",
        embeds: Any = None,
    ) -> str | None:
        """Queue a request. Returns why it cannot be served; None if it is queued.

        Raises:
            EnginePausedError: not now.
            RequestError: not with these `embeds`.
        """
        refusal = self._refuse(client, number, prompt_token_ids, self.facts.max_model_len - 1)
        if refusal is not None:
            return refusal
        most_logprobs = max(params.logprobs or 0, params.prompt_logprobs or 0)
        if -1 in (params.logprobs, params.prompt_logprobs):
            most_logprobs = self.facts.vocab_size
        if most_logprobs > self.facts.max_logprobs:
            return f"{most_logprobs:,} logprobs exceed max_logprobs {self.facts.max_logprobs:,}"
        if embeds is not None:
            embeds = self.runner.check_embeds(embeds, len(prompt_token_ids))
        if params.seed is None:
            self._next_seed += 1
        request = Request(
            client,
            number,
            prompt_token_ids,
            params,
            seed=self._next_seed if params.seed is None else params.seed,
            max_model_len=self.facts.max_model_len,
            eos_token_ids=self.facts.eos_token_ids,
            cache_salt=cache_salt,
            priority=priority,
            bad_words=bad_words,
            embeds=embeds,
        )
        if grammar:
            return self._grammars.add(request, grammar)
        self.scheduler.add(request)
        return None

    def pool(
        self,
        client: int,
        number: int,
        prompt_token_ids: Sequence[int],
        pooling: Pooling,
        cache_salt: str = "",
        *,
        priority: int = 0,
        embeds: Any = None,
    ) -> str | None:
        """Queue a prompt to make a vector of; otherwise as `add`. It may be one token longer:
        nothing is generated."""
        refusal = self._refuse(client, number, prompt_token_ids, self.facts.max_model_len)
        if refusal is not None:
            return refusal
        if embeds is not None:
            embeds = self.runner.check_embeds(embeds, len(prompt_token_ids))
        skips = not pooling.reads_prefix_cache
        self.scheduler.add(
            Request(
                client,
                number,
                prompt_token_ids,
                SamplingParams(temperature=0, skip_reading_prefix_cache=skips),
                seed=0,
                max_model_len=self.facts.max_model_len,
                cache_salt=cache_salt,
                priority=priority,
                embeds=embeds,
                pooling=pooling,
            )
        )
        return None

    def _refuse(self, client: int, number: int, ids: Sequence[int], most: int) -> str | None:
        if refusal := self.pauses.refusal:
            raise EnginePausedError(refusal)
        if self.scheduler.knows(client, number):
            return f"request number {number} is in use"
        if not 0 < len(ids) <= most:
            longest = self.facts.max_model_len
            return f"a prompt of {len(ids):,} tokens does not fit max_model_len {longest:,}"
        array = np.asarray(ids)
        if not 0 <= array.min() <= array.max() < self.facts.vocab_size:
            return f"a token id lies outside the vocabulary of {self.facts.vocab_size:,}"
        return None

    def abort(self, client: int, numbers: Sequence[int]) -> OutputColumns:
        """End requests now. Returns a last row for each that had not ended before."""
        ended = [r for n in numbers if (r := self.scheduler.abort(client, n)) is not None]
        preempted = [row for row, request in enumerate(ended) if request.num_preemptions]
        return OutputColumns(
            step=self.scheduler.stats.steps,
            numbers=[request.number for request in ended],
            counts=[0] * len(ended),
            finishes=[FinishReason.ABORT] * len(ended),
            preempted_rows=preempted,
            preempted_counts=[ended[row].num_preemptions for row in preempted],
        )

    def pause(self, client: int, mode: PauseMode) -> int:
        """Hold still for a front end, until it resumes or is gone. Returns how many requests
        have not ended; `take_outputs` has those that ended by this.

        Raises:
            RequestError: to wait for requests that sleep would have no end.
        """
        unfinished = self.scheduler.has_unfinished()
        if mode is PauseMode.WAIT and unfinished and self.sleeper.is_frozen:
            raise RequestError(
                "the engine sleeps, so that what it has would not end: wake_up() first, or "
                "pause with mode 'keep' or 'abort'"
            )
        if mode is PauseMode.ABORT:
            self.abort_all()
        self.pauses.add(client, PAUSES[mode])
        return self.scheduler.num_running + self.scheduler.num_waiting

    def resume(self, client: int) -> bool:
        """End a front end's pause. Returns whether the engine goes on: none pauses it."""
        self.pauses.drop(client)
        return not self.pauses

    def sleep(self, client: int, level: Level, mode: PauseMode) -> Slept | int:
        """Fall asleep for a front end, until anyone has the engine wake up; `take_outputs` has
        the requests that ended by this. With WAIT it returns how many requests have not ended,
        and is to be called again, as long as there are some that can."""
        if mode is PauseMode.WAIT and (unfinished := self.sleeper.drain(client)):
            return unfinished
        if mode is PauseMode.ABORT:
            self.abort_all()
        return self.sleeper.sleep(client, level, mode)

    def forget_client(self, client: int) -> None:
        """A front end is gone: end its requests and what it asked the engine for."""
        self.resume(client)
        self.sleeper.stop_draining(client)
        self.weights.abandon(client)
        self.scheduler.abort_client(client)

    def abort_all(self) -> None:
        """End all requests now; `take_outputs` has their last rows."""
        for client, numbers in self.scheduler.unfinished().items():
            self._unsent.append((client, self.abort(client, numbers)))

    def settle(self) -> None:
        """Take what comes of the step under way, if there is one; `take_outputs` has it. Nothing
        runs then, and weights and memory may be changed."""
        now_ns = perf_counter_ns()
        self._unsent += self._finish(now_ns, now_ns).items()

    def take_outputs(self) -> list[tuple[int, OutputColumns]]:
        """What came about outside of `step`, by front end, since this was last asked."""
        outputs, self._unsent = self._unsent, []
        return outputs

    def step(self) -> dict[int, OutputColumns]:
        """Run one step. Returns each front end's columns; empty if nothing came of it yet."""
        began_ns = perf_counter_ns()
        plan = self._schedule()
        planned_ns = perf_counter_ns()
        submitted = (plan, self.runner.submit(plan)) if plan is not None else None
        try:
            outputs = self._finish(began_ns, planned_ns)
        finally:
            # Were it not released when this failed, all that is submitted later would wait, too.
            self._under_way = submitted
            if submitted is not None:
                submitted[1].release()
        if submitted is not None and not self.runner.overlaps:
            return self._finish(began_ns, planned_ns)
        return outputs

    def _schedule(self) -> StepPlan | None:
        if self.pauses.is_frozen:
            return None
        self._grammars.release_ready()
        plan = self.scheduler.schedule()
        return plan if plan.num_tokens else None

    def _finish(self, began_ns: int, planned_ns: int) -> dict[int, OutputColumns]:
        """Wait for the step under way, if there is one, and give its tokens to the requests."""
        if self._under_way is None:
            return {}
        plan, step = self._under_way
        self._under_way = None
        submitted_ns = perf_counter_ns()
        result = step.result()
        sampled_ns = perf_counter_ns()
        outputs = self.scheduler.apply(plan, result)
        prepared_ns, executed_ns = result.computing_ns or (submitted_ns, sampled_ns)
        moments_ns = began_ns, planned_ns, prepared_ns, executed_ns, sampled_ns, perf_counter_ns()
        self.phases.add(plan, result.device_ns, *moments_ns)
        self.scheduler.observer.stepped(plan, self.phases.moments_ns)
        return outputs

    def take_failures(self) -> list[Failure]:
        """Requests that ended with an error since this was last asked."""
        failures, self.scheduler.failures = self.scheduler.failures, []
        return failures

    def weights_written(self, forget_prefixes: bool = True) -> None:
        """Weights were. Requests that run go on with the keys and values they have.

        Args:
            forget_prefixes: forget every cached prefix, also of those that run: no other
                request will find them.
        """
        if forget_prefixes:
            self.scheduler.forget_prefixes()
        self.sleeper.weights_written()

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget every cached prefix. False, and nothing forgotten, while requests run.

        Args:
            preempt_running: have running requests give their blocks back first; they are
                recomputed.
        """
        if preempt_running:
            self.scheduler.preempt_all()
        if self.scheduler.num_running:
            return False
        self._kv_cache.reset_prefix_cache()
        return True
