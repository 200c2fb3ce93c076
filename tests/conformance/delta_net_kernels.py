"""The tests of the kernels of gated delta nets: they equal `reference`, whatever the steps."""

from __future__ import annotations

import pytest
import torch
from conformance.recurrent_steps import LENGTH, STEPS, Run, put, rows_of, tolerances
from support.kernel_helpers import assert_close

from shmllm_kernels.gpu import delta_net
from shmllm_kernels.reference import delta_net as plain

HEADS = [(1, 1, 16, 16), (2, 4, 16, 40), (1, 2, 20, 8)]
"""Key heads, value heads, and the widths of both."""


class DeltaNetConformance:
    @pytest.mark.parametrize("steps", STEPS)
    @pytest.mark.parametrize(
        ("sizes", "is_tiled", "most"),
        [*zip(HEADS, (False,) * 3, (1.0, 1.0, 2.0), strict=True), (HEADS[1], True, 1.0)],
    )
    def test_delta_rule(self, draw, dtype, sizes, is_tiled, most, steps):
        key_heads, value_heads, key_dim, value_dim = sizes
        keys, values = key_heads * key_dim, value_heads * value_dim
        x = draw.normal(2, LENGTH, 2 * keys + values, dtype=dtype)
        gates = draw.normal(2, LENGTH, 2 * value_heads, dtype=dtype)
        logs, biases = draw.normal(value_heads), draw.normal(value_heads, dtype=dtype)
        run = Run(value_heads * key_dim * value_dim + 5, draw.device)
        out = draw.normal(2, LENGTH, values, dtype=dtype)
        for step in steps:
            rows = torch.full_like(rows_of(out, step), float("nan"))
            delta_net.delta_rule(
                rows, rows_of(x, step), *rows_of(gates, step).split(value_heads, 1), logs, biases,
                run.states, run.requests(step), (key_heads, key_dim, value_heads, value_dim),
                is_tiled, most,
            )  # fmt: skip
            put(out, rows, step)
        zeros = torch.zeros(value_heads, key_dim, value_dim, device=draw.device)

        def wanted(request, end):
            query, key, value = x[request, :end].split([keys, keys, values], -1)
            return plain.delta_rule(
                query.reshape(end, key_heads, key_dim), key.reshape(end, key_heads, key_dim),
                value.reshape(end, value_heads, value_dim),
                *gates[request, :end].split(value_heads, -1), logs, biases, zeros, is_tiled, most,
            )  # fmt: skip

        for request in range(2):
            want, state = wanted(request, LENGTH)
            assert_close(out[request], want.flatten(1), *tolerances(dtype))
            for end, expected in ((LENGTH, state), (4, wanted(request, 4)[1])):
                found = run.state(request, end)[: state.numel()].view_as(state)
                assert_close(found, expected, 2e-5, 1e-4)

    @pytest.mark.parametrize("steps", STEPS)
    @pytest.mark.parametrize(("heads", "dim", "least"), [(1, 16, None), (3, 20, -5.0)])
    def test_delta_rule_with_a_decay_for_each_channel(self, draw, dtype, heads, dim, least, steps):
        width, shape = heads * dim, (heads, dim)
        x = draw.normal(2, LENGTH, 3 * width + heads, dtype=dtype)
        decays = draw.normal(2, LENGTH, width, dtype=dtype)
        logs, biases = draw.normal(heads), draw.normal(width)
        run, out = Run(width * dim + 5, draw.device), torch.empty_like(decays)
        for step in steps:
            rows = torch.full_like(rows_of(out, step), float("nan"))
            delta_net.delta_rule(
                rows, *rows_of(x, step).split([3 * width, heads], 1), rows_of(decays, step), logs,
                biases, run.states, run.requests(step), shape * 2, least=least,
            )  # fmt: skip
            put(out, rows, step)
        zeros = torch.zeros(heads, dim, dim, device=draw.device)

        def wanted(request, end):
            parts = x[request, :end].split([width, width, width, heads], -1)
            own = [each.unflatten(-1, shape) for each in (*parts[:3], decays[request, :end])]
            gates = parts[3], own[3], logs, biases.view(shape)
            return plain.delta_rule(*own[:3], *gates, zeros, least=least)

        for request in range(2):
            want, state = wanted(request, LENGTH)
            assert_close(out[request], want.flatten(1), *tolerances(dtype))
            for end, expected in ((LENGTH, state), (4, wanted(request, 4)[1])):
                found = run.state(request, end)[: state.numel()].view_as(state)
                assert_close(found, expected, 2e-5, 1e-4)

    def test_a_shared_state_is_only_read(self, draw, dtype):
        sizes = 1, 16, 1, 16
        x, gates = draw.normal(1, 8, 48, dtype=dtype), draw.normal(1, 8, 2, dtype=dtype)
        logs, biases = draw.normal(1), draw.normal(1, dtype=dtype)
        run = Run(256, draw.device)

        def compute(step):
            row = [(0, *part[1:]) for part in step]
            out = torch.empty(sum(part[2] - part[1] for part in step), 16, dtype=dtype)
            out = out.to(draw.device)
            delta_net.delta_rule(
                out, rows_of(x, row), *rows_of(gates, row).split(1, 1), logs, biases, run.states,
                run.requests(step), sizes,
            )  # fmt: skip
            return out

        compute([(0, 0, 4)])
        run.table[1, 0] = run.table[0, 0]
        before = run.state(0, 4).clone()
        both = compute([(0, 4, 8), (1, 4, 8)])
        assert torch.equal(both[:4], both[4:])
        assert torch.equal(run.state(0, 4), before)

    @pytest.mark.parametrize("is_sigmoid", [False, True])
    @pytest.mark.parametrize(("rows", "heads", "width"), [(0, 2, 16), (1, 1, 5), (7, 3, 48)])
    def test_gated_norm(self, draw, dtype, rows, heads, width, is_sigmoid):
        x, weight = draw.normal(rows, heads * width, dtype=dtype), draw.normal(width, dtype=dtype)
        gate = draw.normal(rows, heads * width + 3, dtype=dtype)[:, 3:]
        shape = rows, heads, width
        by_head = x.view(shape), gate.reshape(shape)
        want = plain.gated_norm(*by_head, weight, 1e-5, is_sigmoid).flatten(1)
        delta_net.gated_norm(x, gate, weight, 1e-5, is_sigmoid)
        assert_close(x, want, *tolerances(dtype))
