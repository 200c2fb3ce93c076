"""What is added to single entries of a step's logits: biases, and minus infinity for what bad
words and min_tokens ban.

Owns the list on the device, which is made anew only when it differs from the step before.
"""

from __future__ import annotations

import sys

import numpy as np
from torch import Tensor

from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import InputBatch, StepInputs
from shmllm.worker.gpu.transfers import Transfers

Biases = tuple[Tensor, Tensor, Tensor]
"""(count,) each: row of the logits int32, token int64, what to add float32."""


class StepBiases:
    """
    Args:
        batch: holds the edits of its rows.
        transfers: bring the list to the device.
    """

    def __init__(self, batch: InputBatch, transfers: Transfers) -> None:
        self._batch = batch
        self._transfers = transfers
        self._last: Biases | None = None
        self._num_alike = 0

    def of_step(self, inputs: StepInputs, chosen: LongArray, is_repeat: bool) -> Biases | None:
        """
        Args:
            inputs: the step's.
            chosen: indices of the sampled rows that may have any.
            is_repeat: they are those of the step before, one position further.

        Returns:
            None if there is nothing to add.
        """
        if is_repeat and self._num_alike:
            self._num_alike -= 1
            return self._last
        rows, positions = inputs.sample_rows[chosen].tolist(), inputs.sample_positions[chosen]
        edits = [self._batch.edits[row] for row in rows]
        banned, num_alike = [], sys.maxsize
        for row, edit, position in zip(rows, edits, positions.tolist(), strict=True):
            banned.append(edit.banned(self._batch.token_ids[row, :position]))
            num_alike = min(num_alike, edit.banned_until(position) - position - 1)
        ids = banned + [edit.biased for edit in edits]
        lengths = [len(own) for own in ids]
        indices = np.repeat(np.tile(chosen, 2), lengths).astype(np.int32)
        forbidding = np.full(sum(lengths[: len(edits)]), -np.inf, np.float32)
        values = np.concatenate([forbidding, *(edit.biases for edit in edits)])
        self._num_alike = num_alike
        self._last = None
        if len(indices):
            sent = self._transfers.send(indices, np.concatenate(ids), values)
            self._last = sent[0], sent[1], sent[2]
        return self._last
