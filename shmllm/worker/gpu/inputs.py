"""The inputs of a step on the device, at fixed addresses, where graphs read them in every step.

This module owns how the inputs get there, and the block table by row. It must not know how a step
is computed.

A step's inputs are copied while the step before runs, into two staging buffers in turns: at most
two steps run or wait at a time, and the host takes the result of a step before it sends the next
but one. `DraftLaunches`, which sends the inputs of a model that drafts, keeps to the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shmllm.core.plan import StepPlan
from shmllm.models.mixer_specs import WITHIN_ITEMS, Ahead
from shmllm.worker.arrays import IntArray, LongArray
from shmllm.worker.batch import EMBEDDED
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor
from shmllm.worker.gpu.transfers import Transfers
from shmllm.worker.step_inputs import StepInputs
from shmllm_kernels.gpu.step import unpack_step
from shmllm_kernels.reference.step import StepSizes, StepTensors

MAX_STEPS_IN_FLIGHT = 2
"""The largest number of steps that were sent and whose results have not been taken."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """The inputs of a step, as they are copied to the device.

    Attributes:
        numbers: (n,) int64, all inputs, one behind the other.
        sizes: the step's sizes, without padding.
        has_embeds, looks_ahead: see `GpuInputs`.
    """

    numbers: LongArray
    sizes: StepSizes
    has_embeds: bool
    looks_ahead: bool = False

    @classmethod
    def of(
        cls,
        inputs: StepInputs,
        aheads: Sequence[Ahead] = (),
        has_types: bool = False,
        num_axes: int = 0,
    ) -> PackedStep:
        """Pack the inputs of a step; see `GpuInputs`."""
        numbers = np.concatenate((
            inputs.token_ids, inputs.positions, inputs.slot_mapping.ravel(),
            *((inputs.token_types,) if has_types else ()),
            *inputs.on_axes(num_axes), *map(inputs.ends_of_keys, aheads),
            inputs.first_tokens, inputs.context_lens, inputs.rows,
            inputs.sample_tokens, inputs.sample_rows, inputs.sample_positions,
        ))  # fmt: skip
        sizes = StepSizes(len(inputs.token_ids), len(inputs.rows), len(inputs.sample_tokens))
        has_embeds = bool((inputs.token_ids == EMBEDDED).any())
        return cls(numbers, sizes, has_embeds, inputs.looks_ahead)


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """Changed entries of the block tables.

    Attributes:
        indices: (n,) int64, their places in the flat tables, by row.
        block_ids: (n,) int32.
    """

    indices: LongArray
    block_ids: IntArray


NO_CHANGES = BlockChanges(np.zeros(0, np.int64), np.zeros(0, np.int32))


class GpuInputs:
    """The inputs of the current step.

    Args:
        max_tokens: the largest number of tokens in a step.
        max_requests: the largest number of requests in a step, and the number of rows.
        max_samples: the largest number of tokens at which a step samples.
        max_blocks: the largest number of blocks of a request in one group of layers.
        num_groups: the number of groups of layers.
        last_tokens: (rows,) int64 on the device, the token sampled last for each row.
        device: the device.
        aheads: the different values of `AttentionSpec.ahead` of layers that are not causal.
        has_types: whether the model has embeddings of token types.
        num_axes: the number of axes of the positions by which queries and keys are rotated; 0: a
            position is one number.

    Attributes:
        step: the step's inputs, padded; see `StepTensors`.
        sample_rows, sample_positions: these tensors of `step`.
        block_tables: (num_groups, max_requests, max_blocks) int32, in the order of the step's
            requests.
        last_tokens: as given.
        num_packed: the most numbers of a `PackedStep`.
        num_samples: the number of the step's tokens that get logits.
        num_padded: the same with padding.
        has_embeds: whether a prompt has given embeddings for some of the step's tokens.
        looks_ahead: whether the item of some token goes on behind it, or the step may be one for
            which that is so.
        looks_within_items: whether the steps for which it is so have launches of their own.
    """

    def __init__(
        self,
        max_tokens: int,
        max_requests: int,
        max_samples: int,
        max_blocks: int,
        num_groups: int,
        last_tokens: Tensor,
        device: Device,
        aheads: Sequence[Ahead] = (),
        has_types: bool = False,
        num_axes: int = 0,
    ) -> None:
        where = device.torch_device
        self._aheads, self._has_types, self._num_axes = list(aheads), has_types, num_axes
        largest = StepSizes(max_tokens, max_requests, max_samples)
        self.step = StepTensors.allocate(
            largest, where, num_groups, len(aheads), has_types, num_axes
        )
        self.num_packed = self.step.num_packed(largest)
        self.sample_rows = self.step.sample_rows
        self.sample_positions = self.step.sample_positions
        self.last_tokens = last_tokens
        self.num_samples = self.num_padded = 0
        self.has_embeds = self.looks_ahead = False
        self.looks_within_items = WITHIN_ITEMS in aheads
        table_shape = (num_groups, max_requests, max_blocks)
        self.block_tables = torch.zeros(table_shape, dtype=torch.int32, device=where)
        self._blocks_by_row = torch.zeros(table_shape, dtype=torch.int32, device=where)
        self._are_stale = True  # the tables in the order of the step's requests
        self._nothing = torch.zeros(1, dtype=torch.int64, device=where)
        self._transfers = Transfers(device)
        size = self.num_packed * torch.int64.itemsize
        self._staged = deque(
            torch.empty(size, dtype=torch.uint8, device=where) for _ in range(MAX_STEPS_IN_FLIGHT)
        )
        device.synchronize()  # until work that used this memory before is done

    def changes_of(self, plan: StepPlan) -> BlockChanges:
        """Return the blocks of a step's new requests, and its appended blocks."""
        return _changed_blocks(plan, *self._blocks_by_row.shape)

    def change_blocks(self, changes: BlockChanges) -> None:
        """Launch the copy of changed entries. The inputs of the large model's step that changes
        them, and those of steps of a model that drafts for it, are sent later."""
        if len(changes.indices):
            sent = self._transfers.send(changes.indices, changes.block_ids)
            self._blocks_by_row.view(-1).index_copy_(0, *sent)
            self._are_stale = True

    def pack(self, inputs: StepInputs) -> PackedStep:
        """Pack the inputs of a step, for `launch`."""
        return PackedStep.of(inputs, self._aheads, self._has_types, self._num_axes)

    def ends(self, ahead: Ahead, num_tokens: int) -> Tensor | None:
        """Return the end of the keys that each token attends to in layers with this
        `AttentionSpec.ahead`, (num_tokens,) int32; None: they are causal in this step."""
        if ahead == 0 or (ahead is WITHIN_ITEMS and not self.looks_ahead):
            return None
        return self.step.ends[self._aheads.index(ahead), :num_tokens]

    def send(
        self, inputs: StepInputs, descriptor: BatchDescriptor, is_repeat: bool = False
    ) -> None:
        """Launch the copy and the padding of a step's inputs.

        Args:
            inputs: the step's inputs.
            descriptor: the padded sizes.
            is_repeat: whether the step's requests are those of the call before, in their order.
        """
        self.launch(self.pack(inputs), descriptor, is_repeat)

    def launch(
        self, packed: PackedStep, descriptor: BatchDescriptor, is_repeat: bool = False
    ) -> None:
        """As `send`, with packed inputs."""
        self._staged.rotate()
        sent, sizes = self._transfers.send_ahead(self._staged[0], packed.numbers), packed.sizes
        self.num_samples, self.has_embeds = sizes.num_samples, packed.has_embeds
        self.looks_ahead, self.num_padded = packed.looks_ahead, descriptor.num_samples
        unpack_step(self.step, sent, sizes, self._padded(descriptor))
        if self._are_stale or not is_repeat:
            self._are_stale = False
            rows = self.step.rows[: sizes.num_requests]
            for blocks, table in zip(self._blocks_by_row, self.block_tables, strict=True):
                torch.index_select(blocks, 0, rows, out=table[: sizes.num_requests])

    def idle(self, descriptor: BatchDescriptor, looks_ahead: bool = True) -> None:
        """Fill the inputs with a step of padding that gets logits, for warm-up and capture.

        Args:
            descriptor: the padded sizes.
            looks_ahead: whether launches are those of steps for which `looks_ahead` is so. They
                serve all steps, so graphs have them.
        """
        self.num_samples, self.has_embeds = descriptor.num_samples, False
        self.looks_ahead = looks_ahead
        unpack_step(self.step, self._nothing, StepSizes(0, 0, 0), self._padded(descriptor))

    def _padded(self, descriptor: BatchDescriptor) -> StepSizes:
        """Return the sizes up to which the inputs are written. Requests are padded to the largest
        number: a piecewise graph, which serves any number of them, reads the number of tokens
        behind the last request that there could be."""
        return StepSizes(descriptor.num_tokens, len(self.step.rows), descriptor.num_samples)


def _changed_blocks(plan: StepPlan, num_groups: int, num_rows: int, width: int) -> BlockChanges:
    """Return the changed entries of block tables whose rows have `width` entries."""
    starts = [0] * num_groups
    changes = [(request.row, starts, request.block_ids) for request in plan.new_requests]
    changes += [(append.row, append.firsts, append.block_ids) for append in plan.block_appends]
    if not changes:
        return NO_CHANGES
    indices = [
        np.arange(len(ids)) + ((group * num_rows + row) * width + first)
        for row, firsts, of_groups in changes
        for group, (first, ids) in enumerate(zip(firsts, of_groups, strict=True))
    ]
    block_ids = [np.array(ids, np.int32) for _, _, of_groups in changes for ids in of_groups]
    return BlockChanges(np.concatenate(indices), np.concatenate(block_ids))
