"""Steps that rank 0 tells the other ranks on GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from shmllm.config.graphs import CudaGraphMode
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor
from shmllm.worker.gpu.inputs import NO_CHANGES, BlockChanges, PackedStep
from shmllm.worker.gpu.step_messages import (
    Act,
    StepMessage,
    StepMessages,
    rows_of_slot,
    slot_of_rows,
)
from shmllm.worker.group import Alone
from shmllm_kernels.reference.step import StepSizes

GROUPS, ROWS, WIDTH = 2, 3, 4


def make_messages() -> StepMessages:
    inputs = SimpleNamespace(block_tables=torch.empty(GROUPS, ROWS, WIDTH), num_packed=20)
    return StepMessages(Alone(), inputs)  # type: ignore[arg-type]


def make_step(number: int, changes: BlockChanges = NO_CHANGES) -> StepMessage:
    """A step whose numbers are all different."""
    numbers = np.arange(number, number + 5, dtype=np.int64)
    sizes = StepSizes(number + 1, number + 2, number + 3)
    packed = PackedStep(numbers, sizes, bool(number % 2), bool(number % 3))
    descriptor = BatchDescriptor(
        number + 4, number + 5, bool((number + 1) % 2), number + 6, number + 8
    )
    mode = list(CudaGraphMode)[number % 3]
    copies = [(number, number + 1)] * (number % 4)
    adapters = np.arange(2 * (number % 4)).reshape(2, -1) + number if number % 3 else None
    kept = np.arange(2 * (number % 3)).reshape(2, -1) - number
    sizes_of_step = mode, descriptor, number + 7
    told = packed, bool(number % 2), changes, copies, adapters, Act(number % 4), kept
    return StepMessage(*sizes_of_step, *told)


def assert_equal(found: StepMessage, step: StepMessage) -> None:
    for name in ("mode", "descriptor", "max_query_len", "is_repeat", "state_copies", "act"):
        assert getattr(found, name) == getattr(step, name)
    for name in ("adapters", "kept"):
        own, theirs = getattr(found, name), getattr(step, name)
        assert (own is None) == (theirs is None)
        assert own is None or own.tolist() == theirs.tolist()
    assert found.packed.numbers.tolist() == step.packed.numbers.tolist()
    assert found.packed.sizes == step.packed.sizes
    assert found.packed.has_embeds == step.packed.has_embeds
    assert found.packed.looks_ahead == step.packed.looks_ahead
    assert found.changes.indices.tolist() == step.changes.indices.tolist()
    assert found.changes.block_ids.tolist() == step.changes.block_ids.tolist()


def test_two_steps_are_there_at_a_time():
    messages = make_messages()
    every = GROUPS * ROWS * WIDTH
    changes = BlockChanges(np.arange(every), np.arange(every, dtype=np.int32)[::-1].copy())
    steps = [make_step(10), make_step(21, changes), make_step(33)]
    slots = [messages.write(step) for step in steps[:2]]
    for slot, step in zip(slots, steps, strict=False):
        assert_equal(messages.read(slot), step)
    assert messages.write(steps[2]) == slots[0]
    assert_equal(messages.read(slots[0]), steps[2])
    assert_equal(messages.read(slots[1]), steps[1])


def test_a_scoring_names_hidden_states_of_the_step_before():
    for first, count in ((0, 1), (8191, 64), (0, 0)):
        rows = rows_of_slot(slot_of_rows(first, count))
        assert (rows.start, rows.stop) == (first, first + count)
