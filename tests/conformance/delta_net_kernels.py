"""The tests of the kernels of gated delta nets: they equal `reference`, whatever the steps."""

from __future__ import annotations

import pytest
import torch
from support.kernel_helpers import assert_close

from shmllm_kernels.gpu import delta_net
from shmllm_kernels.reference import delta_net as plain

INTERVAL, LENGTH, NUM_BLOCKS = 4, 11, 40
STEPS = [
    [[(0, 0, 11)], [(1, 0, 11)]],
    [[(0, 0, 3), (1, 0, 8)], [(1, 8, 9), None, (0, 3, 11)], [(1, 9, 11)]],
    [[(0, 0, 4)], [(1, 0, 1), (0, 4, 5)], [(0, 5, 11), (1, 1, 11)]],
]
"""Steps of two requests of LENGTH tokens: (request, start, end), or None for a padded one."""
HEADS = [(1, 1, 16, 16), (2, 4, 16, 40), (1, 2, 20, 8)]
"""Key heads, value heads, and the widths of both."""


def tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """The absolute and the relative tolerance: sums of rounded numbers."""
    return {
        torch.float32: (2e-5, 1e-4),
        torch.float16: (2e-3, 4e-3),
        torch.bfloat16: (2e-2, 2e-2),
    }[dtype]


class Run:
    """Steps of requests whose states lie in blocks, and begin as NaN."""

    def __init__(self, width, device):
        self.states = torch.full((NUM_BLOCKS, width), float("nan"), device=device)
        blocks = torch.randperm(NUM_BLOCKS)[:8].view(2, 4)
        self.table = blocks.to(device=device, dtype=torch.int32)

    def requests(self, step):
        """What kernels read of a step. A padded request has any block."""
        parts = [part or (0, 0, 0) for part in step]
        counts = torch.tensor([0] + [end - start for _, start, end in parts])
        device = self.table.device
        return delta_net.Requests(
            counts.cumsum(0).to(device=device, dtype=torch.int32),
            torch.tensor([end for *_, end in parts], dtype=torch.int32, device=device),
            self.table[[request for request, *_ in parts]],
            INTERVAL,
        )

    def state(self, request, length):
        return self.states[self.table[request, (length - 1) // INTERVAL].item()]


def rows_of(x, step):
    return torch.cat([x[part[0], part[1] : part[2]] for part in step if part])


def put(out, rows, step):
    begin = 0
    for request, start, end in filter(None, step):
        out[request, start:end] = rows[begin : begin + end - start]
        begin += end - start


class DeltaNetConformance:
    @pytest.mark.parametrize("steps", STEPS)
    @pytest.mark.parametrize("taps", [2, 3, 4])
    def test_convolution(self, draw, dtype, taps, steps):
        channels = 150
        x = draw.normal(2, LENGTH, channels, dtype=dtype)
        weights = draw.normal(taps, channels, dtype=dtype)
        run, out = Run((taps - 1) * channels + 3, draw.device), torch.empty_like(x)
        for step in steps:
            wide = torch.cat([rows_of(x, step)] * 2, 1)
            rows, rest = wide[:, :channels], wide[:, channels:].clone()
            delta_net.convolve(rows, weights, run.states, run.requests(step))
            put(out, rows, step)
            assert torch.equal(wide[:, channels:], rest)
        zeros = torch.zeros(taps - 1, channels, device=draw.device)
        for request in range(2):
            want, state = plain.convolve(x[request], weights, zeros)
            assert_close(out[request], want, *tolerances(dtype))
            found = run.state(request, LENGTH)[: state.numel()].view_as(state)
            assert torch.equal(found, state)
            _, middle = plain.convolve(x[request, :8], weights, zeros)
            assert torch.equal(run.state(request, 8)[: state.numel()].view_as(state), middle)

    @pytest.mark.parametrize("steps", STEPS)
    @pytest.mark.parametrize("sizes", HEADS)
    def test_delta_rule(self, draw, dtype, sizes, steps):
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
                rows, rows_of(x, step), rows_of(gates, step), logs, biases, run.states,
                run.requests(step), (key_heads, key_dim, value_heads, value_dim),
            )  # fmt: skip
            put(out, rows, step)
        zeros = torch.zeros(value_heads, key_dim, value_dim, device=draw.device)

        def wanted(request, end):
            query, key, value = x[request, :end].split([keys, keys, values], -1)
            return plain.delta_rule(
                query.reshape(end, key_heads, key_dim), key.reshape(end, key_heads, key_dim),
                value.reshape(end, value_heads, value_dim),
                *gates[request, :end].split(value_heads, -1), logs, biases, zeros,
            )  # fmt: skip

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
                out, rows_of(x, row), rows_of(gates, row), logs, biases, run.states,
                run.requests(step), sizes,
            )  # fmt: skip
            return out

        compute([(0, 0, 4)])
        run.table[1, 0] = run.table[0, 0]
        before = run.state(0, 4).clone()
        both = compute([(0, 4, 8), (1, 4, 8)])
        assert torch.equal(both[:4], both[4:])
        assert torch.equal(run.state(0, 4), before)

    @pytest.mark.parametrize(("rows", "heads", "width"), [(0, 2, 16), (1, 1, 5), (7, 3, 48)])
    def test_gated_norm(self, draw, dtype, rows, heads, width):
        x, weight = draw.normal(rows, heads * width, dtype=dtype), draw.normal(width, dtype=dtype)
        gate = draw.normal(rows, heads * width + 3, dtype=dtype)[:, 3:]
        shape = rows, heads, width
        want = plain.gated_norm(x.view(shape), gate.reshape(shape), weight, 1e-5).flatten(1)
        delta_net.gated_norm(x, gate, weight, 1e-5)
        assert_close(x, want, *tolerances(dtype))
