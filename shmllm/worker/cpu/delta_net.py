"""A gated delta net on a CPU: four kernels, the first of which works in place."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.delta_net import DeltaNet
from shmllm.worker.cpu.products import kind_of
from shmllm.worker.cpu.states import States
from shmllm_kernels.cpu import KernelProgram, word_of_float
from shmllm_kernels.cpu.convolution import CONVOLVE
from shmllm_kernels.cpu.delta_net import GATED_NORM, PREPARE, delta_rule


class DeltaNetOps:
    """Records delta nets in a kernel program.

    Args:
        program: the program to record in.
        states: where the kernels find the requests and their states.
    """

    def __init__(self, program: KernelProgram, states: States) -> None:
        self._program = program
        self._states = states

    def run(self, x: Tensor, net: DeltaNet, out: Tensor) -> None:
        """Record the operation `models.ops.Ops.delta_net`, with the result in ``out``."""
        spec, kind, stride = net.spec, kind_of(net.biases), 4 * x.shape[1]
        requests, num_tokens = self._states.operands(net.layer), self._states.num_tokens
        source = [x.data_ptr(), stride]
        weights = [spec.convolved_width, net.convolution.data_ptr(), 0]
        self._program.record(
            CONVOLVE[kind, spec.taps], [*requests, *source, *weights], label="convolve"
        )
        sizes = [spec.key_heads, spec.key_dim, spec.value_heads, spec.value_dim]
        gates = [net.logs.data_ptr(), net.biases.data_ptr()]
        self._program.record(
            PREPARE[kind], [num_tokens, *source, *sizes, *gates], label="prepare_delta"
        )
        target = [out.data_ptr(), 4 * out.shape[1]]
        sharing = 1 if spec.tiled else spec.value_heads // spec.key_heads
        operands = [*requests, *source, *sizes, *target, spec.convolution_bytes, sharing]
        self._program.record(delta_rule(spec.value_dim), operands, label="delta_rule")
        gate = [x.data_ptr() + 4 * spec.convolved_width, stride]
        norm = [net.norm.weight.data_ptr(), word_of_float(net.norm.spec.eps)]
        heads = [spec.value_heads, spec.value_dim]
        operands = [num_tokens, *target, *gate, *heads, *norm]
        self._program.record(GATED_NORM[kind], operands, label="gated_norm")
