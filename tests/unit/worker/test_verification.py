"""Which of the tokens that were sampled behind drafts a request gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shmllm.core.plan import StepPlan
from shmllm.core.request import Request
from shmllm.outputs.logprobs import TokenLogprobs
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.worker.batch import SamplerOutput
from shmllm.worker.verification import accept


def plan_of(*drafts: list[int], logprobs: tuple[int, ...] = ()) -> StepPlan:
    """A plan of requests with these drafts, some of which ask for log-probabilities."""
    plan = StepPlan(1)
    for number, draft in enumerate(drafts):
        params = SamplingParams(logprobs=1 if number in logprobs else None)
        submitted = EngineCoreRequest(number, [1, 2], params)
        request = Request(0, submitted, seed=0, max_model_len=64)
        request.num_computed_tokens = 2 + len(draft)
        plan.add_tokens(request, 1 + len(draft), draft)
    return plan


def sampled(tokens: list[int], num_scored: int = 0, **options: Any) -> SamplerOutput:
    values = np.arange(num_scored)
    scores = TokenLogprobs(
        [1] * num_scored,
        values.astype(np.float32),
        values.astype(np.int32),
        values.astype(np.int32),
        values.astype(np.float32),
    )
    return SamplerOutput(np.array(tokens), scores if num_scored else None, **options)


@pytest.mark.parametrize(
    ("draft", "tokens", "count"),
    [
        ([5, 6, 7], [5, 6, 7, 8], 4),
        ([5, 6, 7], [5, 6, 9, 8], 3),
        ([5, 6, 7], [4, 6, 7, 8], 1),
        ([5], [5, 5], 2),
    ],
)
def test_tokens_up_to_the_first_that_was_not_drafted(
    draft: list[int], tokens: list[int], count: int
) -> None:
    accepted = accept(plan_of(draft), sampled(tokens))
    assert (accepted.token_ids, accepted.counts) == (tokens[:count], [count])


def test_without_drafts_each_request_gets_its_token() -> None:
    accepted = accept(plan_of([], []), sampled([3, 4]))
    assert (accepted.token_ids, accepted.counts) == ([3, 4], None)


def test_log_probabilities_are_those_of_the_tokens_that_are_kept() -> None:
    plan = plan_of([5, 6], [7], [], [1, 2, 3], logprobs=(0, 2, 3))
    accepted = accept(plan, sampled([5, 9, 9, 7, 8, 4, 1, 2, 0, 0], num_scored=8))
    assert accepted.counts == [2, 2, 1, 3]
    assert accepted.token_ids == [5, 9, 7, 8, 4, 1, 2, 0]
    assert accepted.logprobs is not None
    assert accepted.logprobs.logprobs.tolist() == [0, 1, 3, 4, 5, 6]


def test_failures_are_those_of_requests() -> None:
    output = sampled([5, 6, 4, 3], failures={2: "a", 3: "b"})
    assert accept(plan_of([5], [], []), output).failures == {1: "a", 2: "b"}
