"""Gated delta nets on a CPU: four kernels, the first of which works in place."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.delta_net import DeltaNet
from shmllm.models.kimi_delta import KimiDelta
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
        spec = net.spec
        gates = x[:, spec.convolved_width :]
        rates = gates[:, spec.width :]
        sharing = 1 if spec.tiled else spec.value_heads // spec.key_heads
        sizes = spec.key_heads, spec.key_dim, spec.value_heads, spec.value_dim
        self._run(x, rates, rates[:, spec.value_heads :], net, sizes, sharing, out)
        self._gate(out, gates, net, sizes, "silu")

    def run_by_channel(self, x: Tensor, decays: Tensor, net: KimiDelta, out: Tensor) -> None:
        """Record the operation `models.ops.Ops.kimi_delta`, likewise."""
        spec = net.spec
        self._run(x, x[:, spec.convolved_width :], decays, net, spec.sizes, 1, out)

    def gate(self, x: Tensor, gates: Tensor, net: KimiDelta) -> None:
        """Record the operation `models.ops.Ops.gate_heads`."""
        self._gate(x, gates, net, net.spec.sizes, "sigmoid")

    def _run(
        self,
        x: Tensor,
        rates: Tensor,
        decays: Tensor,
        net: DeltaNet | KimiDelta,
        sizes: tuple[int, int, int, int],
        sharing: int,
        out: Tensor,
    ) -> None:
        spec, source = net.spec, _rows(x)
        requests, num_tokens = self._states.operands(net.layer), self._states.num_tokens
        kernel = CONVOLVE[kind_of(net.convolution), spec.taps]
        weights = [spec.convolved_width, net.convolution.data_ptr(), 0]
        self._program.record(kernel, [*requests, *source, *weights], label="convolve")
        by_row, most, least = False, 1.0, 0.0
        if isinstance(net, KimiDelta):
            by_row, least = True, net.spec.least_log or 0.0
        else:
            most = net.spec.most_rate
        numbers = [net.logs.data_ptr(), net.biases.data_ptr(), rates.data_ptr()]
        operands = [num_tokens, *source, *sizes, *numbers, *_rows(decays)]
        operands += [word_of_float(most), word_of_float(least)]
        kernel = PREPARE[kind_of(net.biases), by_row]
        self._program.record(kernel, operands, label="prepare_delta")
        target = [out.data_ptr(), spec.convolution_bytes, sharing, rates.data_ptr()]
        kernel = delta_rule(sizes[3], by_row)
        self._program.record(
            kernel, [*requests, *source, *sizes, *target, *_rows(decays)], label="delta_rule"
        )

    def _gate(
        self,
        x: Tensor,
        gates: Tensor,
        net: DeltaNet | KimiDelta,
        sizes: tuple[int, int, int, int],
        activation: str,
    ) -> None:
        norm = [net.norm.weight.data_ptr(), word_of_float(net.norm.spec.eps)]
        operands = [self._states.num_tokens, *_rows(x), *_rows(gates), *sizes[2:], *norm]
        kernel = GATED_NORM[kind_of(net.norm.weight), activation]
        self._program.record(kernel, operands, label="gated_norm")


def _rows(x: Tensor) -> list[int]:
    """Return the address of rows of float32, and the bytes from one to the next."""
    return [x.data_ptr(), 4 * x.stride(0)]
