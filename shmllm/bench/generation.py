"""Batches of requests, timed.

Owns how a batch is run and what is kept of it; must not know what is made of the numbers.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from shmllm.bench.steps import StepFollower, StepTable

if TYPE_CHECKING:
    from shmllm.frontend.input_processor import Prompt
    from shmllm.frontend.llm import LLM
    from shmllm.frontend.request_state import RequestState
    from shmllm.params.sampling import SamplingParams

FIRST_ORDINARY_TOKEN = 16


@dataclass
class Measured:
    """What was measured of one batch, or of several alike.

    Attributes:
        seconds: of each batch, at the front end.
        prompt_tokens: in each batch.
        output_tokens: in each batch.
        ttft_s: from submission to each request's first token.
        itl_s: between any two tokens of a request that follow each other.
        tpot_s: each request's mean time for a token behind the first one.
        e2e_s: from submission to each request's last token.
        steps: of the engine meanwhile.
    """

    seconds: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    steps: list[StepTable] = field(default_factory=list)

    def add_request(self, state: RequestState) -> None:
        """Count a request that has ended; one without tokens has no times."""
        times = state.token_times or []
        if not times:
            return
        arrival = state.metrics.arrival_time
        self.ttft_s.append(times[0] - arrival)
        self.e2e_s.append(times[-1] - arrival)
        self.itl_s += [later - earlier for earlier, later in itertools.pairwise(times)]
        if len(times) > 1:
            self.tpot_s.append((times[-1] - times[0]) / (len(times) - 1))

    def all_steps(self) -> StepTable:
        return np.concatenate(self.steps)


@dataclass(frozen=True)
class RandomPrompts:
    """Prompts of random tokens, no two alike.

    Attributes:
        rng: makes them.
        length: tokens of each, without the prefix.
        prefix_length: tokens that all prompts of a batch begin with.
    """

    rng: random.Random
    length: int
    prefix_length: int = 0

    def batch(self, llm: LLM, count: int) -> Sequence[Prompt]:
        first = min(FIRST_ORDINARY_TOKEN, llm.facts.vocab_size - 1)
        vocabulary = range(first, llm.facts.vocab_size)
        prefix = self.rng.choices(vocabulary, k=self.prefix_length)
        return [prefix + self.rng.choices(vocabulary, k=self.length) for _ in range(count)]


@dataclass(frozen=True)
class GivenPrompts:
    """Prompts from a file, the same ones in each batch."""

    prompts: Sequence[str]

    def batch(self, llm: LLM, count: int) -> Sequence[Prompt]:
        return [self.prompts[index % len(self.prompts)] for index in range(count)]


def run_batch(
    llm: LLM,
    follower: StepFollower,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    measured: Measured,
) -> None:
    """Send a batch and wait for its end; what was measured is added to `measured`."""
    requests = llm.front_end.prepare(prompts, params)
    finished: list[RequestState] = []
    follower.begin()
    began = time.monotonic()
    for changed in llm.front_end.serve(requests, time_tokens=True):
        finished += [state for state in changed if state.finish_reason is not None]
        follower.keep_up()
    measured.seconds.append(time.monotonic() - began)
    measured.steps.append(follower.finish(lambda: llm.get_metrics()["steps"]))
    measured.prompt_tokens.append(sum(len(r.prompt_token_ids) * params.n for r in requests))
    measured.output_tokens.append(sum(len(state.token_ids) for state in finished))
    for state in finished:
        measured.add_request(state)
