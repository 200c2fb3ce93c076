"""The sampling parameters of each row on the device.

This module owns the table and its layout. It must not know what the kernels do with the parameters.
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
    """The table of sampling parameters.

    Args:
        num_rows: the largest number of requests that run at once.
        transfers: copies changed parameters to the device.

    Attributes:
        sampling: the parameters as the sampling kernels take them.
        mask_rows: (num_rows,) int32, the index of each row's token mask; NO_MASK for none.
    """

    def __init__(self, num_rows: int, transfers: Transfers) -> None:
        self._transfers = transfers
        # Each parameter is a row of the table, so that one copy changes all of them.
        device = transfers.torch_device
        self._table = torch.zeros((8, num_rows), dtype=torch.int32, device=device)
        temperature, top_p, min_p, *penalties = self._table[:6].view(torch.float32).unbind()
        top_k, self.mask_rows = self._table[6:].unbind()
        seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.sampling = SamplingColumns(temperature, top_k, top_p, min_p, seeds, *penalties)

    def add_requests(
        self, batch: InputBatch, rows: LongArray, states: list[LogitsState | None]
    ) -> None:
        """Copy the parameters of new requests to the device, with one copy.

        Args:
            batch: the batch, with the parameters.
            rows: (N,) int64, the rows of the new requests.
            states: the states of their logits processors.
        """
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
