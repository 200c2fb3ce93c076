"""A step's inputs on the device, at fixed addresses: what graphs read anew in every step.

Owns how they get there, and each row's blocks. Must not know how a step is computed.

A step's numbers are copied while the step before it runs, into memory that two steps use in turns:
at most two are under way, and the result of one is taken before the next but one is sent.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import Tensor

from shmllm.core.plan import StepPlan
from shmllm.worker.arrays import IntArray, LongArray
from shmllm.worker.batch import StepInputs
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor
from shmllm.worker.gpu.transfers import Transfers
from shmllm_kernels.gpu.step import unpack_step
from shmllm_kernels.reference.step import StepSizes, StepTensors

MOST_UNDER_WAY = 2
"""Steps that were sent and whose results were not taken."""


class GpuInputs:
    """
    Args:
        max_tokens: of a step.
        max_requests: of a step, and rows that requests have.
        max_blocks: of a request.
        last_tokens: (rows,) int64 on the device, the token sampled last for each row.
        device: where they go.

    Attributes:
        step: tokens, requests and samples of the step, padded; see `StepTensors`.
        sample_rows, sample_positions: of these.
        block_table: (max_requests, max_blocks) int32, in the order of the step's requests.
        last_tokens: as given.
        num_samples: tokens of the step that get logits.
    """

    def __init__(
        self,
        max_tokens: int,
        max_requests: int,
        max_blocks: int,
        last_tokens: Tensor,
        device: Device,
    ) -> None:
        where = device.torch_device
        self.step = StepTensors.allocate(StepSizes(max_tokens, max_requests, max_requests), where)
        self.sample_rows = self.step.sample_rows
        self.sample_positions = self.step.sample_positions
        self.last_tokens = last_tokens
        self.num_samples = 0
        table_shape = (max_requests, max_blocks)
        self.block_table = torch.zeros(table_shape, dtype=torch.int32, device=where)
        self._blocks_by_row = torch.zeros(table_shape, dtype=torch.int32, device=where)
        self._nothing = torch.zeros(1, dtype=torch.int64, device=where)
        self._transfers = Transfers(device)
        size = (3 * max_tokens + 6 * max_requests) * torch.int64.itemsize
        self._staged = deque(
            torch.empty(size, dtype=torch.uint8, device=where) for _ in range(MOST_UNDER_WAY)
        )
        device.synchronize()  # what had this memory before is done with it

    def send(self, inputs: StepInputs, descriptor: BatchDescriptor, plan: StepPlan) -> None:
        """Have the device copy and pad a step's inputs, behind what it was told before.

        Args:
            inputs: of the step.
            descriptor: what it is padded to.
            plan: whose admissions and appended blocks the device does not have yet.
        """
        packed = np.concatenate((
            inputs.token_ids, inputs.positions, inputs.slot_mapping,
            inputs.first_tokens, inputs.context_lens, inputs.rows,
            inputs.sample_tokens, inputs.sample_rows, inputs.sample_positions,
        ))  # fmt: skip
        self._staged.rotate()
        sent = self._transfers.send_ahead(self._staged[0], packed)
        changes = _changed_blocks(plan, self._blocks_by_row.shape[1])
        changed = self._transfers.send(*changes) if changes else []
        sizes = StepSizes(len(inputs.token_ids), len(inputs.rows), len(inputs.sample_tokens))
        self.num_samples = sizes.num_samples
        unpack_step(self.step, sent, sizes, _padded(descriptor))
        if changed:
            self._blocks_by_row.view(-1).index_copy_(0, *changed)
        if changed or not plan.is_repeat:
            rows = self.step.rows[: sizes.num_requests]
            table = self.block_table[: sizes.num_requests]
            torch.index_select(self._blocks_by_row, 0, rows, out=table)

    def idle(self, descriptor: BatchDescriptor) -> None:
        """A step of nothing but padding, which gets logits all the same: for warming up."""
        self.num_samples = descriptor.num_reqs
        unpack_step(self.step, self._nothing, StepSizes(0, 0, 0), _padded(descriptor))


def _changed_blocks(plan: StepPlan, width: int) -> tuple[LongArray, IntArray] | tuple[()]:
    """Where blocks were appended, in a flat table with rows of that width, and which."""
    changes = [(admitted.row, 0, admitted.block_ids) for admitted in plan.new_requests]
    changes += [(append.row, append.first, append.block_ids) for append in plan.block_appends]
    if not changes:
        return ()
    places = [np.arange(len(ids)) + (row * width + first) for row, first, ids in changes]
    block_ids = [np.array(ids, np.int32) for _, _, ids in changes]
    return np.concatenate(places), np.concatenate(block_ids)


def _padded(descriptor: BatchDescriptor) -> StepSizes:
    return StepSizes(descriptor.num_tokens, descriptor.num_reqs, descriptor.num_reqs)
