"""A smaller model that drafts on a CPU.

Its keys and values lie in blocks of the same pool as those of the large model, under the same
hashes, so it finds the prefixes that it has computed before. It computes a request's tokens when it
drafts for it, and not before: a request without drafts costs nothing. It samples with the noise of
the request, so that it guesses the large model's draws and not only its most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from shmllm.config.engine import EngineConfig
from shmllm.core.plan import StepPlan
from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import InputBatch, StepInputs
from shmllm.worker.cpu.cache import CpuKVCache
from shmllm.worker.cpu.make_program import Program, make_program
from shmllm.worker.cpu.sampler import CpuSampler
from shmllm.worker.loading import LoadedModel
from shmllm.worker.step_drafter import PendingDrafts


class CpuDraftModel:
    """See `StepDrafter`.

    Args:
        program: the forward pass of the model.
        batch: the batch, with the block table.
        sampler: samples with the parameters in the batch.
        group: the index of a group of its layers.
        num_blocks: the number of blocks of keys and values, with the padding block.
        max_tokens: the largest number of tokens in a step.
    """

    def __init__(
        self,
        program: Program,
        batch: InputBatch,
        sampler: CpuSampler,
        group: int,
        num_blocks: int,
        max_tokens: int,
    ) -> None:
        self.workspace = program.buffers
        self._program = program
        self._batch = batch
        self._sampler = sampler
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
            self._draft_one(rows[chosen], begins[chosen] + place)
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
        """Take note of blocks that were allocated, which are empty, and of prefixes that requests
        share, whose blocks may have been filled before."""
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
                self._run([int(row)], [int(computed[row])], [count], samples=[])
                computed[row] += count

    def _draft_one(self, rows: LongArray, ends: LongArray) -> None:
        """Draft the token at position `ends` of each row, from all tokens before it."""
        starts = self._num_computed[rows]
        samples = list(range(len(rows)))
        logits = self._run(rows.tolist(), starts.tolist(), (ends - starts).tolist(), samples)
        self._batch.token_ids[rows, ends] = self._sampler.choose(logits, rows, ends)
        self._num_computed[rows] = ends

    def _run(
        self, rows: list[int], starts: list[int], counts: list[int], samples: list[int]
    ) -> Tensor:
        plan = StepPlan(
            0, rows=rows, starts=starts, counts=counts, samples=samples, num_tokens=sum(counts)
        )
        inputs = self._batch.gather(plan)
        self._program.inputs.fill(inputs)
        return self._program.run(inputs)[1]


def make_draft_model(
    config: EngineConfig,
    draft: LoadedModel,
    cache: CpuKVCache,
    first: int,
    batch: InputBatch,
    sampler: CpuSampler,
    num_threads: int,
) -> CpuDraftModel:
    """Make the drafter of a loaded draft model.

    Args:
        config: the engine's configuration.
        draft: the model.
        cache: the KV cache of both models.
        first: the index of the model's first layer in the groups of the cache.
        batch, sampler: those of the large model.
        num_threads: the number of threads that compute.
    """
    view = cache.of_draft(draft.config, first)
    program = make_program(config, draft, view, batch, num_threads)
    max_tokens = config.scheduler.max_num_batched_tokens
    layer = view.layers[0]
    num_blocks = len(layer.blocks)
    return CpuDraftModel(program, batch, sampler, layer.group, num_blocks, max_tokens)
