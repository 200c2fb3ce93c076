"""Runs batches of requests and keeps their times.

This module owns running a batch and collecting its measurements; it must not know how they are
summarized or shown.
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
    from shmllm.frontend.llm import LLM
    from shmllm.frontend.prompts import Prompt
    from shmllm.frontend.request_state import RequestState
    from shmllm.params.sampling import SamplingParams

FIRST_ORDINARY_TOKEN = 16


@dataclass
class Measured:
    """Measurements of one batch, or of several batches of the same kind.

    Attributes:
        seconds: duration of each batch at the front end, in seconds.
        prompt_tokens: number of prompt tokens in each batch.
        output_tokens: number of generated tokens in each batch.
        ttft_s: seconds from submission to the first token, per request.
        itl_s: seconds between two consecutive tokens of a request, per pair of tokens.
        tpot_s: mean seconds per token after the first, per request.
        e2e_s: seconds from submission to the last token, per request.
        steps: the engine's steps during each batch.
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
        """Adds the times of a finished request. A request without tokens adds nothing."""
        times, arrival = state.token_times or [], state.metrics.arrival_ts
        if not times or arrival is None:
            return
        self.ttft_s.append(times[0] - arrival)
        self.e2e_s.append(times[-1] - arrival)
        self.itl_s += [later - earlier for earlier, later in itertools.pairwise(times)]
        if len(times) > 1:
            self.tpot_s.append((times[-1] - times[0]) / (len(times) - 1))

    def all_steps(self) -> StepTable:
        """The steps of all batches in one table."""
        return np.concatenate(self.steps)


@dataclass(frozen=True)
class RandomPrompts:
    """Prompts of random tokens, all different.

    Attributes:
        rng: the source of randomness.
        length: number of tokens in each prompt, without the prefix.
        prefix_length: number of leading tokens that all prompts of a batch share.
    """

    rng: random.Random
    length: int
    prefix_length: int = 0

    def batch(self, llm: LLM, count: int) -> Sequence[Prompt]:
        """Makes the next `count` prompts from the vocabulary of `llm`."""
        first = min(FIRST_ORDINARY_TOKEN, llm.facts.vocab_size - 1)
        vocabulary = range(first, llm.facts.vocab_size)
        prefix = self.rng.choices(vocabulary, k=self.prefix_length)
        return [prefix + self.rng.choices(vocabulary, k=self.length) for _ in range(count)]


@dataclass(frozen=True)
class GivenPrompts:
    """Prompts from a file. Every batch holds the same ones.

    Attributes:
        prompts: the texts of the file, in its order.
    """

    prompts: Sequence[str]

    def batch(self, llm: LLM, count: int) -> Sequence[Prompt]:
        """The first `count` prompts; the list is repeated when it is too short."""
        return [self.prompts[index % len(self.prompts)] for index in range(count)]


def run_batch(
    llm: LLM,
    follower: StepFollower,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    measured: Measured,
) -> None:
    """Sends a batch, waits until it has finished, and adds its measurements to `measured`."""
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
