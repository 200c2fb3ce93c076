"""The tests of the kernels of recurrent layers of few tokens: outputs and states equal
`reference`, whatever the steps."""

from __future__ import annotations

import math

import pytest
import torch
from conformance.recurrent_steps import LENGTH, STEPS, Run, put, rows_of, tolerances
from support.kernel_helpers import assert_close
from support.variants import each_once

from shmllm_kernels.gpu import few_delta_net, few_mamba2
from shmllm_kernels.gpu.configs import has_dependent_launches
from shmllm_kernels.reference import convolution
from shmllm_kernels.reference import delta_net as plain_delta_net
from shmllm_kernels.reference import mamba as plain_mamba

DELTA_NETS = [(1, 1, 16, 16), (2, 4, 16, 40), (1, 3, 20, 8)]
"""Key heads, value heads, and the widths of both."""
MAMBAS = [(1, 16, 1, 16, (0.0, math.inf)), (4, 40, 2, 20, (0.25, 0.75)), (6, 70, 1, 8, (0.0, 9.0))]
"""Heads, head_dim, groups, state_size and the limits of time steps."""


def check_run(run, out, wanted, dtype):
    """Compare outputs and states with those of the reference.

    Args:
        run: the steps' states.
        out: [2, LENGTH, width], the outputs.
        wanted: (request, number of tokens) -> outputs, state of the convolution, other state.
        dtype: of the outputs.
    """
    for request in range(2):
        want = wanted(request, LENGTH)[0]
        assert_close(out[request], want, *tolerances(dtype))
        for end in (4, 8, LENGTH):
            _, inputs, state = wanted(request, end)
            found = run.state(request, end)
            assert torch.equal(found[: inputs.numel()].view_as(inputs), inputs)
            rest = found[inputs.numel() :][: state.numel()].view_as(state)
            assert_close(rest, state, *tolerances(dtype))
            assert found[inputs.numel() + state.numel() :].isnan().all(), "it wrote beside"


class FewRecurrentConformance:
    @pytest.mark.parametrize("steps", STEPS)
    @pytest.mark.parametrize(
        ("sizes", "taps", "is_tiled", "most"),
        [
            *zip(DELTA_NETS, (4, 4, 3), (False,) * 3, (1.0, 1.0, 2.0), strict=True),
            (DELTA_NETS[1], 4, True, 1.0),
        ],
    )
    def test_delta_net(self, draw, dtype, sizes, taps, is_tiled, most, steps):
        key_heads, value_heads, key_dim, value_dim = sizes
        keys, values = key_heads * key_dim, value_heads * value_dim
        channels = 2 * keys + values
        x = draw.normal(2, LENGTH, channels + values + 2 * value_heads, dtype=dtype)
        weights, norm = (
            draw.normal(taps, channels, dtype=dtype),
            draw.normal(value_dim, dtype=dtype),
        )
        logs, biases = draw.normal(value_heads), draw.normal(value_heads, dtype=dtype)
        run = Run((taps - 1) * channels + values * key_dim + 5, draw.device)
        out = torch.full_like(x[..., :values], float("nan"))
        counters = torch.zeros(3 * key_heads, dtype=torch.int32, device=draw.device)
        for step in steps:
            rows = rows_of(x, step)
            own = torch.full_like(rows[:, :values], float("nan"))
            few_delta_net.run_delta_net(
                own, rows, weights, norm, logs, biases, run.states, counters, run.requests(step),
                (key_heads, key_dim, value_heads, value_dim), 1e-5,
                has_dependent_launches(draw.device), is_tiled, most,
            )  # fmt: skip
            put(out, own, step)
            assert not counters.any(), "a counter is not 0 behind the launch"

        def wanted(request, end):
            parts = x[request, :end].split([channels, values, value_heads, value_heads], -1)
            mixed, gates, rates, decays = parts
            zeros = torch.zeros(taps - 1, channels, device=draw.device)
            mixed, inputs = convolution.convolve(mixed, weights, None, zeros)
            query, key, value = mixed.split([keys, keys, values], -1)
            zeros = torch.zeros(value_heads, key_dim, value_dim, device=draw.device)
            ruled, state = plain_delta_net.delta_rule(
                query.reshape(end, key_heads, key_dim), key.reshape(end, key_heads, key_dim),
                value.reshape(end, value_heads, value_dim), rates, decays, logs, biases, zeros,
                is_tiled, most,
            )  # fmt: skip
            gates = gates.reshape(ruled.shape)
            return plain_delta_net.gated_norm(ruled, gates, norm, 1e-5).flatten(1), inputs, state

        check_run(run, out, wanted, dtype)

    @pytest.mark.parametrize(
        ("layer", "has_bias", "steps"),
        each_once([*zip(MAMBAS, (2, 4, 4), strict=True)], [True, False], STEPS),
    )
    def test_mamba2(self, draw, dtype, layer, has_bias, steps):
        sizes, taps = layer
        heads, head_dim, groups, state_size, limits = sizes
        inner, keys = heads * head_dim, groups * state_size
        channels = inner + 2 * keys
        x = draw.normal(2, LENGTH, channels + heads, dtype=dtype)
        weights = draw.normal(taps, channels, dtype=dtype)
        bias = draw.normal(channels, dtype=dtype) if has_bias else None
        logs, biases, skips = (draw.normal(heads) for _ in range(3))
        run = Run((taps - 1) * channels + inner * state_size + 5, draw.device)
        out = torch.full_like(x[..., :inner], float("nan"))
        counters = torch.zeros(3 * groups, dtype=torch.int32, device=draw.device)
        for step in steps:
            rows = rows_of(x, step)
            own = torch.full_like(rows[:, :inner], float("nan"))
            few_mamba2.run_mamba2(
                own, rows, weights, bias, logs, biases, skips, run.states, counters,
                run.requests(step), sizes[:4], limits, has_dependent_launches(draw.device),
            )  # fmt: skip
            put(out, own, step)
            assert not counters.any(), "a counter is not 0 behind the launch"

        def wanted(request, end):
            mixed, times = x[request, :end].split([channels, heads], -1)
            zeros = torch.zeros(taps - 1, channels, device=draw.device)
            mixed, inputs = convolution.convolve(mixed, weights, bias, zeros)
            given, key, query = mixed.split([inner, keys, keys], -1)
            scanned, state = plain_mamba.scan(
                given.unflatten(1, (heads, -1)), key.unflatten(1, (groups, -1)),
                query.unflatten(1, (groups, -1)), plain_mamba.time_steps(times, biases, limits),
                logs, skips, torch.zeros(heads, state_size, head_dim, device=draw.device),
            )  # fmt: skip
            return scanned.flatten(1), inputs, state

        check_run(run, out, wanted, dtype)

    def test_states_that_fit_into_registers(self):
        assert few_delta_net.takes(128, 128)
        assert not few_delta_net.takes(129, 128)

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
