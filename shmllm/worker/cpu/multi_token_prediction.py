"""The layer of a checkpoint that predicts a further token, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from shmllm.config.engine import EngineConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.rope_config import needs_axes
from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import InputBatch, StepInputs
from shmllm.worker.cpu.buffers import CpuBuffers
from shmllm.worker.cpu.cache import CpuKVCache
from shmllm.worker.cpu.inputs import CpuInputs, Division
from shmllm.worker.cpu.make_program import Program, arithmetic_of
from shmllm.worker.cpu.ops import CpuOps
from shmllm.worker.cpu.products import Products
from shmllm.worker.cpu.sampler import CpuSampler
from shmllm.worker.loading import LoadedModel
from shmllm.worker.memory_owners import Workspace
from shmllm.worker.multi_token_prediction import MultiTokenPrediction
from shmllm_kernels.cpu import KernelProgram

ComputeLogits = Callable[[Tensor], Tensor]


class CpuFurtherSteps:
    """See `FurtherSteps`.

    Args:
        model: the model, with one of its further layers.
        cache: the KV cache, which has keys and values of that layer, too.
        batch: the batch, with the block table, which gets the sampled tokens at once.
        sampler: samples with the parameters in the batch.
        compute_logits: computes the logits, [rows, vocab], of hidden states, [rows, hidden].
        max_tokens: the largest number of tokens in a step.
        num_threads: the number of threads that compute.
        activation_dtype: the dtype name that products round activations to.
        uses_tiles: whether products of rounded activations use AMX.

    Attributes:
        buffers: the activations.
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
        self._inputs = CpuInputs(
            max_tokens, max_requests, divisions, cache.num_groups, has_axes=needs_axes(whole.ropes)
        )
        self.buffers = CpuBuffers(config, max_tokens, max_requests, activation_dtype)
        self._kernels = KernelProgram(num_threads)
        products = Products(self._kernels, self.buffers.rounded, activation_dtype, uses_tiles)
        self._ops = CpuOps(  # keeps the memory alive that its kernels read
            self._kernels, products, whole, self.buffers, self._inputs, cache, batch.block_tables
        )
        self._before = torch.zeros(max_tokens, config.hidden_size)
        self._after = model.further[0](self._ops, self._before, model.embedding)
        self._kept = torch.zeros(max_requests, config.hidden_size)

    def follow(
        self, inputs: StepInputs, hidden: Tensor, rows: LongArray, chosen: LongArray
    ) -> None:
        after = self._run(inputs, hidden)
        self._kept[torch.from_numpy(rows)] = after[torch.from_numpy(chosen)]

    def advance(self, inputs: StepInputs) -> None:
        rows = torch.from_numpy(inputs.rows)
        self._kept[rows] = self._run(inputs, self._kept[rows])

    def sample(self, rows: LongArray, positions: LongArray) -> None:
        logits = self._compute_logits(self._kept[torch.from_numpy(rows)])
        self._batch.token_ids[rows, positions] = self._sampler.choose(logits, rows, positions)

    def finish(self) -> None:
        """Do nothing: the batch has the tokens."""

    def _run(self, inputs: StepInputs, hidden: Tensor) -> Tensor:
        self._inputs.fill(inputs)
        num_tokens = len(inputs.token_ids)
        self._before[:num_tokens] = hidden[:num_tokens]
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
) -> tuple[MultiTokenPrediction, Workspace]:
    """Make the drafter of a model that was loaded with a further layer.

    Args:
        config: the engine's configuration.
        loaded: the model.
        program: its forward pass.
        cache, batch, sampler: those of its steps.
        num_threads: the number of threads that compute.

    Returns:
        The drafter, and the buffers of its steps.
    """
    model = loaded.model
    assert isinstance(model, DecoderModel), "the options refuse it for others"
    steps = CpuFurtherSteps(
        model,
        cache,
        batch,
        sampler,
        program.compute_logits,
        config.scheduler.max_num_batched_tokens,
        num_threads,
        *arithmetic_of(loaded),
    )
    return MultiTokenPrediction(steps, batch), steps.buffers
