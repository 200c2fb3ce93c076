"""Drafts on a CPU by a layer that checkpoints have behind the model's last one.

The layer joins the hidden state of a token with the embedding of the next one, and predicts the one
behind that (DeepSeek-AI, "DeepSeek-V3", 2024, section 2.2). So it runs behind every step, for all
of the step's tokens, because it needs keys and values of all of them. What it returns for the last
token predicts the first draft; for further drafts it runs on its own results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from shmllm.config.engine import EngineConfig
from shmllm.core.plan import StepPlan
from shmllm.models.decoder import DecoderModel
from shmllm.worker.arrays import IntArray, LongArray
from shmllm.worker.batch import NO_ROWS, InputBatch, StepInputs
from shmllm.worker.cpu.buffers import CpuBuffers
from shmllm.worker.cpu.cache import CpuKVCache
from shmllm.worker.cpu.inputs import CpuInputs, Division
from shmllm.worker.cpu.make_program import Program
from shmllm.worker.cpu.ops import CpuOps
from shmllm.worker.cpu.products import Products, uses_tiles
from shmllm.worker.cpu.sampler import CpuSampler
from shmllm.worker.loading import LoadedModel
from shmllm.worker.step_drafter import PendingDrafts
from shmllm_kernels.cpu import KernelProgram

ComputeLogits = Callable[[Tensor], Tensor]


class CpuMultiTokenPrediction:
    """See `StepDrafter`.

    Args:
        model: the model, with one of its further layers.
        cache: the KV cache, which has keys and values of that layer, too.
        batch: the batch, with the block table.
        sampler: samples with the parameters in the batch.
        compute_logits: computes the logits, [rows, vocab], of hidden states, [rows, hidden].
        max_tokens: the largest number of tokens in a step.
        num_threads: the number of threads that compute.
        activation_dtype: the dtype name that products round activations to.
        uses_tiles: whether products of rounded activations use AMX.
    """

    def __init__(
        self,
        model: DecoderModel,
        cache: CpuKVCache,
        batch: InputBatch,
        sampler: CpuSampler,
        compute_logits: ComputeLogits,
        max_tokens: int,
        num_threads: int,
        activation_dtype: str,
        uses_tiles: bool,
    ) -> None:
        self._batch = batch
        self._sampler = sampler
        self._compute_logits = compute_logits
        max_requests = batch.block_tables.shape[1]
        config = model.config
        whole = replace(config, layers=config.loaded_layers, further_layers=(), num_further=0)
        divisions = {Division.of(each) for each in config.all_attentions}
        self._inputs = CpuInputs(max_tokens, max_requests, divisions, cache.num_groups)
        buffers = CpuBuffers(config, max_tokens, max_requests, activation_dtype)
        self.workspace = buffers
        self._kernels = KernelProgram(num_threads)
        products = Products(self._kernels, buffers.rounded, activation_dtype, uses_tiles)
        self._ops = CpuOps(  # keeps the memory alive that its kernels read
            self._kernels, products, whole, buffers, self._inputs, cache, batch.block_tables
        )
        self._before = torch.zeros(max_tokens, config.hidden_size)
        self._after = model.further[0](self._ops, self._before, model.embedding)
        self._last = torch.zeros(max_requests, config.hidden_size)

    def draft(self, plan: StepPlan) -> None:
        """See `StepDrafter.draft`."""
        if not plan.drafts:
            return
        pending = PendingDrafts.of(plan)
        _, rows, begins, sizes = pending
        token_ids = self._batch.token_ids
        hidden = self._last[torch.from_numpy(rows)]
        for place in range(int(sizes.max())):
            chosen = np.flatnonzero(sizes > place)
            own, ends = rows[chosen], begins[chosen] + place
            if place:
                hidden[chosen] = self._run_one(own, ends - 1, hidden[chosen])
            logits = self._compute_logits(hidden[chosen])
            token_ids[own, ends] = self._sampler.choose(logits, own, ends)
        pending.write(plan, token_ids)

    def follow(
        self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, counts: Sequence[int] | None
    ) -> None:
        """See `StepDrafter.follow`: the layer runs for each token of the step, with the token
        behind it. What it computes behind a wrong draft is computed again."""
        rows = np.repeat(inputs.rows, inputs.counts)
        after = self._run(inputs, self._batch.token_ids[rows, inputs.positions + 1], hidden)
        if not plan.samples:
            return
        accepted = np.ones(len(plan.samples), np.int64) if counts is None else np.array(counts)
        firsts = np.cumsum([0, *plan.sample_counts[:-1]])
        places = firsts + accepted - 1
        self._last[inputs.sample_rows[places]] = after[inputs.sample_tokens[places]]

    def _run_one(self, rows: LongArray, positions: LongArray, hidden: Tensor) -> Tensor:
        """Run the layer for one token of each row, which was drafted.

        Args:
            rows: (N,) int64.
            positions: (N,) int64, the positions of the tokens, whose embeddings are joined with the
                hidden states of the positions before.
            hidden: [N, hidden] float32, these.
        """
        size = len(rows)
        inputs = self._batch.gather(
            StepPlan(
                0,
                rows=rows.tolist(),
                starts=(positions - 1).tolist(),
                counts=[1] * size,
                num_tokens=size,
            )
        )
        return self._run(inputs, self._batch.token_ids[rows, positions], hidden)

    def _run(self, inputs: StepInputs, token_ids: IntArray, hidden: Tensor) -> Tensor:
        own = replace(inputs, token_ids=token_ids.astype(np.int64), sample_tokens=NO_ROWS)
        self._inputs.fill(own)
        num_tokens = len(token_ids)
        self._before[:num_tokens] = hidden
        self._kernels.replay()
        return self._after[:num_tokens]


def make_multi_token_prediction(
    config: EngineConfig,
    loaded: LoadedModel,
    program: Program,
    cache: CpuKVCache,
    batch: InputBatch,
    sampler: CpuSampler,
    num_threads: int,
) -> CpuMultiTokenPrediction:
    """Make the drafter of a model that was loaded with a further layer.

    Args:
        config: the engine's configuration.
        loaded: the model.
        program: its forward pass.
        cache, batch, sampler: those of its steps.
        num_threads: the number of threads that compute.
    """
    model = loaded.model
    assert isinstance(model, DecoderModel), "the options refuse it for others"
    activations = program.activation_dtype
    return CpuMultiTokenPrediction(
        model,
        cache,
        batch,
        sampler,
        program.compute_logits,
        config.scheduler.max_num_batched_tokens,
        num_threads,
        activations,
        uses_tiles(loaded.load, activations),
    )
