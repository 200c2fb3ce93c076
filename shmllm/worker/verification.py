"""Compares the tokens that a step sampled behind drafted ones with the drafts.

This module must not know who drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shmllm.core.plan import StepPlan
from shmllm.outputs.logprobs import TokenLogprobs
from shmllm.worker.batch import SamplerOutput


@dataclass(slots=True)
class Accepted:
    """The tokens that a step gives its requests, as in `StepResult`."""

    token_ids: list[int]
    counts: list[int] | None
    logprobs: TokenLogprobs | None
    failures: dict[int, str]


def accept(plan: StepPlan, sampled: SamplerOutput) -> Accepted:
    """Keep, for each request, the sampled tokens up to the first that differs from its draft.

    Args:
        plan: the step's plan, with the drafts.
        sampled: the tokens sampled behind the last known and the drafted tokens of each of the
            plan's `samples`.
    """
    token_ids, failures = sampled.token_ids.tolist(), dict(sampled.failures)
    if not plan.drafts:
        return Accepted(token_ids, None, sampled.logprobs, failures)
    counts: list[int] = []
    kept: list[int] = []
    scored: list[int] = []
    num_scored = begin = 0
    for sample, index in enumerate(plan.samples):
        drafts = plan.drafts.get(index, ())
        count = 1 + _num_equal(drafts, token_ids[begin : begin + len(drafts)])
        counts.append(count)
        kept += token_ids[begin : begin + count]
        if plan.requests[index].params.num_logprobs is not None:
            scored += range(num_scored, num_scored + count)
            num_scored += 1 + len(drafts)
        if begin in failures:
            failures[sample] = failures.pop(begin)
        begin += 1 + len(drafts)
    logprobs = None if sampled.logprobs is None else sampled.logprobs.take(scored)
    return Accepted(kept, counts, logprobs, failures)


def _num_equal(drafts: Sequence[int], token_ids: Sequence[int]) -> int:
    """How many tokens at the beginning of both are equal."""
    for place, (draft, token) in enumerate(zip(drafts, token_ids, strict=True)):
        if draft != token:
            return place
    return len(drafts)
