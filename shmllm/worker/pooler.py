"""Computes the vectors of pooling requests from hidden states.

This module owns the running sum of each row, since a prompt may take several steps. Sums and norms
are float64 and the vectors float32, whatever the model's dtype.
"""

from __future__ import annotations

import numpy as np
import torch

from shmllm.core.plan import StepPlan
from shmllm.params.pooling import PoolingType
from shmllm.worker.batch import StepInputs


class Pooler:
    """Pools hidden states.

    Args:
        num_rows: the largest number of requests that run at once.
        hidden_size: elements in a hidden state.
    """

    def __init__(self, num_rows: int, hidden_size: int) -> None:
        self._num_rows = num_rows
        self._hidden_size = hidden_size
        self._sums: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor, inputs: StepInputs, plan: StepPlan) -> list[bytes]:
        """Pool the hidden states of a step.

        Args:
            hidden: (T, hidden_size), the step's hidden states after the final norm.
            inputs: the step's inputs.
            plan: the step's plan, with the requests to pool.

        Returns:
            A float32 vector as bytes for each pooling request whose prompt ends with this step,
            in the order of `plan.pools`.
        """
        self._add_up(
            [p.index for p in plan.pools if p.pooling.type is PoolingType.MEAN], hidden, inputs
        )
        ending = [pool for pool in plan.pools if pool.is_last]
        if not ending:
            return []
        indices = np.array([pool.index for pool in ending])
        last_tokens = inputs.first_tokens[indices] + inputs.counts[indices] - 1
        vectors = hidden[torch.from_numpy(last_tokens)].double()
        for place, pool in enumerate(ending):
            if pool.pooling.type is PoolingType.MEAN:
                assert self._sums is not None
                row, length = inputs.rows[pool.index], inputs.context_lens[pool.index]
                vectors[place] = self._sums[row] / float(length)
        return [
            _finish(vector, pool.pooling.dimensions, pool.pooling.normalize)
            for vector, pool in zip(vectors, ending, strict=True)
        ]

    @property
    def workspace_bytes(self) -> int:
        """The memory of the sums."""
        return 0 if self._sums is None else self._sums.nbytes

    def drop_workspace(self) -> None:
        """Free the sums: a request that is recomputed begins with its first token again."""
        self._sums = None

    def _add_up(self, indices: list[int], hidden: torch.Tensor, inputs: StepInputs) -> None:
        if not indices:
            return
        if self._sums is None:
            self._sums = torch.zeros(
                self._num_rows, self._hidden_size, dtype=torch.float64, device=hidden.device
            )
        for index in indices:
            first, count = int(inputs.first_tokens[index]), int(inputs.counts[index])
            row = int(inputs.rows[index])
            before = (
                self._sums[row] if inputs.positions[first] else torch.zeros_like(self._sums[row])
            )
            states = torch.cat([before[None], hidden[first : first + count].double()])
            # numpy adds row after row, so that the result does not depend on the chunks' sizes.
            self._sums[row] = torch.from_numpy(np.add.reduce(states.cpu().numpy(), axis=0))


def _finish(vector: torch.Tensor, dimensions: int, normalize: bool) -> bytes:
    if dimensions:
        vector = vector[:dimensions]
    if normalize:
        vector = vector / vector.norm().clamp_min(1e-12)
    return bytes(vector.float().cpu().numpy().tobytes())
