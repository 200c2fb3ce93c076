"""Pools hidden states into the results of pooling requests: a vector, or a row for each token.

This module owns the running sums of means, since a prompt may take several steps. Sums and norms
are float64 and the results float32, whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from shmllm.core.plan import Pool, StepPlan
from shmllm.outputs.columns import Piece
from shmllm.outputs.rows import Rows, normalized
from shmllm.params.pooling import PoolingType
from shmllm.worker.step_inputs import StepInputs

FLOAT_BYTES = 4
ROWS_AT_ONCE = 64
NOTHING = Piece(0, b"")


class Pooler:
    """Pools hidden states.

    Args:
        head: computes the projection or the classifier of float32 rows, [rows, hidden] -> [rows,
            width]; None: the model has none.
        precedes_means: see `HeadSpec`.
    """

    def __init__(
        self,
        head: Callable[[torch.Tensor], torch.Tensor] | None = None,
        precedes_means: bool = False,
    ) -> None:
        self._head = head
        self._precedes_means = precedes_means
        self._sums: dict[int, Rows] = {}

    def __call__(self, hidden: torch.Tensor, inputs: StepInputs, plan: StepPlan) -> list[Piece]:
        """Pool the hidden states of a step.

        Args:
            hidden: (T, hidden_size), the step's hidden states after the final norm.
            inputs: the step's inputs.
            plan: the step's plan, with the requests to pool.

        Returns:
            For each of `plan.pools`, in that order, what the step adds to its result.
        """
        pooled = [self._pool(hidden, inputs, pool) for pool in plan.pools]
        if self._head is not None:
            self._apply_head(pooled, inputs, plan)
        return [
            self._finish(rows, pool, inputs) for rows, pool in zip(pooled, plan.pools, strict=True)
        ]

    @property
    def workspace_bytes(self) -> int:
        """The memory of the sums."""
        return sum(each.nbytes for each in self._sums.values())

    def drop_workspace(self) -> None:
        """Free the sums: a request that is recomputed begins with its first token again."""
        self._sums.clear()

    def _pool(self, hidden: torch.Tensor, inputs: StepInputs, pool: Pool) -> Rows:
        """Return the rows that the step adds for a request, before the head in most cases."""
        if (result := inputs.item_results.get(pool.index)) is not None:
            own: Rows = result.float().cpu().numpy()
            return own
        first, count = int(inputs.first_tokens[pool.index]), int(inputs.counts[pool.index])
        begin, end = first, first + count
        match pool.pooling.type:
            case PoolingType.MAX:
                assert pool.is_last, "an encoder's prompt is one step"
                return self._largest(hidden[begin:end])
            case PoolingType.MEAN:
                states = hidden[begin:end]
                if self._is_before_mean(pool):
                    assert self._head is not None, "the model has a head"
                    states = self._head(states.float().cpu())
                return self._mean(states, inputs, pool)
            case PoolingType.LAST:
                begin = end - 1 if pool.is_last else end
            case PoolingType.CLS:
                end = begin if inputs.positions[first] else begin + 1
        rows: Rows = hidden[begin:end].float().cpu().numpy()
        return rows

    def _is_before_mean(self, pool: Pool) -> bool:
        """Return whether the head reads the tokens of a request, whose results are pooled."""
        is_mean = pool.pooling.type is PoolingType.MEAN
        return is_mean and pool.pooling.uses_head and self._precedes_means

    def _largest(self, states: torch.Tensor) -> Rows:
        """Return the largest results of the head, [1, width], for the tokens of a request. A result
        may have a number for each token of the vocabulary, so that they are computed in pieces."""
        assert self._head is not None, "the model has a head"
        parts = (self._head(part.float().cpu()) for part in states.split(ROWS_AT_ONCE))
        largest: Rows = np.maximum.reduce([part.amax(0).cpu().numpy() for part in parts])[None]
        return largest

    def _mean(self, hidden: torch.Tensor, inputs: StepInputs, pool: Pool) -> Rows:
        row, skipped = int(inputs.rows[pool.index]), pool.pooling.num_skipped
        start = int(inputs.positions[inputs.first_tokens[pool.index]])
        before = [self._sums.pop(row)[None]] if start else []
        rows = hidden[max(skipped - start, 0) :].double().cpu().numpy()
        # numpy adds row after row, so that the result does not depend on the chunks' sizes.
        total = np.add.reduce(np.concatenate([*before, rows]), axis=0)
        if not pool.is_last:
            self._sums[row] = total
            return np.empty((0, len(total)))
        length = int(inputs.context_lens[pool.index]) - skipped
        mean: Rows = total[None] / max(length, 1)
        return mean

    def _apply_head(self, pooled: list[Rows], inputs: StepInputs, plan: StepPlan) -> None:
        """Replace rows of requests that use the head by its results."""
        assert self._head is not None, "the model has a head"
        users = [
            i
            for i, pool in enumerate(plan.pools)
            if pool.pooling.uses_head
            and pool.index not in inputs.item_results
            and pool.pooling.type is not PoolingType.MAX
            and not self._is_before_mean(pool)
        ]
        counts = [len(pooled[i]) for i in users]
        if not sum(counts):
            return
        rows = np.concatenate([pooled[i] for i in users]).astype(np.float32, copy=False)
        results = self._head(torch.from_numpy(rows)).cpu().numpy()
        for i, part in zip(users, np.split(results, np.cumsum(counts)[:-1]), strict=True):
            pooled[i] = part

    def _finish(self, rows: Rows, pool: Pool, inputs: StepInputs) -> Piece:
        if not len(rows):
            return NOTHING
        pooling, offset = pool.pooling, 0
        if pooling.dimensions:
            rows = rows[:, : pooling.dimensions]
        if pooling.type is PoolingType.ALL:
            start = int(inputs.positions[inputs.first_tokens[pool.index]])
            offset = start * rows.shape[1] * FLOAT_BYTES
        if pooling.normalize:
            rows = normalized(rows)
        return Piece(offset, rows.astype(np.float32, copy=False).tobytes())
