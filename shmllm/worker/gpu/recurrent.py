"""Layers with a recurrent state on a GPU: gated delta nets, Mamba, Mamba 2, lightning attention,
gated short convolutions.

Launches that read requests are kept out of piecewise graphs, as those of attention are. In steps of
few tokens a launch convolves, changes the state and, if it can, does what follows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from shmllm.models.delta_net import DeltaNet
from shmllm.models.kimi_delta import KimiDelta
from shmllm.models.layers import Linear, Norm
from shmllm.models.lightning import Lightning
from shmllm.models.mamba2_mixer import Mamba2
from shmllm.models.mamba_mixer import Mamba
from shmllm.models.short_convolution import ShortConvolution
from shmllm.worker.gpu.attention import AttentionStep
from shmllm.worker.gpu.buffers import GpuBuffers
from shmllm.worker.gpu.cache import GpuKVCache
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm_kernels.gpu import (
    delta_net,
    few_delta_net,
    few_mamba2,
    few_mamba_inputs,
    few_mamba_scan,
    mamba,
    mamba2,
)
from shmllm_kernels.gpu.activation import activate
from shmllm_kernels.gpu.convolution import convolve
from shmllm_kernels.gpu.short_convolution import short_convolution
from shmllm_kernels.gpu.states import Requests


class RecurrentOps:
    """Launches the operations of `models.ops.Ops` on recurrent states.

    Args:
        cache: the KV cache, which has the states.
        inputs: the step's inputs.
        buffers: the buffers for the results.
    """

    def __init__(self, cache: GpuKVCache, inputs: GpuInputs, buffers: GpuBuffers) -> None:
        self._cache = cache
        self._inputs = inputs
        self._buffers = buffers

    def begin(self, step: AttentionStep) -> None:
        """See `AttentionOps.begin`."""
        self._step = step

    def delta_net(self, x: Tensor, net: DeltaNet) -> Tensor:
        """See `models.ops.Ops.delta_net`."""
        spec, norm = net.spec, net.norm
        out = self._buffers.mixed(spec.width)[: len(x)]
        self._step.launch(partial(self._run_delta_net, out, x, net))
        gate = x[:, spec.convolved_width : spec.convolved_width + spec.width]
        delta_net.gated_norm(out, gate, norm.weight, norm.spec.eps)
        return out

    def delta_net_of_few(self, x: Tensor, net: DeltaNet) -> Tensor:
        """Compute `delta_net` for few tokens."""
        spec = net.spec
        if not few_delta_net.takes(spec.key_dim, spec.value_dim):
            return self.delta_net(x, net)
        out = self._buffers.mixed(spec.width)[: len(x)]
        self._step.launch(partial(self._run_delta_net_of_few, out, x, net))
        return out

    def kimi_delta(self, x: Tensor, decays: Tensor, net: KimiDelta) -> Tensor:
        """See `models.ops.Ops.kimi_delta`."""
        spec = net.spec
        out = self._buffers.mixed(spec.width)[: len(x)]
        rates = x[:, spec.convolved_width :]
        own = out, x, rates, decays, net, spec.sizes
        self._step.launch(partial(self._run_delta_rule, *own, least=spec.least_log))
        return out

    def gate_heads(self, x: Tensor, gates: Tensor, net: KimiDelta) -> Tensor:
        """See `models.ops.Ops.gate_heads`."""
        norm = net.norm
        delta_net.gated_norm(x, gates, norm.weight, norm.spec.eps, is_sigmoid=True)
        return x

    def mamba2(self, x: Tensor, mixer: Mamba2 | Lightning) -> Tensor:
        """See `models.ops.Ops.mamba2`."""
        if isinstance(mixer, Lightning):
            return self._lightning(x, mixer)
        return self._mamba2(x, mixer, self._run_mamba2)

    def mamba2_of_few(self, x: Tensor, mixer: Mamba2 | Lightning) -> Tensor:
        """Compute `mamba2` for few tokens."""
        if isinstance(mixer, Lightning):
            return self._lightning(x, mixer)
        return self._mamba2(x, mixer, self._run_mamba2_of_few)

    def mamba(
        self, x: Tensor, mixer: Mamba, linear: Callable[[Tensor, Tensor, Linear], None]
    ) -> Tensor:
        """See `models.ops.Ops.mamba`.

        Args:
            x, mixer: see there.
            linear: (out, x, linear) -> None, computes a product.
        """
        spec = mixer.spec
        out = self._buffers.mixed(spec.width)[: len(x)]
        projected = self._buffers.mambas[spec][: len(x)]
        self._step.launch(partial(self._convolve, x, mixer))
        linear(projected, x[:, : spec.width], mixer.x_proj)
        self._normalise(projected, mixer)
        linear(out, projected[:, : spec.rank], mixer.dt_proj)
        self._step.launch(partial(self._scan, out, x, projected, mixer))
        return out

    def mamba_of_few(
        self, x: Tensor, mixer: Mamba, linear: Callable[[Tensor, Tensor, Linear], None]
    ) -> Tensor:
        """Compute `mamba` for few tokens. No adapter changes its projections."""
        spec = mixer.spec
        has_room = few_mamba_scan.takes(spec.rank, spec.state_size)
        if not has_room or _are_packed(mixer.x_proj, mixer.dt_proj):
            return self.mamba(x, mixer, linear)
        out = self._buffers.mixed(spec.width)[: len(x)]
        self._step.launch(partial(self._run_mamba_of_few, out, x, mixer))
        return out

    def short_convolution(
        self, x: Tensor, mixer: ShortConvolution, is_of_few: bool = False
    ) -> Tensor:
        """See `models.ops.Ops.short_convolution`.

        Args:
            x, mixer: see there.
            is_of_few: whether the step has few tokens, so that launches may be dependent.
        """
        out = self._buffers.mixed(mixer.spec.width)[: len(x)]
        is_dependent = is_of_few and self._step.is_dependent
        self._step.launch(partial(self._run_short_convolution, out, x, mixer, is_dependent))
        return out

    @property
    def _requests(self) -> Requests:
        """What kernels read of the step's requests."""
        cache, step, num_reqs = self._cache, self._inputs.step, self._step.descriptor.num_reqs
        return Requests(
            step.query_starts[: num_reqs + 1],
            step.context_lens[:num_reqs],
            self._inputs.block_tables[cache.state_group, :num_reqs],
            cache.interval,
        )

    def _run_delta_net(self, out: Tensor, x: Tensor, net: DeltaNet) -> None:
        spec = net.spec
        gates = x[:, spec.convolved_width + spec.width :]
        rates, decays = gates.split_with_sizes([spec.value_heads] * 2, dim=1)
        heads = spec.key_heads, spec.key_dim, spec.value_heads, spec.value_dim
        self._run_delta_rule(out, x, rates, decays, net, heads, spec.tiled, spec.most_rate)

    def _run_delta_rule(
        self,
        out: Tensor,
        x: Tensor,
        rates: Tensor,
        decays: Tensor,
        net: DeltaNet | KimiDelta,
        heads: tuple[int, int, int, int],
        is_tiled: bool = False,
        most: float = 1.0,
        least: float | None = None,
    ) -> None:
        spec, requests, states = net.spec, self._requests, self._cache.states[net.layer]
        mixed = x[:, : spec.convolved_width]
        convolve(mixed, net.convolution, None, states, requests)
        state = states[:, spec.convolution_bytes // states.itemsize :]
        gates = rates, decays, net.logs, net.biases
        delta_net.delta_rule(out, mixed, *gates, state, requests, heads, is_tiled, most, least)

    def _run_delta_net_of_few(self, out: Tensor, x: Tensor, net: DeltaNet) -> None:
        spec, norm = net.spec, net.norm
        few_delta_net.run_delta_net(
            out, x, net.convolution, norm.weight, net.logs, net.biases,
            self._cache.states[net.layer], self._buffers.counters, self._requests,
            (spec.key_heads, spec.key_dim, spec.value_heads, spec.value_dim), norm.spec.eps,
            self._step.is_dependent, spec.tiled, spec.most_rate,
        )  # fmt: skip

    def _mamba2(
        self, x: Tensor, mixer: Mamba2, run: Callable[[Tensor, Tensor, Mamba2], None]
    ) -> Tensor:
        spec, norm = mixer.spec, mixer.norm
        out = self._buffers.mixed(spec.width)[: len(x)]
        self._step.launch(partial(run, out, x, mixer))
        gate, gates_first = x[:, : spec.width], spec.norm != "before gates"
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.spec.eps)
        mamba2.gated_norm(out, gate, weight, spec.groups, eps, gates_first)
        return out

    def _lightning(self, x: Tensor, mixer: Lightning) -> Tensor:
        width, norm = mixer.spec.width, mixer.norm
        out = self._buffers.mixed(width)[: len(x)]
        activate(x[:, : 3 * width], x[:, : 3 * width], "silu", False)
        self._step.launch(partial(self._run_lightning, out, x, mixer))
        gate = x[:, 3 * width :]
        delta_net.gated_norm(out, gate, norm.weight, norm.spec.eps, is_sigmoid=True)
        return out

    def _run_lightning(self, out: Tensor, x: Tensor, mixer: Lightning) -> None:
        spec, states, zeros = mixer.spec, self._cache.states[mixer.layer], mixer.zeros
        sizes = spec.heads, spec.head_dim, spec.heads, spec.head_dim
        of_heads = mixer.logs, zeros, zeros
        steps, limits = zeros.expand(len(x), -1), (1.0, 1.0)  # within which all are 1
        mamba2.scan(out, x, steps, *of_heads, states, self._requests, sizes, limits)

    def _run_mamba2(self, out: Tensor, x: Tensor, mixer: Mamba2) -> None:
        spec, requests, states = mixer.spec, self._requests, self._cache.states[mixer.layer]
        _, mixed, steps = x.split_with_sizes([spec.width, spec.convolved_width, spec.heads], dim=1)
        convolve(mixed, mixer.convolution, mixer.convolution_bias, states, requests)
        sizes = spec.heads, spec.head_dim, spec.groups, spec.state_size
        state = states[:, spec.convolution_bytes // states.itemsize :]
        of_heads = mixer.logs, mixer.biases, mixer.skips
        mamba2.scan(out, mixed, steps, *of_heads, state, requests, sizes, spec.limits)

    def _run_mamba2_of_few(self, out: Tensor, x: Tensor, mixer: Mamba2) -> None:
        spec = mixer.spec
        few_mamba2.run_mamba2(
            out, x[:, spec.width :], mixer.convolution, mixer.convolution_bias, mixer.logs,
            mixer.biases, mixer.skips, self._cache.states[mixer.layer], self._buffers.counters,
            self._requests, (spec.heads, spec.head_dim, spec.groups, spec.state_size), spec.limits,
            self._step.is_dependent,
        )  # fmt: skip

    def _run_mamba_of_few(self, out: Tensor, x: Tensor, mixer: Mamba) -> None:
        spec, x_proj, dt_proj = mixer.spec, mixer.x_proj.weight, mixer.dt_proj.weight
        assert isinstance(x_proj, Tensor), "it is not packed"
        assert isinstance(dt_proj, Tensor), "it is not packed"
        assert mixer.dt_proj.bias is not None, "time steps have one"
        states, requests = self._cache.states[mixer.layer], self._requests
        convolution = mixer.convolution, mixer.convolution_bias
        is_dependent = self._step.is_dependent
        projected = self._buffers.mambas[spec][: len(x)]
        few_mamba_inputs.project_inputs(
            projected, self._buffers.mamba_parts[spec][: len(x)], x, *convolution, x_proj, states,
            self._buffers.counters, requests, is_dependent,
        )  # fmt: skip
        few_mamba_scan.scan_inputs(
            out, x, projected, *convolution, dt_proj, mixer.dt_proj.bias, _weights_of(mixer.norms),
            None if spec.norms is None else spec.norm_eps, mixer.logs, mixer.skips, states,
            requests, is_dependent,
        )  # fmt: skip

    def _run_short_convolution(
        self, out: Tensor, x: Tensor, mixer: ShortConvolution, is_dependent: bool
    ) -> None:
        weights, states = (mixer.convolution, mixer.convolution_bias), self._cache.states
        step = self._step.descriptor
        most_tokens = 1 if step.uniform else step.max_verified or step.num_tokens
        short_convolution(
            out, x, *weights, states[mixer.layer], self._requests, most_tokens, is_dependent,
            mixer.spec.ahead,
        )  # fmt: skip

    def _convolve(self, x: Tensor, mixer: Mamba) -> None:
        states = self._cache.states[mixer.layer]
        mixed = x[:, : mixer.spec.width]
        convolve(mixed, mixer.convolution, mixer.convolution_bias, states, self._requests)

    def _normalise(self, projected: Tensor, mixer: Mamba) -> None:
        """Launch the norms of time steps' rank, B and C, if there are any."""
        spec = mixer.spec
        if spec.norms is None:
            return
        sizes = spec.rank, spec.state_size, spec.state_size
        mamba.normalise(projected, sizes, _weights_of(mixer.norms), spec.norm_eps)

    def _scan(self, out: Tensor, x: Tensor, projected: Tensor, mixer: Mamba) -> None:
        """Launch the scan. `out` has the time steps, which the result replaces."""
        spec, states = mixer.spec, self._cache.states[mixer.layer]
        mixed, gate = x.split_with_sizes([spec.width, spec.width], dim=1)
        state = states[:, spec.convolution_bytes // states.itemsize :]
        keys = projected[:, spec.rank :]
        of_channels = mixer.logs, mixer.skips
        mamba.selective_scan(out, mixed, keys, gate, *of_channels, state, self._requests)


def _are_packed(*linears: Linear) -> bool:
    return not all(isinstance(linear.weight, Tensor) for linear in linears)


def _weights_of(norms: tuple[Norm, ...]) -> list[Tensor] | None:
    """Return the weights of norms; None: they have none."""
    return [norm.weight for norm in norms] if norms else None
