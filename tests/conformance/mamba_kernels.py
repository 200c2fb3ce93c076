"""The tests of the kernels of Mamba 1 and 2 and of the convolution before them, which delta nets
have too: they equal `reference`, whatever the steps."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from conformance.recurrent_steps import LENGTH, STEPS, Run, put, rows_of, tolerances
from support.kernel_helpers import assert_close

from shmllm_kernels.gpu import mamba, mamba2
from shmllm_kernels.gpu.convolution import convolve
from shmllm_kernels.reference import convolution
from shmllm_kernels.reference import mamba as plain

HEADS = [(1, 16, 1, 16, (0.0, math.inf)), (4, 40, 2, 20, (0.25, 0.75))]
"""Heads, head_dim, groups, state_size and the limits of time steps."""


class MambaConformance:
    @pytest.mark.parametrize("steps", STEPS)
    @pytest.mark.parametrize(("taps", "has_bias"), [(2, False), (3, True), (4, False), (4, True)])
    def test_convolution(self, draw, dtype, taps, has_bias, steps):
        channels = 150
        x = draw.normal(2, LENGTH, channels, dtype=dtype)
        weights = draw.normal(taps, channels, dtype=dtype)
        bias = draw.normal(channels, dtype=dtype) if has_bias else None
        run, out = Run((taps - 1) * channels + 3, draw.device), torch.empty_like(x)
        for step in steps:
            wide = torch.cat([rows_of(x, step)] * 2, 1)
            rows, rest = wide[:, :channels], wide[:, channels:].clone()
            convolve(rows, weights, bias, run.states, run.requests(step))
            put(out, rows, step)
            assert torch.equal(wide[:, channels:], rest)
        zeros = torch.zeros(taps - 1, channels, device=draw.device)
        for request in range(2):
            want, state = convolution.convolve(x[request], weights, bias, zeros)
            assert_close(out[request], want, *tolerances(dtype))
            found = run.state(request, LENGTH)[: state.numel()].view_as(state)
            assert torch.equal(found, state)
            _, middle = convolution.convolve(x[request, :8], weights, bias, zeros)
            assert torch.equal(run.state(request, 8)[: state.numel()].view_as(state), middle)

    @pytest.mark.parametrize("steps", STEPS)
    @pytest.mark.parametrize("sizes", HEADS)
    def test_scan(self, draw, dtype, sizes, steps):
        heads, head_dim, groups, state_size, limits = sizes
        inner, keys = heads * head_dim, groups * state_size
        x = draw.normal(2, LENGTH, inner + 2 * keys, dtype=dtype)
        times = draw.normal(2, LENGTH, heads, dtype=dtype)
        logs, biases, skips = (draw.normal(heads) for _ in range(3))
        run, out = Run(inner * state_size + 5, draw.device), torch.empty_like(x[..., :inner])
        for step in steps:
            rows = torch.full_like(rows_of(out, step), float("nan"))
            mamba2.scan(
                rows, rows_of(x, step), rows_of(times, step), logs, biases, skips, run.states,
                run.requests(step), (heads, head_dim, groups, state_size), limits,
            )  # fmt: skip
            put(out, rows, step)
        zeros = torch.zeros(heads, state_size, head_dim, device=draw.device)

        def wanted(request, end):
            parts = x[request, :end].split([inner, keys, keys], -1)
            return plain.scan(
                parts[0].unflatten(1, (heads, -1)), parts[1].unflatten(1, (groups, -1)),
                parts[2].unflatten(1, (groups, -1)),
                plain.time_steps(times[request, :end], biases, limits), logs, skips, zeros,
            )  # fmt: skip

        for request in range(2):
            want, state = wanted(request, LENGTH)
            assert_close(out[request], want.flatten(1), *tolerances(dtype))
            for end, expected in ((LENGTH, state), (4, wanted(request, 4)[1])):
                found = run.state(request, end)[: state.numel()].view_as(state)
                assert_close(found, expected, 2e-5, 1e-4)

    @pytest.mark.parametrize("steps", STEPS)
    @pytest.mark.parametrize(("channels", "state_size"), [(32, 16), (50, 5)])
    def test_selective_scan(self, draw, dtype, channels, state_size, steps):
        x, times, gate = (draw.normal(2, LENGTH, channels, dtype=dtype) for _ in range(3))
        keys = draw.normal(2, LENGTH, 2 * state_size, dtype=dtype)
        logs, skips = draw.normal(state_size, channels), draw.normal(channels)
        run, out = Run(channels * state_size + 5, draw.device), torch.empty_like(x)
        for step in steps:
            rows = rows_of(times, step)
            parts = [rows_of(each, step) for each in (x, keys, gate)]
            mamba.selective_scan(rows, *parts, logs, skips, run.states, run.requests(step))
            put(out, rows, step)
        zeros = torch.zeros(state_size, channels, device=draw.device)

        def wanted(request, end):
            own = keys[request, :end].split(state_size, -1)
            steps = plain.time_steps(times[request, :end], torch.zeros_like(skips))
            return plain.selective_scan(x[request, :end], *own, steps, logs, skips, zeros)

        for request in range(2):
            want, state = wanted(request, LENGTH)
            gated = want.float() * F.silu(gate[request].float())
            assert_close(out[request], gated.to(dtype), *tolerances(dtype))
            for end, expected in ((LENGTH, state), (4, wanted(request, 4)[1])):
                found = run.state(request, end)[: state.numel()].view_as(state)
                assert_close(found, expected, 2e-5, 1e-4)

    @pytest.mark.parametrize(
        ("has_norm", "gates_first"), [(True, True), (True, False), (False, True)]
    )
    @pytest.mark.parametrize(("rows", "groups", "width"), [(0, 2, 16), (1, 1, 5), (7, 3, 48)])
    def test_gated_norm(self, draw, dtype, rows, groups, width, has_norm, gates_first):
        x = draw.normal(rows, groups * width, dtype=dtype)
        weight = draw.normal(groups * width, dtype=dtype) if has_norm else None
        gate = draw.normal(rows, groups * width + 3, dtype=dtype)[:, 3:]
        want = plain.gated_norm(x, gate, weight, groups, 1e-5, gates_first)
        mamba2.gated_norm(x, gate, weight, groups, 1e-5, gates_first)
        assert_close(x, want, *tolerances(dtype))

    @pytest.mark.parametrize("has_weight", [False, True])
    @pytest.mark.parametrize(("rows", "sizes"), [(0, (16, 1, 2)), (7, (20, 5, 6))])
    def test_norms(self, draw, dtype, rows, sizes, has_weight):
        width = sum(sizes)
        wide = draw.normal(rows, width + 9, dtype=dtype)
        x, rest = wide[:, :width], wide[:, width:].clone()
        weights = [draw.normal(size, dtype=dtype) for size in sizes] if has_weight else None
        factors = [1.0] * 3 if weights is None else [weight.float() for weight in weights]
        parts = zip(x.float().split(sizes, 1), factors, strict=True)
        normed = [F.rms_norm(part, part.shape[1:], eps=1e-5) * factor for part, factor in parts]
        mamba.normalise(x, sizes, weights, 1e-5)
        assert_close(x, torch.cat(normed, 1).to(dtype), *tolerances(dtype))
        assert torch.equal(wide[:, width:], rest)
