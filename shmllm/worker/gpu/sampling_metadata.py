"""Each row's sampling parameters, on the device. They change when a request enters a row.

Owns the table and its layout; what the parameters do is the kernels' business.
"""

from __future__ import annotations

import numpy as np
import torch

from shmllm.worker.arrays import IntArray, LongArray
from shmllm.worker.batch import InputBatch
from shmllm.worker.gpu.transfers import Transfers
from shmllm.worker.logits_processors import LogitsState
from shmllm_kernels.reference.sampling import SamplingColumns

NO_PENALTIES = (1.0, 0.0, 0.0)
NO_MASK = -1


class SamplingMetadata:
    """
    Args:
        num_rows: requests that can run at once.
        transfers: bring the table what changed.

    Attributes:
        sampling: what the sampler's kernels take.
        mask_rows: (num_rows,) int32, where a row's mask is among all masks; NO_MASK for none.
    """

    def __init__(self, num_rows: int, transfers: Transfers) -> None:
        self._transfers = transfers
        # A field is a row of the table, so that all of them are written at once.
        device = transfers.torch_device
        self._table = torch.zeros((8, num_rows), dtype=torch.int32, device=device)
        temperature, top_p, min_p, *penalties = self._table[:6].view(torch.float32).unbind()
        top_k, self.mask_rows = self._table[6:].unbind()
        seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.sampling = SamplingColumns(temperature, top_k, top_p, min_p, seeds, *penalties)

    def add_requests(
        self, batch: InputBatch, rows: LongArray, states: list[LogitsState | None]
    ) -> None:
        """Take the parameters of these rows from the batch, all with one copy."""
        penalties = [NO_PENALTIES if state is None else state.penalties for state in states]
        is_masked = [state is not None and state.allowed.size > 0 for state in states]
        fields: IntArray = np.empty((8, len(rows)), np.int32)
        floats = fields[:6].view(np.float32)
        floats[0], floats[1], floats[2] = (
            batch.temperature[rows],
            batch.top_p[rows],
            batch.min_p[rows],
        )
        floats[3:] = np.array(penalties, np.float32).T
        fields[6], fields[7] = batch.top_k[rows], np.where(is_masked, rows, NO_MASK)
        where, seeds, sent = self._transfers.send(rows, batch.seeds[rows].view(np.int64), fields)
        self._table.index_copy_(1, where, sent)
        self.sampling.seeds.index_copy_(0, where, seeds)
