"""Writes the results of a step into one set of output columns for each front end.

This module is the only writer of output rows. It reads requests and step results; it must not
know how columns are transmitted.
"""

from __future__ import annotations

from shmllm.core.plan import StepPlan, StepResult
from shmllm.core.request import Request, RequestStatus
from shmllm.outputs.columns import Embeddings, FinishReason, OutputColumns
from shmllm.outputs.logprobs import TokenLogprobs


class StepOutputs:
    """
    Args:
        step: the number of the step.

    Attributes:
        by_client: the columns of each front end that has any.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self.by_client: dict[int, OutputColumns] = {}

    def add_row(
        self,
        request: Request,
        finish: FinishReason,
        token_id: int | None = None,
        *,
        is_first: bool = False,
    ) -> None:
        """Append a row for a request whose status is up to date.

        Args:
            request: the request.
            finish: the finish reason to report; NONE if the request continues.
            token_id: the token that the step sampled; None if it sampled none.
            is_first: the row is the request's first one, which also reports its prefix-cache
                hit and when it was queued and scheduled.
        """
        columns = self._columns_of(request.client)
        row = len(columns.numbers)
        if is_first:
            columns.cached_rows.append(row)
            columns.cached_counts.append(request.num_cached_tokens or 0)
            columns.queued_ns.append(request.queued_ns)
            columns.scheduled_ns.append(request.scheduled_ns)
        if request.num_preemptions and request.status is RequestStatus.FINISHED:
            columns.preempted_rows.append(row)
            columns.preempted_counts.append(request.num_preemptions)
        columns.numbers.append(request.number)
        columns.finishes.append(finish)
        if token_id is None:
            columns.counts.append(0)
        else:
            columns.counts.append(1)
            columns.token_ids.append(token_id)

    def add_vector(self, request: Request, vector: bytes) -> None:
        """Append the vector of a pooling request, whose row follows."""
        columns = self._columns_of(request.client)
        if columns.embeddings is None:
            columns.embeddings = Embeddings()
        columns.embeddings.numbers.append(request.number)
        columns.embeddings.vectors.append(vector)

    def add_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        """Append the log-probabilities of prompt tokens, except those of finished requests."""
        for scores, logprobs in zip(plan.prompt_scores, result.prompt_logprobs, strict=True):
            request = plan.requests[scores.index]
            if request.status is not RequestStatus.FINISHED:
                columns = self._columns_of(request.client)
                columns.prompt_logprobs.append(logprobs.for_prompt(request.number, scores.first))

    def _columns_of(self, client: int) -> OutputColumns:
        columns = self.by_client.get(client)
        if columns is None:
            columns = self.by_client[client] = OutputColumns(step=self._step)
        return columns


def attach_logprobs(
    plan: StepPlan, logprobs: TokenLogprobs, outputs: dict[int, OutputColumns]
) -> None:
    """Attach the log-probabilities of sampled tokens to the rows of their requests.

    A request that was aborted while the step ran has no row, so its log-probabilities are
    dropped.
    """
    rows = {
        client: {number: row for row, number in enumerate(columns.numbers)}
        for client, columns in outputs.items()
    }
    chosen: dict[int, tuple[list[int], list[int]]] = {}
    sampled = (plan.requests[index] for index in plan.samples)
    asking = (request for request in sampled if request.params.num_logprobs is not None)
    for position, request in enumerate(asking):
        row = rows.get(request.client, {}).get(request.number)
        if row is not None:
            positions, in_rows = chosen.setdefault(request.client, ([], []))
            positions.append(position)
            in_rows.append(row)
    for client, (positions, in_rows) in chosen.items():
        outputs[client].logprobs = logprobs.columns(positions, in_rows)
