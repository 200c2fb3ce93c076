"""The batch of requests that custom logits processors see.

A request enters the batch when it first gets a token in its row, and leaves it when it ends, is
preempted or fails. The batch has no gaps: a request that enters takes the index of one that left,
and otherwise the last one moves there, as in vLLM. This module must not know the processors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shmllm.core.plan import NewRequest, StepPlan
from shmllm.params.sampling import SamplingParams
from shmllm.plugins.logits_processor import BatchUpdate, MoveDirectionality, MovedRequest
from shmllm.worker.arrays import IntArray, LongArray

NOT_IN_BATCH = -1


@dataclass(slots=True)
class BatchRequest:
    """A request in the batch, or one that will enter it.

    Attributes:
        row: its row in the engine's batch.
        params: its parameters, a copy that processors may keep.
        num_prompt_tokens: the number of its prompt's tokens.
        prompt: the prompt's tokens; None if it was given as embeddings.
        output: the output's tokens, a list that processors may keep.
    """

    row: int
    params: SamplingParams
    num_prompt_tokens: int
    prompt: list[int] | None
    output: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: NewRequest) -> BatchRequest:
        length = request.num_prompt_tokens
        prompt = None if request.embeds is not None else list(request.prompt_token_ids)
        return cls(request.row, request.params.clone(), length, prompt)

    def read_output(self, token_ids: IntArray, position: int) -> None:
        """Append the tokens of the output up to a position that `output` does not have yet.

        Args:
            token_ids: (rows, tokens) int32, the tokens of each row.
            position: the position of the token that is sampled next.
        """
        known = self.num_prompt_tokens + len(self.output)
        if known < position:
            self.output += token_ids[self.row, known:position].tolist()


class ProcessorBatch:
    """
    Attributes:
        requests: the requests, by index.
    """

    def __init__(self) -> None:
        self.requests: list[BatchRequest] = []
        self._index_of: dict[int, int] = {}
        self._gaps: list[int] = []
        self._waiting: dict[int, BatchRequest] = {}

    def update(self, plan: StepPlan) -> None:
        """Take note of the requests that left and entered rows since the last plan."""
        self.leave(plan.left_rows)
        for request in plan.new_requests:
            if not request.params.trace_decode_token_ids:  # a trace is followed whatever comes
                self._waiting[request.row] = BatchRequest.of(request)

    def leave(self, rows: Iterable[int]) -> None:
        """Let the requests of some rows leave, if they are in the batch or wait to enter it."""
        for row in rows:
            self._waiting.pop(row, None)
            if row in self._index_of:
                self._gaps.append(self._index_of.pop(row))

    def index_of(self, row: int) -> int:
        """Return the index of a row's request; NOT_IN_BATCH if it has none."""
        return self._index_of.get(row, NOT_IN_BATCH)

    def indices(self, rows: LongArray) -> LongArray:
        """Return (N,) int64, the index of each row's request; NOT_IN_BATCH for others."""
        of = self._index_of
        return np.array([of.get(row, NOT_IN_BATCH) for row in rows.tolist()], np.int64)

    @property
    def may_change(self) -> bool:
        """Whether requests have left or wait to enter."""
        return bool(self._waiting or self._gaps)

    def change(
        self, rows: LongArray, positions: LongArray, token_ids: IntArray
    ) -> BatchUpdate | None:
        """Let the waiting requests of some rows enter, and close gaps.

        Args:
            rows: (N,) int64, the rows that get a token.
            positions: (N,) int64, the position that each token will have.
            token_ids: (rows, tokens) int32, the tokens of each row.

        Returns:
            The changes since the last call; None if there are none.
        """
        entering = []
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
            if self._waiting and (request := self._waiting.pop(row, None)) is not None:
                request.read_output(token_ids, position)
                entering.append(request)
        if not entering and not self._gaps:
            return None
        gaps, self._gaps = sorted(self._gaps), []
        added = [self._place(request, gaps) for request in entering]
        moved, removed = self._close(gaps)
        changed = [self.requests[index] for index in added]
        new = [
            (index, request.params, request.prompt, request.output)
            for index, request in zip(added, changed, strict=True)
        ]
        return BatchUpdate(len(self.requests), removed, new, moved)

    def _place(self, request: BatchRequest, gaps: list[int]) -> int:
        """Put a request into the first gap, or behind all others. Returns its index."""
        if gaps:
            index = gaps.pop(0)
            self.requests[index] = request
        else:
            index = len(self.requests)
            self.requests.append(request)
        self._index_of[request.row] = index
        return index

    def _close(self, gaps: Sequence[int]) -> tuple[list[MovedRequest], list[int]]:
        """Close gaps by moving the last requests. Returns the moves, and the removed indices that
        no other request took."""
        open_gaps, moved, removed = set(gaps), [], []
        for gap in gaps:
            while len(self.requests) - 1 in open_gaps:
                self.requests.pop()
                removed.append(len(self.requests))
            if gap >= len(self.requests):
                break
            last = self.requests.pop()
            self.requests[gap] = last
            self._index_of[last.row] = gap
            open_gaps.remove(gap)
            moved.append((len(self.requests), gap, MoveDirectionality.UNIDIRECTIONAL))
        return moved, removed
