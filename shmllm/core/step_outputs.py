"""Gives the results of a step to its requests, and writes one set of output columns for each front
end.

This module is the only writer of output rows. It says why a request ends; the scheduler ends it. It
must not know how columns are transmitted, nor what a request holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shmllm.core.drafts import Drafts
from shmllm.core.plan import StepPlan, StepResult
from shmllm.core.request import Request, RequestStatus
from shmllm.outputs.columns import (
    Embeddings,
    FinishReason,
    MaskColumns,
    OutputColumns,
    Piece,
    RoutedColumns,
)
from shmllm.outputs.sampling_masks import SamplingMasks

Finish = Callable[[Request, FinishReason], None]
"""Ends a request; its status is FINISHED afterwards."""
Fail = Callable[[Request, str], None]
"""Ends a request with an error, which has a message."""


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

    def add_results(
        self, plan: StepPlan, result: StepResult, drafts: Drafts, finish: Finish, fail: Fail
    ) -> None:
        """Append sampled tokens to their requests, end those that end, and append all rows.

        Requests that have ended while the step ran get nothing.

        Args:
            plan: the plan of the step.
            result: its result.
            drafts: takes note of the drafted tokens that were right.
            finish: is called before the last row of a request.
            fail: is called for a request that ends with an error, which is reported separately:
                no row of the request has a finish reason.

        Raises:
            ValueError: the result does not have as many tokens as it says.
        """
        self._add_prompt_logprobs(plan, result)
        self._add_vectors(plan, result, finish)
        counts = [1] * len(plan.samples) if result.counts is None else result.counts
        if sum(counts) != len(result.token_ids):
            raise ValueError(f"{len(result.token_ids)} tokens for {counts} places")
        end = 0
        for sample, (index, count) in enumerate(zip(plan.samples, counts, strict=True)):
            begin, end = end, end + count
            request = plan.requests[index]
            if request.status is RequestStatus.FINISHED:
                continue
            if sample in result.failures:
                fail(request, result.failures[sample])
                continue
            if drafted := plan.drafts.get(index):
                drafts.settle(request, len(drafted), count - 1)
            is_first = len(request.token_ids) == request.num_prompt_tokens
            num_taken, reason = request.extend(result.token_ids[begin:end])
            if reason:
                reason = _end(request, reason, finish, fail)
            token_ids = result.token_ids[begin : begin + num_taken]
            self.add_row(request, reason, token_ids, is_first=is_first)

    def _add_vectors(self, plan: StepPlan, result: StepResult, finish: Finish) -> None:
        """Append what the step adds to the results of pooling requests, and end those whose prompts
        are complete."""
        for pool, piece in zip(plan.pools, result.vectors, strict=True):
            request = plan.requests[pool.index]
            if request.status is RequestStatus.FINISHED:
                continue
            columns = self._columns_of(request.client)
            if piece.data:
                if columns.embeddings is None:
                    columns.embeddings = Embeddings()
                columns.embeddings.add(request.number, piece)
            if pool.is_last:
                finish(request, FinishReason.STOP)
                self.add_row(request, FinishReason.STOP, is_first=True)

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

    def _add_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
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


def _end(request: Request, reason: FinishReason, finish: Finish, fail: Fail) -> FinishReason:
    """End a request. Returns the finish reason of its last row."""
    if reason is FinishReason.ERROR and request.constraint is not None:
        fail(request, request.constraint.error)
        return FinishReason.NONE
    finish(request, reason)
    return reason


def attach_details(plan: StepPlan, result: StepResult, outputs: dict[int, OutputColumns]) -> None:
    """Attach log-probabilities, experts and sampling masks of tokens to the rows of their requests,
    if there are any."""
    if result.logprobs is not None:
        _attach_logprobs(plan, result, outputs)
    if result.routed_experts:
        _attach_routed_experts(plan, result, outputs)
    if result.sampling_masks is not None:
        _attach_sampling_masks(plan, result, result.sampling_masks, outputs)


def _attach_logprobs(plan: StepPlan, result: StepResult, outputs: dict[int, OutputColumns]) -> None:
    """Attach the log-probabilities of sampled tokens to the rows of their requests.

    A request that was aborted while the step ran has no row, so its log-probabilities are
    dropped, as are those of tokens behind the one that ended a request.
    """
    assert result.logprobs is not None, "a request asks for log-probabilities"
    rows = _rows_of(outputs)
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


def _attach_routed_experts(
    plan: StepPlan, result: StepResult, outputs: dict[int, OutputColumns]
) -> None:
    """Attach the experts of tokens to the rows of their requests, as `_attach_logprobs` does."""
    rows = _rows_of(outputs)
    for index, piece in zip(plan.samples, result.routed_experts, strict=True):
        request = plan.requests[index]
        if request.number in rows.get(request.client, {}):
            columns = outputs[request.client]
            if columns.routed_experts is None:
                columns.routed_experts = RoutedColumns()
            columns.routed_experts.add(request.number, piece)


def _attach_sampling_masks(
    plan: StepPlan, result: StepResult, masks: SamplingMasks, outputs: dict[int, OutputColumns]
) -> None:
    """Attach the tokens among which those of each row were drawn. A greedy request has none."""
    rows = _rows_of(outputs)
    position = 0
    for sample, index in enumerate(plan.samples):
        request = plan.requests[index]
        row = rows.get(request.client, {}).get(request.number)
        if row is not None and not request.params.is_greedy:
            columns = outputs[request.client]
            data = masks.encoded(position, position + columns.counts[row])
            if columns.sampling_masks is None:
                columns.sampling_masks = MaskColumns()
            columns.sampling_masks.add(request.number, Piece(0, data))
        position += 1 if result.counts is None else result.counts[sample]


def _rows_of(outputs: dict[int, OutputColumns]) -> dict[int, dict[int, int]]:
    """Return the row of each request, by front end and number."""
    return {
        client: {number: row for row, number in enumerate(columns.numbers)}
        for client, columns in outputs.items()
    }
