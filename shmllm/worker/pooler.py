"""Makes vectors of hidden states, for requests whose prompts may take several steps.

Owns the sums so far, one row each. Whatever the model computes in, sums and norms are
float64 and vectors float32.
"""

from __future__ import annotations

import numpy as np
import torch

from shmllm.core.plan import StepPlan
from shmllm.params.pooling import PoolingType
from shmllm.worker.batch import StepInputs


class Pooler:
    """
    Args:
        num_rows: requests that can run at once.
        hidden_size: components of a hidden state.
    """

    def __init__(self, num_rows: int, hidden_size: int) -> None:
        self._num_rows = num_rows
        self._hidden_size = hidden_size
        self._sums: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor, inputs: StepInputs, plan: StepPlan) -> list[bytes]:
        """
        Args:
            hidden: (T, hidden_size), the step's hidden states after the final norm.
            inputs: of the step.
            plan: says which requests are pooled, and which of them end.

        Returns:
            A float32 vector for each of the plan's pools that ends, in their order.
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
        """Memory of the sums."""
        return 0 if self._sums is None else self._sums.nbytes

    def drop_workspace(self) -> None:
        """Forget the sums: who is recomputed begins with its first token again."""
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
            # One row after the other, so that it does not matter where chunks end.
            self._sums[row] = torch.from_numpy(np.add.reduce(states.cpu().numpy(), axis=0))


def _finish(vector: torch.Tensor, dimensions: int, normalize: bool) -> bytes:
    if dimensions:
        vector = vector[:dimensions]
    if normalize:
        vector = vector / vector.norm().clamp_min(1e-12)
    return bytes(vector.float().cpu().numpy().tobytes())
