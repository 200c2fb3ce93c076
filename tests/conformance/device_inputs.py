"""The tests of a step's inputs on a device; each folder has a fixture `gpu_device`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from shmllm.core.plan import BlockAppend, NewRequest, StepPlan
from shmllm.models.mixer_specs import WITHIN_ITEMS
from shmllm.params.sampling import SamplingParams
from shmllm.worker.batch import InputBatch
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm.worker.rope_positions import PlacedGrid

ROWS, SAMPLES, BLOCKS, GROUPS = 4, 7, 8, 2
IN_SECOND = 50
"""The number that is added to the ids of blocks in the second group of layers."""
TOKENS = list(range(40, 60))


def make(device, max_tokens: int = 16) -> tuple[GpuInputs, InputBatch]:
    last_tokens = torch.zeros(ROWS, dtype=torch.int64, device=device.torch_device)
    inputs = GpuInputs(max_tokens, ROWS, SAMPLES, BLOCKS, GROUPS, last_tokens, device)
    return inputs, InputBatch(ROWS, 4 * BLOCKS, 4, 100, GROUPS)


def new_request(row: int, block_ids: list[int]) -> NewRequest:
    return NewRequest(row, TOKENS, in_groups(block_ids), SamplingParams(), 0, 0, ())


def in_groups(block_ids: list[int]) -> list[list[int]]:
    return [block_ids, [block_id + IN_SECOND for block_id in block_ids]]


def assert_tables(tables: torch.Tensor, rows: list[list[int]]) -> None:
    """Check the first blocks of the first rows in both groups; 0 is a place without a block."""
    want = torch.tensor([rows, [[block and block + IN_SECOND for block in row] for row in rows]])
    assert torch.equal(tables[:, : len(rows), : len(rows[0])].cpu().long(), want)


def send(inputs: GpuInputs, batch: InputBatch, plan: StepPlan, descriptor: BatchDescriptor) -> None:
    plan.num_tokens = sum(plan.counts)
    batch.update(plan)
    inputs.change_blocks(inputs.changes_of(plan))
    inputs.send(batch.inputs(plan), descriptor, plan.is_repeat)


class InputsConformance:
    def test_inputs_are_padded(self, gpu_device) -> None:
        inputs, batch = make(gpu_device)
        plan = StepPlan(1, rows=[2, 0], starts=[0, 3], counts=[5, 1], samples=[1])
        plan.new_requests = [new_request(2, [7, 8]), new_request(0, [3])]
        send(inputs, batch, plan, BatchDescriptor(8, 3, False))
        gpu_device.synchronize()
        expected = {
            "token_ids": [40, 41, 42, 43, 44, 43, -1, -1],
            "positions": [0, 1, 2, 3, 4, 3, 0, 0],
            "query_starts": [0, 5, 6, 6],
            "context_lens": [5, 4, 0],
            "rows": [2, 0, 0],
            "sample_tokens": [5, 0, 0],
            "sample_rows": [0, -1, -1],
            "sample_positions": [4, 0, 0],
        }
        for name, want in expected.items():
            assert getattr(inputs.step, name).cpu()[: len(want)].tolist() == want, name
        slots = np.array([28, 29, 30, 31, 32, 15])
        for group, more in enumerate((0, 4 * IN_SECOND)):
            assert inputs.step.slots.cpu()[group, :8].tolist() == [*(slots + more), -1, -1]
        assert_tables(inputs.block_tables, [[7, 8], [3, 0]])
        assert inputs.num_samples == 1

    def test_types_and_ends_of_tokens_are_padded(self, gpu_device) -> None:
        """Of the second request only the last two tokens are computed."""
        last_tokens = torch.zeros(ROWS, dtype=torch.int64, device=gpu_device.torch_device)
        sizes = 16, ROWS, SAMPLES, BLOCKS, GROUPS
        inputs = GpuInputs(*sizes, last_tokens, gpu_device, (None, 1), has_types=True)
        batch = InputBatch(ROWS, 4 * BLOCKS, 4, 100, GROUPS)
        plan = StepPlan(1, rows=[2, 0], starts=[0, 4], counts=[4, 2])
        plan.new_requests = [
            replace(new_request(2, [7, 8]), second_segment=3),
            replace(new_request(0, [3, 4]), second_segment=1),
        ]
        for _ in range(2):
            send(inputs, batch, plan, BatchDescriptor(8, 3, False))
            gpu_device.synchronize()
            assert inputs.step.token_types.cpu()[:, :8].tolist() == [[0, 0, 0, 1, 1, 1, 0, 0]]
            for ahead, ends in (
                (None, [4, 4, 4, 4, 6, 6, 0, 0]),
                (1, [2, 3, 4, 4, 6, 6, 0, 0]),
            ):
                found = inputs.ends(ahead, 8)
                assert found is not None
                assert found.cpu().tolist() == ends
            assert inputs.ends(0, 8) is None
            assert inputs.step.query_starts.cpu()[:4].tolist() == [0, 4, 6, 6]
            inputs.idle(BatchDescriptor(16, 4, False))

    def test_positions_on_axes_are_padded(self, gpu_device) -> None:
        """Also where a batch has none: they are alike then."""
        last_tokens = torch.zeros(ROWS, dtype=torch.int64, device=gpu_device.torch_device)
        sizes = 16, ROWS, SAMPLES, BLOCKS, GROUPS
        inputs = GpuInputs(*sizes, last_tokens, gpu_device, num_axes=3)
        for has_axes in (True, False):
            batch = InputBatch(ROWS, 4 * BLOCKS, 4, 100, GROUPS, patches_per_side=int(has_axes))
            plan = StepPlan(1, rows=[2, 0], starts=[1, 4], counts=[4, 2])
            plan.new_requests = [new_request(2, [7, 8]), new_request(0, [3, 4])]
            plan.num_tokens = 6
            batch.update(plan)
            alike = [1, 2, 3, 4, 4, 5, 0, 0]
            want = [alike] * 3
            if batch.rope_positions is not None:
                batch.rope_positions.update(2, [PlacedGrid(2, 1, 1, 2)], [7, 8])
                want = [[1, 2, 2, 4, 4, 5, 0, 0], [1, 2, 2, 4, 4, 5, 0, 0], alike]
            inputs.send(batch.inputs(plan), BatchDescriptor(8, 3, False))
            gpu_device.synchronize()
            assert inputs.step.rope_positions.cpu()[:, :8].tolist() == want
            assert inputs.step.positions.cpu()[:8].tolist() == alike
            inputs.idle(BatchDescriptor(16, 4, False))
        gpu_device.synchronize()
        assert not inputs.step.rope_positions.any()

    def test_only_steps_with_items_have_ends_within_them(self, gpu_device) -> None:
        last_tokens = torch.zeros(ROWS, dtype=torch.int64, device=gpu_device.torch_device)
        sizes = 16, ROWS, SAMPLES, BLOCKS, GROUPS
        inputs = GpuInputs(*sizes, last_tokens, gpu_device, (WITHIN_ITEMS, None))
        batch = InputBatch(ROWS, 4 * BLOCKS, 4, 100, GROUPS)
        plan = StepPlan(1, rows=[2, 0], starts=[0, 4], counts=[4, 2], num_tokens=6)
        plan.new_requests = [new_request(2, [7, 8]), new_request(0, [3, 4])]
        batch.update(plan)
        step = batch.inputs(plan)
        descriptor = BatchDescriptor(8, 3, False)
        inputs.idle(descriptor)
        assert inputs.ends(WITHIN_ITEMS, 8) is not None, "a graph serves all steps"
        for ends, is_causal in (
            (None, True),
            ([1, 2, 3, 4, 5, 6], True),
            ([1, 4, 4, 4, 6, 6], False),
        ):
            item_ends = None if ends is None else np.array(ends)
            inputs.send(replace(step, item_ends=item_ends), descriptor)
            gpu_device.synchronize()
            found = inputs.ends(WITHIN_ITEMS, 8)
            assert (found is None) == is_causal
            if found is not None:
                assert found.cpu().tolist() == [*ends, 0, 0]
            assert inputs.step.ends.cpu()[0, :8].tolist() == [*(ends or [1, 2, 3, 4, 5, 6]), 0, 0]
            whole = inputs.ends(None, 8)
            assert whole is not None
            assert whole.cpu().tolist() == [4, 4, 4, 4, 6, 6, 0, 0]

    def test_samples_behind_drafted_tokens_are_padded(self, gpu_device) -> None:
        inputs, batch = make(gpu_device)
        plan = StepPlan(1, rows=[2, 0], starts=[2, 3], counts=[3, 1], samples=[0, 1])
        plan.new_requests = [new_request(2, [7, 8]), new_request(0, [3])]
        plan.drafts = {0: [71, 72]}
        send(inputs, batch, plan, BatchDescriptor(8, 2, False, 3))
        gpu_device.synchronize()
        expected = {
            "token_ids": [42, 71, 72, 43, -1, -1, -1, -1],
            "query_starts": [0, 3, 4],
            "context_lens": [5, 4],
            "sample_tokens": [0, 1, 2, 3, 0],
            "sample_rows": [2, 2, 2, 0, -1],
            "sample_positions": [3, 4, 5, 4, 0],
        }
        for name, want in expected.items():
            assert getattr(inputs.step, name).cpu()[: len(want)].tolist() == want, name
        assert inputs.num_samples == 4

    def test_blocks_are_kept_by_row(self, gpu_device) -> None:
        inputs, batch = make(gpu_device)
        first = StepPlan(1, rows=[0, 1], starts=[0, 0], counts=[4, 4], samples=[0, 1])
        first.new_requests = [new_request(0, [3]), new_request(1, [9])]
        send(inputs, batch, first, BatchDescriptor(8, 2, False))
        second = StepPlan(2, rows=[1, 0], starts=[4, 4], counts=[1, 1], samples=[0, 1])
        second.block_appends = [
            BlockAppend(1, [1] * 2, in_groups([5])),
            BlockAppend(0, [1] * 2, in_groups([6, 2])),
        ]
        send(inputs, batch, second, BatchDescriptor(2, 2, True))
        gpu_device.synchronize()
        assert_tables(inputs.block_tables, [[9, 5, 0], [3, 6, 2]])
        again = StepPlan(3, rows=[0], starts=[0], counts=[2])
        again.new_requests = [new_request(0, [4])]
        send(inputs, batch, again, BatchDescriptor(2, 1, False))
        gpu_device.synchronize()
        assert_tables(inputs.block_tables, [[4]])

    def test_many_changed_blocks_in_one_step(self, gpu_device) -> None:
        """The copy of the step before, which changes fewer blocks, is still pending."""
        inputs, batch = make(gpu_device, max_tokens=2)
        seen = []
        for step in range(4):
            block_ids = np.arange(1, 1 + ROWS * BLOCKS).reshape(ROWS, BLOCKS) + step
            plan = StepPlan(step, rows=[3, 1], starts=[0, 0], counts=[1, 1])
            for row in range(ROWS if step else 1):
                plan.new_requests.append(new_request(row, block_ids[row].tolist()))
            send(inputs, batch, plan, BatchDescriptor(2, 2, True))
            if step:
                seen.append((inputs.block_tables.clone(), block_ids[[3, 1]]))
            if step % 2:
                gpu_device.synchronize()
        for table, want in seen:
            assert_tables(table, want.tolist())

    def test_an_idle_step_is_padding_that_gets_logits(self, gpu_device) -> None:
        inputs, _ = make(gpu_device)
        inputs.idle(BatchDescriptor(8, 3, False, 2))
        gpu_device.synchronize()
        step = inputs.step
        assert step.token_ids.cpu()[:8].tolist() == [-1] * 8
        assert (step.slots.cpu()[:, :8] == -1).all()
        assert step.query_starts.cpu()[:4].tolist() == [0] * 4
        assert inputs.num_samples == 5
