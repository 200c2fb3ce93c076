"""The steps of models that draft from the hidden states of another one, on a CPU."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.block_model import BlockModel
from shmllm.models.drafting_model import DraftingModel
from shmllm.models.eagle_model import EagleModel
from shmllm.worker.batch import StepTables
from shmllm.worker.cpu.cache import CpuKVCache
from shmllm.worker.cpu.logits_ops import CpuLogitsOps
from shmllm.worker.cpu.ops import CpuOps
from shmllm.worker.cpu.products import Products
from shmllm.worker.cpu.program import CpuProgram
from shmllm.worker.step_inputs import StepInputs
from shmllm_kernels.cpu import KernelProgram


class HeadProgram:
    """What the programs of such models share; see `StatesProgram`.

    Args:
        model: the model.
        program: its forward pass.
        kept: [max_tokens, levels, hidden], the residual streams that the other model has kept.
        num_threads: the number of threads that compute.
        activation_dtype: the dtype name that products round activations to.
        uses_tiles: whether products of rounded activations use AMX.
    """

    def __init__(
        self,
        model: DraftingModel,
        program: CpuProgram,
        kept: Tensor,
        num_threads: int,
        activation_dtype: str,
        uses_tiles: bool,
    ) -> None:
        self._drafting = model
        self._program = program
        self._given = program.buffers.given
        self._sources, self._reads_levels = kept.flatten(1), kept.shape[1] > 0
        self._combining = combining = KernelProgram(num_threads)
        self._products = Products(combining, program.buffers.rounded, activation_dtype, uses_tiles)
        if self._reads_levels:
            num_tokens = program.inputs.address_of("num_tokens")
            ops = CpuLogitsOps(combining, self._products, num_tokens, self._given)
            model.combine(ops, self._sources)

    @property
    def width(self) -> int:
        """See `StatesProgram`."""
        return self._given.shape[1]

    def compute_logits(self, states: Tensor) -> Tensor:
        """See `StatesProgram`."""
        return self._drafting.of_tokens(self._program.compute_logits(states))


class CpuEagleProgram(HeadProgram):
    """See `StatesProgram`, of a model of EAGLE.

    Args:
        model: the model.
        program, kept, num_threads, activation_dtype, uses_tiles: see `HeadProgram`.
    """

    def __init__(
        self,
        model: EagleModel,
        program: CpuProgram,
        kept: Tensor,
        num_threads: int,
        activation_dtype: str,
        uses_tiles: bool,
    ) -> None:
        super().__init__(model, program, kept, num_threads, activation_dtype, uses_tiles)
        self._mask = model.mask

    def follow(self, inputs: StepInputs, hidden: Tensor) -> Tensor:
        """See `StatesProgram`."""
        if not self._reads_levels:
            return self.advance(inputs, hidden[: len(inputs.token_ids)])
        self._program.inputs.fill(inputs)
        self._combining.replay()
        return self._program.run(inputs)[0]

    def advance(self, inputs: StepInputs, states: Tensor | None) -> Tensor:
        """See `StatesProgram`."""
        if states is None:
            assert self._mask is not None, "it drafts all tokens at once"
            count = len(inputs.token_ids)
            states = self._mask[0].expand(count, -1)
            if self._reads_levels:
                self._sources[:count] = states
                return self.follow(inputs, states)
        self._program.inputs.fill(inputs)
        self._given[: len(states)] = states
        return self._program.run(inputs)[0]


class CpuBlockProgram(HeadProgram):
    """See `StatesProgram`, of a model that drafts a block of tokens at once.

    Args:
        model: the model.
        cache: its KV cache.
        batch: the block tables of the batch.
        program, kept, num_threads, activation_dtype, uses_tiles: see `HeadProgram`.
    """

    def __init__(
        self,
        model: BlockModel,
        cache: CpuKVCache,
        batch: StepTables,
        program: CpuProgram,
        kept: Tensor,
        num_threads: int,
        activation_dtype: str,
        uses_tiles: bool,
    ) -> None:
        super().__init__(model, program, kept, num_threads, activation_dtype, uses_tiles)
        self._ops = CpuOps(  # keeps the memory alive that its kernels read
            self._combining, self._products, model.config, program.buffers, program.inputs,
            cache, batch.block_tables,
        )  # fmt: skip
        model.store(self._ops, self._given)

    def follow(self, inputs: StepInputs, hidden: Tensor) -> Tensor:
        """See `StatesProgram`: it stores keys and values, and nothing predicts a token."""
        self._program.inputs.fill(inputs)
        self._combining.replay()
        return self._given

    def advance(self, inputs: StepInputs, states: Tensor | None) -> Tensor:
        """See `StatesProgram`."""
        self._program.inputs.fill(inputs)
        return self._program.run(inputs)[0]
