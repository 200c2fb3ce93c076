"""The tests of the kernels of recurrent layers of few tokens: outputs and states are those of the
launches that they replace."""

from __future__ import annotations

import math

import pytest
import torch
from conformance.recurrent_steps import LENGTH, STEPS, Run, rows_of, tolerances
from support.kernel_helpers import assert_close

from shmllm_kernels.gpu import delta_net, few_delta_net, few_mamba2, mamba2
from shmllm_kernels.gpu.configs import has_dependent_launches
from shmllm_kernels.gpu.convolution import convolve

DELTA_NETS = [(1, 1, 16, 16), (2, 4, 16, 40), (1, 3, 20, 8)]
"""Key heads, value heads, and the widths of both."""
MAMBAS = [(1, 16, 1, 16, (0.0, math.inf)), (4, 40, 2, 20, (0.25, 0.75)), (6, 70, 1, 8, (0.0, 9.0))]
"""Heads, head_dim, groups, state_size and the limits of time steps."""


def assert_same_states(runs, width):
    """Compare the states behind each block of each request."""
    for request in range(2):
        for length in (4, 8, LENGTH):
            states = [run.state(request, length)[:width] for run in runs]
            assert_close(*states, 2e-5, 1e-4)
    for run in runs:
        assert run.states[:, width:].isnan().all(), "a launch wrote beside the states"


def replay(runs, step):
    """The requests of a step of both runs, which have the same blocks."""
    runs[1].table = runs[0].table
    return [run.requests(step) for run in runs]


class FewRecurrentConformance:
    @pytest.mark.parametrize("steps", STEPS)
    @pytest.mark.parametrize(("sizes", "taps"), [*zip(DELTA_NETS, (4, 4, 3), strict=True)])
    def test_delta_net(self, draw, dtype, sizes, taps, steps):
        key_heads, value_heads, key_dim, value_dim = sizes
        heads = key_heads, key_dim, value_heads, value_dim
        keys, values = key_heads * key_dim, value_heads * value_dim
        channels = 2 * keys + values
        x = draw.normal(2, LENGTH, channels + values + 2 * value_heads, dtype=dtype)
        weights, norm = (
            draw.normal(taps, channels, dtype=dtype),
            draw.normal(value_dim, dtype=dtype),
        )
        logs, biases = draw.normal(value_heads), draw.normal(value_heads, dtype=dtype)
        of_convolution = (taps - 1) * channels
        width = of_convolution + values * key_dim
        runs = [Run(width + 5, draw.device) for _ in range(2)]
        counters = torch.zeros(3 * key_heads, dtype=torch.int32, device=draw.device)
        for step in steps:
            known, few = replay(runs, step)
            rows = rows_of(x, step)
            outs = [torch.full_like(rows[:, :values], float("nan")) for _ in runs]
            few_delta_net.run_delta_net(
                outs[1], rows, weights, norm, logs, biases, runs[1].states, counters, few, heads,
                1e-5, has_dependent_launches(draw.device),
            )  # fmt: skip
            mixed, gates, rates = rows.split([channels, values, 2 * value_heads], 1)
            convolve(mixed, weights, None, runs[0].states, known)
            of_rule = runs[0].states[:, of_convolution:]
            delta_net.delta_rule(
                outs[0], mixed, rates, logs, biases, of_rule, known, heads
            )  # fmt: skip
            delta_net.gated_norm(outs[0], gates, norm, 1e-5)
            assert_close(outs[1], outs[0], *tolerances(dtype))
            assert not counters.any(), "a counter is not 0 behind the launch"
        assert_same_states(runs, width)

    @pytest.mark.parametrize("has_bias", [True, False])
    @pytest.mark.parametrize("steps", STEPS)
    @pytest.mark.parametrize(("sizes", "taps"), [*zip(MAMBAS, (2, 4, 4), strict=True)])
    def test_mamba2(self, draw, dtype, sizes, taps, steps, has_bias):
        heads, head_dim, groups, state_size, limits = sizes
        inner = heads * head_dim
        channels = inner + 2 * groups * state_size
        x = draw.normal(2, LENGTH, channels + heads, dtype=dtype)
        weights = draw.normal(taps, channels, dtype=dtype)
        bias = draw.normal(channels, dtype=dtype) if has_bias else None
        of_heads = [draw.normal(heads) for _ in range(3)]
        of_convolution = (taps - 1) * channels
        width = of_convolution + inner * state_size
        runs = [Run(width + 5, draw.device) for _ in range(2)]
        counters = torch.zeros(3 * groups, dtype=torch.int32, device=draw.device)
        for step in steps:
            known, few = replay(runs, step)
            rows = rows_of(x, step)
            outs = [torch.full_like(rows[:, :inner], float("nan")) for _ in runs]
            few_mamba2.run_mamba2(
                outs[1], rows, weights, bias, *of_heads, runs[1].states, counters, few, sizes[:4],
                limits, has_dependent_launches(draw.device),
            )  # fmt: skip
            mixed, times = rows.split([channels, heads], 1)
            convolve(mixed, weights, bias, runs[0].states, known)
            of_scan = runs[0].states[:, of_convolution:]
            mamba2.scan(outs[0], mixed, times, *of_heads, of_scan, known, sizes[:4], limits)
            assert_close(outs[1], outs[0], *tolerances(dtype))
            assert not counters.any(), "a counter is not 0 behind the launch"
        assert_same_states(runs, width)

    def test_a_step_without_requests(self, draw, dtype):
        x, states = draw.normal(0, 50, dtype=dtype), draw.normal(2, 999)
        run, counters = Run(9, draw.device), torch.zeros(0, dtype=torch.int32, device=draw.device)
        weights, before = draw.normal(4, 32, dtype=dtype), states.clone()
        few_delta_net.run_delta_net(
            x[:, :16], x, weights, weights[0], states[0], states[0], states, counters,
            run.requests([]), (1, 8, 1, 16), 1e-5,
        )  # fmt: skip
        few_mamba2.run_mamba2(
            x[:, :16], x[:, :33], weights, None, *states[:1].expand(3, -1), states, counters,
            run.requests([]), (1, 16, 1, 8), (0.0, 1.0),
        )  # fmt: skip
        assert torch.equal(states, before)
