"""The layer of a checkpoint that predicts a further token, on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from shmllm.models.decoder import DecoderModel
from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import InputBatch, StepTables
from shmllm.worker.cpu.cache import CpuKVCache
from shmllm.worker.cpu.group import Meetings, played_by_all
from shmllm.worker.cpu.ops import CpuOps
from shmllm.worker.cpu.products import Products
from shmllm.worker.cpu.program import CpuProgram
from shmllm.worker.cpu.sampler import CpuSampler
from shmllm.worker.group import Group, Kind
from shmllm.worker.step_inputs import StepInputs
from shmllm_kernels.cpu import KernelProgram


class CpuFurtherProgram:
    """The recorded forward pass of the layer. It has the inputs and the activations of the model's
    steps, and runs between them.

    Args:
        model: the model, with one of its further layers.
        cache: the KV cache, which has keys and values of that layer, too.
        batch: the block tables of the batch.
        program: the model's forward pass.
        num_threads: the number of threads that compute.
        activation_dtype: the dtype name that products round activations to.
        uses_tiles: whether products of rounded activations use AMX.
        group: the group of which this process computes a part of the layer.
    """

    def __init__(
        self,
        model: DecoderModel,
        cache: CpuKVCache,
        batch: StepTables,
        program: CpuProgram,
        num_threads: int,
        activation_dtype: str,
        uses_tiles: bool,
        group: Group,
    ) -> None:
        config, inputs, buffers = model.config, program.inputs, program.buffers
        self._model_program = program
        self._group = group
        max_tokens, hidden = len(inputs.token_ids), config.hidden_size
        self._kernels = KernelProgram(num_threads)
        self._meetings = meetings = Meetings(
            self._kernels, "further", group, model.partial, max_tokens, hidden
        )
        products = Products(self._kernels, buffers.rounded, activation_dtype, uses_tiles)
        own = replace(config, layers=config.loaded_layers, further_layers=(), num_further=0)
        self._ops = CpuOps(  # keeps the memory alive that its kernels read
            self._kernels, products, own, buffers, inputs, cache, batch.block_tables, None, meetings
        )
        self._before = self._own = group.floats("before a further layer", max_tokens, hidden)
        if meetings.are_needed:  # each rank normalises a copy in place
            self._own = torch.zeros(max_tokens, hidden)
            meetings.copy(inputs.address_of("num_tokens"), self._before, self._own)
        self._after = model.further[0](self._ops, self._own, model.embedding)

    @property
    def width(self) -> int:
        """See `StatesProgram`."""
        return self._before.shape[1]

    def follow(self, inputs: StepInputs, hidden: Tensor) -> Tensor:
        """Compute a step on all ranks; see `StatesProgram`."""
        num_tokens = len(inputs.token_ids)
        self._model_program.inputs.fill(inputs)
        self._before[:num_tokens] = hidden[:num_tokens]
        with played_by_all(self._group, Kind.FURTHER, self._meetings):
            self.play()
        return self._after[:num_tokens]

    def advance(self, inputs: StepInputs, states: Tensor | None) -> Tensor:
        """See `StatesProgram`."""
        assert states is not None, "each draft reads the one before"
        return self.follow(inputs, states)

    def compute_logits(self, states: Tensor) -> Tensor:
        """See `StatesProgram`."""
        return self._model_program.compute_logits(states)

    def play(self) -> None:
        """Compute this process's part of a step that its group has begun."""
        self._kernels.replay()


class StatesProgram(Protocol):
    """The forward pass of what predicts tokens from hidden states.

    Attributes:
        width: the width of a hidden state.
    """

    @property
    def width(self) -> int: ...

    def follow(self, inputs: StepInputs, hidden: Tensor) -> Tensor:
        """Compute a step whose tokens follow those of the model's last step.

        Args:
            inputs: the inputs of the step, for T tokens.
            hidden: [T or more, hidden] float32, what the model's final norm returned for its own.

        Returns:
            [T, width], which the next step overwrites.
        """
        ...

    def advance(self, inputs: StepInputs, states: Tensor | None) -> Tensor:
        """Compute a step from results, [T, width], of the steps before, or from what stands for
        those of tokens that are not known. Returns as `follow`."""
        ...

    def compute_logits(self, states: Tensor) -> Tensor:
        """Compute the logits, [rows, vocab] float32, of results, [rows, width]."""
        ...


class CpuFurtherSteps:
    """See `FurtherSteps`.

    Args:
        program: the forward pass.
        batch: the batch, which gets the sampled tokens at once.
        sampler: samples with the parameters in the batch.
    """

    def __init__(self, program: StatesProgram, batch: InputBatch, sampler: CpuSampler) -> None:
        self._program = program
        self._batch = batch
        self._sampler = sampler
        self._kept = torch.zeros(batch.block_tables.shape[1], program.width)
        self._results = self._kept

    def follow(
        self, inputs: StepInputs, hidden: Tensor, rows: LongArray, chosen: LongArray
    ) -> None:
        self._results = self._program.follow(inputs, hidden)
        self.keep(rows, chosen)

    def advance(self, inputs: StepInputs) -> None:
        rows = torch.from_numpy(inputs.rows)
        self._kept[rows] = self._program.advance(inputs, self._kept[rows])

    def expand(self, inputs: StepInputs) -> None:
        self._results = self._program.advance(inputs, None)

    def keep(self, rows: LongArray, chosen: LongArray) -> None:
        self._kept[torch.from_numpy(rows)] = self._results[torch.from_numpy(chosen)]

    def sample(self, rows: LongArray, positions: LongArray) -> None:
        logits = self._program.compute_logits(self._kept[torch.from_numpy(rows)])
        self._batch.token_ids[rows, positions] = self._sampler.choose(logits, rows, positions)

    def finish(self) -> None:
        """Do nothing: the batch has the tokens."""
