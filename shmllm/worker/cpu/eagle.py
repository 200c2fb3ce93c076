"""The steps of a model that drafts from the hidden states of another one, on a CPU."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.eagle_model import EagleModel
from shmllm.worker.batch import StepInputs
from shmllm.worker.cpu.ops import CpuLogitsOps
from shmllm.worker.cpu.products import Products
from shmllm.worker.cpu.program import CpuProgram
from shmllm_kernels.cpu import KernelProgram


class CpuEagleProgram:
    """See `StatesProgram`. It reads hidden states of the other model's last step.

    Args:
        model: the model.
        program: its forward pass.
        kept: [max_tokens, levels, hidden], the residual streams that it has kept.
        num_threads: the number of threads that compute.
        activation_dtype: the dtype name that products round activations to.
        uses_tiles: whether products of rounded activations use AMX.
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
        self._model = model
        self._program = program
        self._given = program.buffers.given
        self._combining = combining = KernelProgram(num_threads)
        self._sources, self._reads_levels = kept.flatten(1), kept.shape[1] > 0
        if self._reads_levels:
            num_tokens = program.inputs.address_of("num_tokens")
            products = Products(combining, program.buffers.rounded, activation_dtype, uses_tiles)
            ops = CpuLogitsOps(combining, products, num_tokens, self._given)
            model.combine(ops, self._sources)

    @property
    def width(self) -> int:
        """See `StatesProgram`."""
        return self._given.shape[1]

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
            assert self._model.mask is not None, "it drafts all tokens at once"
            count = len(inputs.token_ids)
            states = self._model.mask[0].expand(count, -1)
            if self._reads_levels:
                self._sources[:count] = states
                return self.follow(inputs, states)
        self._program.inputs.fill(inputs)
        self._given[: len(states)] = states
        return self._program.run(inputs)[0]

    def compute_logits(self, states: Tensor) -> Tensor:
        """See `StatesProgram`."""
        return self._model.of_tokens(self._program.compute_logits(states))
