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
    """See `StatesProgram`. It reads the hidden states that the other model's last step has kept.

    Args:
        model: the model.
        program: its forward pass.
        kept: [max_tokens, levels, hidden], the hidden states of the other model.
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
        num_tokens = program.inputs.address_of("num_tokens")
        products = Products(combining, program.buffers.rounded, activation_dtype, uses_tiles)
        model.combine(CpuLogitsOps(combining, products, num_tokens, self._given), kept.flatten(1))

    @property
    def width(self) -> int:
        """See `StatesProgram`."""
        return self._given.shape[1]

    def follow(self, inputs: StepInputs, hidden: Tensor) -> Tensor:
        """See `StatesProgram`."""
        self._program.inputs.fill(inputs)
        self._combining.replay()
        return self._program.run(inputs)[0]

    def advance(self, inputs: StepInputs, states: Tensor) -> Tensor:
        """See `StatesProgram`."""
        self._program.inputs.fill(inputs)
        self._given[: len(states)] = states
        return self._program.run(inputs)[0]

    def compute_logits(self, states: Tensor) -> Tensor:
        """See `StatesProgram`."""
        return self._model.of_tokens(self._program.compute_logits(states))
