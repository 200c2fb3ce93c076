"""Mamba 1 and 2 on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.layers import Allocator
from shmllm.models.lightning import Lightning
from shmllm.models.mamba2_mixer import Mamba2
from shmllm.models.mamba_mixer import Mamba
from shmllm.models.recurrent_specs import MambaSpec
from shmllm.worker.cpu.products import Products, kind_of
from shmllm.worker.cpu.states import States
from shmllm_kernels.cpu import Kernel, KernelProgram, mamba, mamba2, word_of_float
from shmllm_kernels.cpu.convolution import CONVOLVE
from shmllm_kernels.cpu.delta_net import GATED_NORM


class MambaBuffers:
    """The buffers of a Mamba, all float32.

    Args:
        allocate: returns the memory of a tensor.
        spec: the Mamba.
        max_tokens: the largest number of tokens in a step.

    Attributes:
        mixed: [max_tokens, width], inputs behind the convolution.
        projected: [max_tokens, projected_width], the output of `Mamba.x_proj`.
        ranks: [max_tokens, rank], the input of `Mamba.dt_proj`.
    """

    def __init__(self, allocate: Allocator, spec: MambaSpec, max_tokens: int) -> None:
        widths = spec.width, spec.projected_width, spec.rank
        self.mixed, self.projected, self.ranks = (
            allocate((max_tokens, width), torch.float32) for width in widths
        )


class MambaOps:
    """Records Mambas in a kernel program.

    Args:
        program: the program to record in.
        products: records matrix products there.
        states: where the kernels find the requests and their states.
        buffers: the buffers of each Mamba 1.
    """

    def __init__(
        self,
        program: KernelProgram,
        products: Products,
        states: States,
        buffers: dict[MambaSpec, MambaBuffers],
    ) -> None:
        self._program = program
        self._products = products
        self._states = states
        self._buffers = buffers

    def run_2(self, x: Tensor, mixer: Mamba2, out: Tensor) -> None:
        """Record the operation `models.ops.Ops.mamba2`, with the result in ``out``."""
        spec, stride = mixer.spec, 4 * x.shape[1]
        source = [x.data_ptr() + 4 * spec.width, stride]
        steps = source[0] + 4 * spec.convolved_width
        self._convolve(mixer, source, spec.convolved_width)
        limits = map(word_of_float, spec.limits)
        self._record(
            "prepare_mamba2", mamba2.PREPARE, *source, spec.convolved_width, steps, spec.heads,
            mixer.biases.data_ptr(), *limits,
        )  # fmt: skip
        target = [out.data_ptr(), 4 * out.shape[1]]
        operands = [
            *self._states.operands(mixer.layer), *source,
            spec.heads, spec.head_dim, spec.groups, spec.state_size, steps,
            mixer.logs.data_ptr(), mixer.skips.data_ptr(), *target, spec.convolution_bytes,
        ]  # fmt: skip
        self._program.record(mamba2.scan(spec.head_dim), operands, label="scan_mamba2")
        gate = [x.data_ptr(), stride]
        if mixer.norm is None:
            self._record("gate", mamba.GATE, out.data_ptr(), spec.width, *gate)
            return
        weight, eps = mixer.norm.weight, word_of_float(mixer.norm.spec.eps)
        kernel = mamba2.GATED_NORM[kind_of(weight), spec.norm == "behind gates"]
        sizes = spec.groups, spec.width // spec.groups
        self._record("gated_norm", kernel, *target, *gate, *sizes, weight.data_ptr(), eps)

    def run_lightning(self, x: Tensor, mixer: Lightning, out: Tensor) -> None:
        """Record the same of a lightning attention."""
        spec, source = mixer.spec, [x.data_ptr(), 4 * x.shape[1]]
        zeros = mixer.zeros.data_ptr()
        self._record("silu", mamba2.PREPARE, *source, 3 * spec.width, zeros, 0, zeros, 0, 0)
        target = [out.data_ptr(), 4 * out.shape[1]]
        operands = [
            *self._states.operands(mixer.layer), *source, spec.heads, spec.head_dim, spec.heads,
            spec.head_dim, mixer.ones.data_ptr(), mixer.logs.data_ptr(), zeros, *target, 0,
        ]  # fmt: skip
        kernel = mamba2.scan(spec.head_dim, has_own_steps=False)
        self._program.record(kernel, operands, label="scan_lightning")
        weight, eps = mixer.norm.weight, word_of_float(mixer.norm.spec.eps)
        gate = [source[0] + 12 * spec.width, source[1]]
        kernel = GATED_NORM[kind_of(weight), "sigmoid"]
        self._record("gated_norm", kernel, *target, *gate, 1, spec.width, weight.data_ptr(), eps)

    def run_1(self, x: Tensor, mixer: Mamba, out: Tensor) -> None:
        """Record the operation `models.ops.Ops.mamba`, with the result in ``out``, which has the
        time steps before."""
        spec, buffers = mixer.spec, self._buffers[mixer.spec]
        mixed, projected, stride = buffers.mixed, buffers.projected, 4 * x.shape[1]
        source = [x.data_ptr(), stride]
        self._convolve(mixer, source, spec.width)
        self._record("silu", mamba.ACTIVATE, *source, mixed.data_ptr(), spec.width)
        self._products.record(self._states.num_tokens, mixed, mixer.x_proj, projected)
        self._divide(mixer, buffers)
        self._products.record(self._states.num_tokens, buffers.ranks, mixer.dt_proj, out)
        self._record("softplus", mamba.TIME, out.data_ptr(), spec.width)
        keys = projected.data_ptr() + 4 * spec.rank
        operands = [
            *self._states.operands(mixer.layer), mixed.data_ptr(), spec.width, spec.state_size,
            keys, keys + 4 * spec.state_size, 4 * spec.projected_width, mixer.logs.data_ptr(),
            mixer.skips.data_ptr(), out.data_ptr(), spec.convolution_bytes,
        ]  # fmt: skip
        self._program.record(mamba.SCAN, operands, label="scan_mamba")
        gate = x.data_ptr() + 4 * spec.width
        self._record("gate", mamba.GATE, out.data_ptr(), spec.width, gate, stride)

    def _convolve(self, mixer: Mamba | Mamba2, source: list[int], width: int) -> None:
        weights, bias = mixer.convolution, mixer.convolution_bias
        kernel = CONVOLVE[kind_of(weights), mixer.spec.taps]
        numbers = [width, weights.data_ptr(), 0 if bias is None else bias.data_ptr()]
        operands = [*self._states.operands(mixer.layer), *source, *numbers]
        self._program.record(kernel, operands, label="convolve")

    def _divide(self, mixer: Mamba, buffers: MambaBuffers) -> None:
        spec = mixer.spec
        weights = [norm.weight.data_ptr() for norm in mixer.norms] or [0, 0, 0]
        kernel = mamba.DIVIDE[kind_of(mixer.convolution)]
        self._record(
            "divide", kernel, buffers.projected.data_ptr(), spec.rank, spec.state_size,
            buffers.ranks.data_ptr(), *weights, word_of_float(spec.norm_eps),
            int(spec.norms is not None),
        )  # fmt: skip

    def _record(self, label: str, kernel: Kernel, *operands: int) -> None:
        self._program.record(kernel, [self._states.num_tokens, *operands], label=label)
