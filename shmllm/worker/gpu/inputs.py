"""A step's inputs on the device, at fixed addresses: what graphs read anew in every step.

Owns how they get there, and each row's blocks. Must not know how a step is computed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shmllm.core.plan import StepPlan
from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import NO_ROWS, StepInputs
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.graphs import BatchDescriptor
from shmllm_kernels.gpu.step import unpack_step
from shmllm_kernels.reference.step import StepSizes, StepTensors

NUM_SETS = 2
"""Of host memory, used in turns: one is written again when the result of the step that used it was
taken, and at most two steps are under way."""


class DeviceInputs:
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
        self._device = device
        self._turn = 0
        size = 3 * max_tokens + 6 * max_requests + 2 * (max_tokens + max_blocks)
        self._packed = torch.empty(size, dtype=torch.int64, device=where)
        self._pinned = [device.pinned((size,), torch.int64) for _ in range(NUM_SETS)]

    def send(self, inputs: StepInputs, descriptor: BatchDescriptor, plan: StepPlan) -> None:
        """Have the device copy and pad a step's inputs, behind what it was told before.

        Args:
            inputs: of the step.
            descriptor: what it is padded to.
            plan: whose admissions and appended blocks the device does not have yet.
        """
        places, block_ids = self._changed_blocks(plan)
        parts = (
            inputs.token_ids, inputs.positions, inputs.slot_mapping,
            inputs.first_tokens, inputs.context_lens, inputs.rows,
            inputs.sample_tokens, inputs.sample_rows, inputs.sample_positions,
            places, block_ids,
        )  # fmt: skip
        end = self._copy(parts)
        sizes = StepSizes(len(inputs.token_ids), len(inputs.rows), len(inputs.sample_tokens))
        self.num_samples = sizes.num_samples
        unpack_step(self.step, self._packed, sizes, _padded(descriptor))
        if len(places):
            middle = end - len(places)
            targets, ids = self._packed[middle - len(places) : middle], self._packed[middle:end]
            self._blocks_by_row.view(-1).index_copy_(0, targets, ids.to(torch.int32))
        if len(places) or not plan.is_repeat:
            rows = self.step.rows[: sizes.num_requests]
            table = self.block_table[: sizes.num_requests]
            torch.index_select(self._blocks_by_row, 0, rows, out=table)

    def idle(self, descriptor: BatchDescriptor) -> None:
        """A step of nothing but padding, which gets logits all the same: for warming up."""
        self.num_samples = descriptor.num_reqs
        unpack_step(self.step, self._packed, StepSizes(0, 0, 0), _padded(descriptor))

    def _copy(self, parts: tuple[LongArray, ...]) -> int:
        """Put them side by side on the device; their number."""
        size = sum(map(len, parts))
        self._turn = (self._turn + 1) % NUM_SETS
        if size > len(self._pinned[self._turn]):
            self._pinned[self._turn] = self._device.pinned((2 * size,), torch.int64)
        if size > len(self._packed):
            self._packed = self._packed.new_empty(2 * size)
        pinned = self._pinned[self._turn][:size]
        np.concatenate(parts, out=pinned.numpy())
        self._packed[:size].copy_(pinned, non_blocking=True)
        return size

    def _changed_blocks(self, plan: StepPlan) -> tuple[LongArray, LongArray]:
        """Where blocks were appended, in the table by row, and which."""
        width = self._blocks_by_row.shape[1]
        changes = [(admitted.row, 0, admitted.block_ids) for admitted in plan.admissions]
        changes += [(append.row, append.first, append.block_ids) for append in plan.block_appends]
        if not changes:
            return NO_ROWS, NO_ROWS
        places = [np.arange(len(ids)) + (row * width + first) for row, first, ids in changes]
        block_ids = [np.array(ids, np.int64) for _, _, ids in changes]
        return np.concatenate(places), np.concatenate(block_ids)


def _padded(descriptor: BatchDescriptor) -> StepSizes:
    return StepSizes(descriptor.num_tokens, descriptor.num_reqs, descriptor.num_reqs)
