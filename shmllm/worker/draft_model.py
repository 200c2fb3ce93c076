"""A smaller model that drafts: which of its tokens are computed, which of its blocks are filled.

Its keys and values lie in blocks of the same pool as those of the large model, under the same
hashes, so it finds the prefixes that it has computed before. It computes a request's tokens when it
drafts for it, and not before: a request without drafts costs nothing. It samples with the noise of
the request, so that it guesses the large model's draws and not only its most likely tokens.

This module must not know on which device the model computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from shmllm.core.plan import StepPlan
from shmllm.core.shared_blocks import KEYS_AND_VALUES
from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import InputBatch
from shmllm.worker.step_drafter import PendingDrafts
from shmllm.worker.step_inputs import StepInputs


class DraftSteps(Protocol):
    """Computes the steps of a draft model on a device."""

    def compute(self, inputs: StepInputs) -> None:
        """Compute tokens, none of which gets a sample."""

    def sample(self, inputs: StepInputs, are_drafted: bool) -> None:
        """Compute tokens, and sample one behind the last one of each request.

        Args:
            inputs: the inputs of the step, with one sample for each request.
            are_drafted: whether the tokens are those that the call before has sampled, one for each
                request; then the device may have them alone, and `inputs` others.
        """

    def finish(self) -> None:
        """Wait for the sampled tokens: the batch has all of them now."""


class DraftModel:
    """See `StepDrafter`.

    Args:
        steps: computes the model's steps.
        batch: the batch, with the block table.
        group: the index of a group of the model's layers.
        num_blocks: the number of blocks of keys and values, with the padding block.
        max_tokens: the largest number of tokens in a step.
    """

    def __init__(
        self, steps: DraftSteps, batch: InputBatch, group: int, num_blocks: int, max_tokens: int
    ) -> None:
        self._steps = steps
        self._batch = batch
        self._tables = batch.block_tables[group]
        self._group = group
        self._max_tokens = max_tokens
        self._num_computed: LongArray = np.zeros(len(self._tables), np.int64)
        self._is_filled = np.zeros(num_blocks, np.bool_)

    def draft(self, plan: StepPlan) -> None:
        """See `StepDrafter.draft`."""
        self._take_blocks(plan)
        if not plan.drafts:
            return
        pending = PendingDrafts.of(plan)
        _, rows, begins, sizes = pending
        self._catch_up(rows, begins)
        for place in range(int(sizes.max())):
            chosen = sizes > place
            self._draft_one(rows[chosen], begins[chosen] + place, are_drafted=place > 0)
        self._steps.finish()
        pending.write(plan, self._batch.token_ids)
        for row, begin in zip(rows, begins, strict=True):
            self._is_filled[self._tables[row, : begin // self._batch.block_size]] = True

    def follow(
        self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, counts: Sequence[int] | None
    ) -> None:
        """See `StepDrafter.follow`: what was computed of wrong drafts does not count."""
        if counts is None:
            return
        for index, count in zip(plan.samples, counts, strict=True):
            if size := len(plan.drafts.get(index, ())):
                row, end = plan.rows[index], plan.starts[index] + plan.counts[index] - size
                self._num_computed[row] = min(self._num_computed[row], end + count - 1)

    def _take_blocks(self, plan: StepPlan) -> None:
        """Take note of blocks that were allocated, which are empty, and copies of shared ones, too;
        and of prefixes that requests share, whose blocks may have been filled before."""
        copied = [target for section, _, target in plan.loads if section == KEYS_AND_VALUES]
        if plan.external is not None:
            copied += plan.external.loaded
        self._is_filled[copied] = False
        for append in plan.block_appends:
            self._is_filled[append.block_ids[self._group]] = False
        for request in plan.new_requests:
            ids = request.block_ids[self._group]
            num_hit = plan.starts[plan.rows.index(request.row)] // self._batch.block_size
            self._is_filled[ids[num_hit:]] = False
            filled = self._is_filled[ids[:num_hit]]
            num_filled = len(filled) if filled.all() else int(filled.argmin())
            self._num_computed[request.row] = num_filled * self._batch.block_size

    def _catch_up(self, rows: LongArray, known: LongArray) -> None:
        """Compute tokens until those that are left fit into one step."""
        computed = self._num_computed
        for row, end in zip(rows, known - 1, strict=True):
            while (known - computed[rows]).sum() > self._max_tokens and computed[row] < end:
                count = min(int(end - computed[row]), self._max_tokens)
                plan = StepPlan(
                    0, rows=[int(row)], starts=[int(computed[row])], counts=[count],
                    num_tokens=count,
                )  # fmt: skip
                self._steps.compute(self._batch.gather(plan))
                computed[row] += count

    def _draft_one(self, rows: LongArray, ends: LongArray, are_drafted: bool) -> None:
        """Draft the token at position `ends` of each row, from all tokens before it."""
        starts = self._num_computed[rows]
        counts = ends - starts
        plan = StepPlan(
            0, rows=rows.tolist(), starts=starts.tolist(), counts=counts.tolist(),
            samples=list(range(len(rows))), num_tokens=int(counts.sum()),
        )  # fmt: skip
        self._steps.sample(self._batch.gather(plan), are_drafted)
        self._num_computed[rows] = ends
