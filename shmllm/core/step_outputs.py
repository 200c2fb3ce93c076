"""Writes the results of a step into one set of output columns for each front end.

This module is the only writer of output rows. It reads requests and step results; it must not
know how columns are transmitted.
"""

from __future__ import annotations

from collections.abc import Sequence

from shmllm.core.plan import StepPlan, StepResult
from shmllm.core.request import Request, RequestStatus
from shmllm.outputs.columns import Embeddings, FinishReason, OutputColumns


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
        token_ids: Sequence[int] = (),
        *,
        is_first: bool = False,
    ) -> None:
        """Append a row for a request whose status is up to date.

        Args:
            request: the request.
            finish: the finish reason to report; NONE if the request continues.
            token_ids: the tokens that the step sampled for it.
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
        if request.num_draft_tokens and request.status is RequestStatus.FINISHED:
            columns.drafted_rows.append(row)
            columns.drafted_counts.append(request.num_draft_tokens)
            columns.accepted_counts.append(request.num_accepted_tokens)
        columns.numbers.append(request.number)
        columns.finishes.append(finish)
        columns.counts.append(len(token_ids))
        columns.token_ids += token_ids

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


def attach_logprobs(plan: StepPlan, result: StepResult, outputs: dict[int, OutputColumns]) -> None:
    """Attach the log-probabilities of sampled tokens to the rows of their requests.

    A request that was aborted while the step ran has no row, so its log-probabilities are
    dropped, as are those of tokens behind the one that ended a request.
    """
    assert result.logprobs is not None, "a request asks for log-probabilities"
    rows = {
        client: {number: row for row, number in enumerate(columns.numbers)}
        for client, columns in outputs.items()
    }
    chosen: dict[int, tuple[list[range], list[int]]] = {}
    position = 0
    for sample, index in enumerate(plan.samples):
        request = plan.requests[index]
        if request.params.num_logprobs is None:
            continue
        row = rows.get(request.client, {}).get(request.number)
        if row is not None:
            spans, in_rows = chosen.setdefault(request.client, ([], []))
            spans.append(range(position, position + outputs[request.client].counts[row]))
            in_rows.append(row)
        position += 1 if result.counts is None else result.counts[sample]
    for client, (spans, in_rows) in chosen.items():
        outputs[client].logprobs = result.logprobs.columns(spans, in_rows)
