"""Pooling requests in plans and results: what the runner sums up, and whose vectors come out.

A pooling request catches up with its prompt like any other, and ends with the step in which
it does. Knows requests and columns; vectors pass through as bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from shmllm.core.plan import Pool, StepPlan, StepResult
from shmllm.core.request import Request, RequestStatus
from shmllm.outputs.columns import Embeddings, FinishReason, OutputColumns


def plan_pool(plan: StepPlan, request: Request) -> None:
    """Called when the request's tokens of this step are about to become its next column."""
    assert request.pooling is not None
    is_last = request.num_computed_tokens == len(request.token_ids)
    plan.pools.append(Pool(len(plan.requests), request.pooling, is_last))


def take_vectors(
    plan: StepPlan, result: StepResult, outputs: dict[int, OutputColumns]
) -> Iterator[Request]:
    """Put vectors, and a last row for each, into the columns; yields the requests that end."""
    pools = (pool for pool in plan.pools if pool.is_last)
    for pool, vector in zip(pools, result.vectors, strict=True):
        request = plan.requests[pool.index]
        if request.status is RequestStatus.FINISHED:
            continue
        columns = outputs.setdefault(request.client, OutputColumns(step=plan.step))
        if columns.embeddings is None:
            columns.embeddings = Embeddings()
        columns.embeddings.numbers.append(request.number)
        columns.embeddings.vectors.append(vector)
        columns.cached_rows.append(len(columns.numbers))
        columns.cached_counts.append(request.num_cached_tokens or 0)
        columns.queued_ns.append(request.queued_ns)
        columns.scheduled_ns.append(request.scheduled_ns)
        if request.num_preemptions:
            columns.preempted_rows.append(len(columns.numbers))
            columns.preempted_counts.append(request.num_preemptions)
        columns.numbers.append(request.number)
        columns.counts.append(0)
        columns.finishes.append(FinishReason.STOP)
        yield request
