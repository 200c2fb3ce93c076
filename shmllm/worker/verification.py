"""Compares the tokens that a step sampled behind drafted ones with the drafts.

This module must not know who drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

from shmllm.core.plan import StepPlan, StepResult
from shmllm.worker.batch import SamplerOutput


def accept(plan: StepPlan, sampled: SamplerOutput) -> StepResult:
    """Keep, for each request, the sampled tokens up to the first that differs from its draft.

    Args:
        plan: the step's plan, with the drafts.
        sampled: the tokens sampled behind the last known and the drafted tokens of each of the
            plan's `samples`.

    Returns:
        The tokens, their log-probabilities, and failures; the caller adds the rest.
    """
    token_ids, failures = sampled.token_ids.tolist(), dict(sampled.failures)
    masks = sampled.sampling_masks
    if not plan.drafts:
        return StepResult(token_ids, sampled.logprobs, failures=failures, sampling_masks=masks)
    counts: list[int] = []
    kept: list[int] = []  # indices of samples
    scored: list[int] = []
    num_scored = begin = 0
    for sample, index in enumerate(plan.samples):
        drafts = plan.drafts.get(index, ())
        count = 1 + _num_equal(drafts, token_ids[begin : begin + len(drafts)])
        counts.append(count)
        kept += range(begin, begin + count)
        if plan.requests[index].params.num_logprobs is not None:
            scored += range(num_scored, num_scored + count)
            num_scored += 1 + len(drafts)
        if begin in failures:
            failures[sample] = failures.pop(begin)
        begin += 1 + len(drafts)
    logprobs = None if sampled.logprobs is None else sampled.logprobs.take(scored)
    return StepResult(
        [token_ids[index] for index in kept],
        logprobs,
        sampling_masks=None if masks is None else masks.take(kept),
        failures=failures,
        counts=counts,
    )


def _num_equal(drafts: Sequence[int], token_ids: Sequence[int]) -> int:
    """How many tokens at the beginning of both are equal."""
    for place, (draft, token) in enumerate(zip(drafts, token_ids, strict=True)):
        if draft != token:
            return place
    return len(drafts)
