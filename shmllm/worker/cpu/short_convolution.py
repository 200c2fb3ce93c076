"""Gated short convolutions on a CPU."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.short_convolution import ShortConvolution
from shmllm.worker.cpu.products import kind_of
from shmllm.worker.cpu.states import States
from shmllm_kernels.cpu import KernelProgram
from shmllm_kernels.cpu.convolution import CONVOLVE_AHEAD, CONVOLVE_GATED


class ShortConvolutionOps:
    """Records gated short convolutions in a kernel program.

    Args:
        program: the program to record in.
        states: where the kernels find the requests and their states.
    """

    def __init__(self, program: KernelProgram, states: States) -> None:
        self._program = program
        self._states = states

    def run(self, x: Tensor, mixer: ShortConvolution, out: Tensor) -> None:
        """Record the operation `models.ops.Ops.short_convolution`, with the result in ``out``."""
        spec, weights, bias = mixer.spec, mixer.convolution, mixer.convolution_bias
        operands = [
            *self._states.operands(mixer.layer), x.data_ptr(), 4 * x.shape[1], spec.width,
            weights.data_ptr(), 0 if bias is None else bias.data_ptr(),
            out.data_ptr(), 4 * out.shape[1],
        ]  # fmt: skip
        kernels = CONVOLVE_GATED
        if spec.ahead:
            operands, kernels = [*operands, spec.ahead], CONVOLVE_AHEAD
        kernel = kernels[kind_of(weights), spec.taps]
        self._program.record(kernel, operands, label="convolve_gated")
