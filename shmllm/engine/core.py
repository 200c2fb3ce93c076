"""The engine without its surroundings: schedule, run, apply.

No transport, no signals, no process: those are `engine.process`. The same core runs in
the caller's process when `LLM(multiprocess=False)` asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol

import numpy as np

from shmllm.config import EngineConfig, EngineFacts
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.plan import StepPlan, StepResult
from shmllm.core.request import Request
from shmllm.core.scheduler import Scheduler
from shmllm.outputs import FinishReason, OutputColumns
from shmllm.sampling_params import SamplingParams, TokenSequences

UNSEEDED = 1 << 63


class Runner(Protocol):
    """What executes the plans."""

    facts: EngineFacts

    def execute(self, plan: StepPlan) -> StepResult: ...


@dataclass(slots=True)
class Phases:
    """Time that the steps so far took, by phase."""

    schedule_ns: int = 0
    execute_ns: int = 0
    apply_ns: int = 0


class EngineCore:
    """
    Args:
        config: what the engine was started with.
        runner: holds the model and the KV cache.

    Attributes:
        phases: where the time went.
    """

    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        self.facts = runner.facts
        self.phases = Phases()
        self._runner = runner
        self._kv_cache = KVCacheManager(
            num_blocks=self.facts.num_blocks + 1,
            block_size=self.facts.block_size,
            enable_prefix_caching=config.cache.enable_prefix_caching,
        )
        self.scheduler = Scheduler(config.scheduler, self._kv_cache)
        self._next_seed = UNSEEDED | (config.load.seed % 2**31 << 32)

    @property
    def num_used_blocks(self) -> int:
        return self._kv_cache.num_used_blocks

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
        grammar_kind: int = 0,
        grammar: str = "",
    ) -> str | None:
        """Queue a request. Returns why it cannot be served; None if it is queued."""
        if self.scheduler.knows(client, number):
            return f"request number {number} is in use"
        length, most = len(prompt_token_ids), self.facts.max_model_len
        if not 0 < length < most:
            return f"a prompt of {length:,} tokens does not fit max_model_len {most:,}"
        ids = np.asarray(prompt_token_ids)
        if not 0 <= ids.min() <= ids.max() < self.facts.vocab_size:
            return f"a token id lies outside the vocabulary of {self.facts.vocab_size:,}"
        most_logprobs = max(params.logprobs or 0, params.prompt_logprobs or 0)
        if -1 in (params.logprobs, params.prompt_logprobs):
            most_logprobs = self.facts.vocab_size
        if most_logprobs > self.facts.max_logprobs:
            return f"{most_logprobs:,} logprobs exceed max_logprobs {self.facts.max_logprobs:,}"
        if params.seed is None:
            self._next_seed += 1
        self.scheduler.add(
            Request(
                client,
                number,
                prompt_token_ids,
                params,
                seed=self._next_seed if params.seed is None else params.seed,
                max_model_len=most,
                eos_token_ids=self.facts.eos_token_ids,
                cache_salt=cache_salt,
                priority=priority,
                bad_words=bad_words,
                grammar_kind=grammar_kind,
                grammar=grammar,
            )
        )
        return None

    def abort(self, client: int, numbers: Sequence[int]) -> OutputColumns:
        """End requests now. Returns a last row for each that had not ended before."""
        known = [n for n in numbers if self.scheduler.abort(client, n) is not None]
        return OutputColumns(
            step=self.scheduler.stats.steps,
            numbers=known,
            counts=[0] * len(known),
            finishes=[FinishReason.ABORT] * len(known),
        )

    def step(self) -> dict[int, OutputColumns]:
        """Run one step. Returns each front end's columns; empty if nothing came of it yet."""
        began_ns = perf_counter_ns()
        plan = self.scheduler.schedule()
        if not plan.num_tokens:
            return {}
        planned_ns = perf_counter_ns()
        result = self._runner.execute(plan)
        executed_ns = perf_counter_ns()
        outputs = self.scheduler.apply(plan, result)
        phases = self.phases
        phases.schedule_ns += planned_ns - began_ns
        phases.execute_ns += executed_ns - planned_ns
        phases.apply_ns += perf_counter_ns() - executed_ns
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. False, and nothing forgotten, while requests run."""
        if self.scheduler.num_running:
            return False
        self._kv_cache.reset_prefix_cache()
        return True
