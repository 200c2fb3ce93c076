"""Mamba 1 and 2 on a GPU."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.mamba2_mixer import Mamba2
from shmllm.models.mamba_mixer import Mamba
from shmllm_kernels.gpu import mamba, mamba2
from shmllm_kernels.gpu.convolution import convolve
from shmllm_kernels.gpu.states import Requests


def run_mamba2(out: Tensor, x: Tensor, mixer: Mamba2, states: Tensor, requests: Requests) -> None:
    """Launch the convolution and the scan of `models.ops.Ops.mamba2`.

    Args:
        out: [tokens, width], the result, before the norm.
        x: [tokens, in_width]; overwritten.
        mixer: the layer.
        states: [blocks, elements] float32, those of the layer.
        requests: the requests of the step.
    """
    spec = mixer.spec
    _, mixed, steps = x.split_with_sizes([spec.width, spec.convolved_width, spec.heads], dim=1)
    convolve(mixed, mixer.convolution, mixer.convolution_bias, states, requests)
    sizes = spec.heads, spec.head_dim, spec.groups, spec.state_size
    own = states[:, spec.convolution_bytes // states.itemsize :]
    of_heads = mixer.logs, mixer.biases, mixer.skips
    mamba2.scan(out, mixed, steps, *of_heads, own, requests, sizes, spec.limits)


def norm_mamba2(out: Tensor, x: Tensor, mixer: Mamba2) -> None:
    """Launch the gated norm of `out` behind `run_mamba2`."""
    spec, norm = mixer.spec, mixer.norm
    mamba2.gated_norm(out, x[:, : spec.width], norm.weight, spec.groups, norm.spec.eps)


def convolve_mamba(x: Tensor, mixer: Mamba, states: Tensor, requests: Requests) -> None:
    """Launch the convolution of `models.ops.Ops.mamba`; arguments as for `run_mamba2`."""
    mixed = x[:, : mixer.spec.width]
    convolve(mixed, mixer.convolution, mixer.convolution_bias, states, requests)


def norm_projected(projected: Tensor, mixer: Mamba) -> None:
    """Launch the norms of time steps' rank, B and C, [tokens, projected_width], if there are
    any."""
    spec = mixer.spec
    if spec.norms is None:
        return
    parts = projected.split_with_sizes([spec.rank, spec.state_size, spec.state_size], dim=1)
    norms = mixer.norms or (None, None, None)
    for part, norm in zip(parts, norms, strict=True):
        mamba.normalise(part, None if norm is None else norm.weight, spec.norm_eps)


def scan_mamba(
    out: Tensor, x: Tensor, projected: Tensor, mixer: Mamba, states: Tensor, requests: Requests
) -> None:
    """Launch the scan of `models.ops.Ops.mamba`.

    Args:
        out: [tokens, width], the time steps, which the result replaces.
        x: [tokens, 2 * width], inputs behind the convolution and gates.
        projected: [tokens, projected_width].
        mixer, states, requests: see `run_mamba2`.
    """
    spec = mixer.spec
    mixed, gate = x.split_with_sizes([spec.width, spec.width], dim=1)
    own = states[:, spec.convolution_bytes // states.itemsize :]
    keys = projected[:, spec.rank :]
    mamba.selective_scan(out, mixed, keys, gate, mixer.logs, mixer.skips, own, requests)
