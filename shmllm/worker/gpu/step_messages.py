"""What rank 0 tells the other ranks of a step on GPUs, in memory that all share.

Two steps may be under way, and each has a slot. Rank 0 writes a slot again when it has taken the
result of the step before the last one. That step had met all ranks on the device, so all have read
its slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from shmllm.config.graphs import CudaGraphMode
from shmllm.worker.adapters import Adapter
from shmllm.worker.arrays import IntArray, LongArray
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor
from shmllm.worker.gpu.inputs import (
    MAX_STEPS_IN_FLIGHT,
    NO_CHANGES,
    BlockChanges,
    GpuInputs,
    PackedStep,
)
from shmllm.worker.group import SharedArrays
from shmllm_kernels.reference.step import StepSizes

NUM_SCORED_BITS = 31
_MODES = list(CudaGraphMode)
NUMBERS = 19
"""The number of int64 of a step besides its arrays."""


class Act(IntEnum):
    """What a step computes.

    MODEL: the model. FOLLOW, ADVANCE: the layer that predicts a further token, as the methods of
    `FurtherSteps` of these names. LOGITS: those of hidden states that the layer has kept; such a
    step has no inputs.
    """

    MODEL = 0
    FOLLOW = 1
    ADVANCE = 2
    LOGITS = 3


@dataclass(frozen=True, slots=True)
class StepMessage:
    """A step.

    Attributes:
        mode, descriptor, max_query_len: see `program.Program.run`.
        packed: its inputs.
        is_repeat: see `GpuInputs.launch`.
        changes: the changed entries of the block tables.
        state_copies: the blocks of states to copy first, each a source and a target.
        adapters: (2, requests) int64, the numbers of `numbers_of` and how many tokens each request
            has; None: those of the step before, or the engine has no adapters.
        act: what the step computes.
        kept: (2, n) int64, of FOLLOW the rows that keep a hidden state, and the tokens that have
            it; of LOGITS the rows, twice; None: there are none.
    """

    mode: CudaGraphMode
    descriptor: BatchDescriptor
    max_query_len: int
    packed: PackedStep
    is_repeat: bool
    changes: BlockChanges
    state_copies: list[tuple[int, int]]
    adapters: LongArray | None = None
    act: Act = Act.MODEL
    kept: LongArray | None = None


class StepMessages:
    """The slots, in one rank.

    Args:
        arrays: the memory of the group.
        inputs: the inputs of a step, which have the same sizes on all ranks.
    """

    def __init__(self, arrays: SharedArrays, inputs: GpuInputs) -> None:
        num_groups, num_rows, width = inputs.block_tables.shape
        num_entries = num_groups * num_rows * width
        slots = MAX_STEPS_IN_FLIGHT
        self._next = 0

        def array(name: str, *shape: int, dtype: str = "int64") -> npt.NDArray[Any]:
            return arrays.array(f"steps: {name}", slots, *shape, dtype=dtype)

        self._numbers: LongArray = array("numbers", NUMBERS)
        self._packed: LongArray = array("inputs", inputs.num_packed)
        self._indices: LongArray = array("changed entries", num_entries)
        self._block_ids: IntArray = array("blocks", num_entries, dtype="int32")
        self._copies: LongArray = array("copied states", 2 * num_rows, 2)
        self._adapters: LongArray = array("adapters", 2, num_rows)
        self._kept: LongArray = array("kept hidden states", 2, num_rows)

    def write(self, step: StepMessage) -> int:
        """Write a step. Returns its slot."""
        slot, self._next = self._next, (self._next + 1) % MAX_STEPS_IN_FLIGHT
        descriptor, packed, changes = step.descriptor, step.packed, step.changes
        copies, adapters, kept = step.state_copies, step.adapters, step.kept
        numbers = [
            _MODES.index(step.mode),
            *(descriptor.num_tokens, descriptor.num_reqs),
            *(int(descriptor.uniform), descriptor.num_drafts, descriptor.max_verified),
            *(step.max_query_len, int(step.is_repeat)),
            *packed.sizes,
            *(len(packed.numbers), int(packed.has_embeds), int(packed.looks_ahead)),
            *(len(changes.indices), len(copies)),
            -1 if adapters is None else adapters.shape[1],
            *(step.act, 0 if kept is None else kept.shape[1]),
        ]
        self._numbers[slot, : len(numbers)] = numbers
        self._packed[slot, : len(packed.numbers)] = packed.numbers
        self._indices[slot, : len(changes.indices)] = changes.indices
        self._block_ids[slot, : len(changes.indices)] = changes.block_ids
        if copies:
            self._copies[slot, : len(copies)] = copies
        if adapters is not None:
            self._adapters[slot, :, : adapters.shape[1]] = adapters
        if kept is not None:
            self._kept[slot, :, : kept.shape[1]] = kept
        return slot

    def read(self, slot: int) -> StepMessage:
        """Return the step of a slot, whose arrays are views of it."""
        mode, tokens, requests, uniform, drafts, verified, longest, is_repeat, *rest = (
            self._numbers[slot].tolist()
        )
        sizes, (num_packed, *flags, num_changes, num_copies, num_adapters) = rest[:3], rest[3:9]
        act, num_kept = rest[9:11]
        return StepMessage(
            _MODES[mode],
            BatchDescriptor(tokens, requests, bool(uniform), drafts, verified),
            longest,
            PackedStep(self._packed[slot, :num_packed], StepSizes(*sizes), *map(bool, flags)),
            bool(is_repeat),
            BlockChanges(self._indices[slot, :num_changes], self._block_ids[slot, :num_changes]),
            [(source, target) for source, target in self._copies[slot, :num_copies].tolist()],
            None if num_adapters < 0 else self._adapters[slot, :, :num_adapters],
            Act(act),
            self._kept[slot, :, :num_kept],
        )


def numbers_of(adapters: Sequence[Adapter | None]) -> list[int]:
    """Return the number of each request's adapter in rank 0; -1: it has none."""
    return [-1 if each is None else each.number for each in adapters]


def logits_message(rows: LongArray) -> StepMessage:
    """Return the step that computes the logits of kept hidden states.

    Args:
        rows: (n,) int64, the rows that have kept them.
    """
    nothing = PackedStep(np.zeros(0, np.int64), StepSizes(0, 0, 0), False, False)
    sizes = CudaGraphMode.NONE, BatchDescriptor(0, 0, False), 0
    kept = np.stack([rows, rows])
    return StepMessage(*sizes, nothing, False, NO_CHANGES, [], act=Act.LOGITS, kept=kept)


def slot_of_rows(first: int, count: int) -> int:
    """Return the slot of a scoring: which hidden states of the step before it are scored."""
    return first << NUM_SCORED_BITS | count


def rows_of_slot(slot: int) -> slice:
    """Return the rows of `slot_of_rows`."""
    first = slot >> NUM_SCORED_BITS
    return slice(first, first + (slot & ((1 << NUM_SCORED_BITS) - 1)))
