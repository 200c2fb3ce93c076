"""Log-probabilities in plans and results: which to compute, and whose they are.

Knows requests and columns; the numbers pass through.
"""

from __future__ import annotations

from shmllm.core.plan import PromptScores, StepPlan, StepResult
from shmllm.core.request import Request, RequestStatus
from shmllm.outputs.columns import OutputColumns
from shmllm.outputs.logprobs import TokenLogprobs


def plan_prompt_scores(plan: StepPlan, request: Request, k: int) -> None:
    """A token's log-probability comes with the computation of the token before it."""
    first = request.next_prompt_logprob
    end = min(request.num_computed_tokens + 1, request.num_prompt_tokens)
    if first < end:
        plan.prompt_scores.append(PromptScores(len(plan.requests), first, end, k))
        request.next_prompt_logprob = end


def take_prompt_logprobs(
    plan: StepPlan, result: StepResult, outputs: dict[int, OutputColumns]
) -> None:
    for scores, logprobs in zip(plan.prompt_scores, result.prompt_logprobs, strict=True):
        request = plan.requests[scores.index]
        if request.status is not RequestStatus.FINISHED:
            columns = outputs.setdefault(request.client, OutputColumns(step=plan.step))
            columns.prompt_logprobs.append(logprobs.of_prompt(request.number, scores.first))


def take_logprobs(
    plan: StepPlan, logprobs: TokenLogprobs, outputs: dict[int, OutputColumns]
) -> None:
    """Give each front end the log-probabilities of its rows. Those of requests that were
    aborted meanwhile have no row."""
    rows = {
        client: {number: row for row, number in enumerate(columns.numbers)}
        for client, columns in outputs.items()
    }
    taken: dict[int, tuple[list[int], list[int]]] = {}
    asking = (plan.requests[index] for index in plan.samples)
    asking = (request for request in asking if request.params.logprobs is not None)
    for position, request in enumerate(asking):
        row = rows.get(request.client, {}).get(request.number)
        if row is not None:
            chosen, in_rows = taken.setdefault(request.client, ([], []))
            chosen.append(position)
            in_rows.append(row)
    for client, (chosen, in_rows) in taken.items():
        outputs[client].logprobs = logprobs.columns(chosen, in_rows)
