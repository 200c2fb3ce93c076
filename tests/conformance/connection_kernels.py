"""The kernels of hyper-connections equal `reference`."""

from __future__ import annotations

import pytest
import torch
from conformance.row_kernels import tolerances
from support.kernel_helpers import assert_close, poisoned

from shmllm_kernels.gpu import connections
from shmllm_kernels.gpu.connections import PART, GateNumbers
from shmllm_kernels.reference import connections as plain

NUMBERS = GateNumbers(1e-3, 1.5, 1e-2, 2e-2)
SHAPES = [(3, 4, 48), (2, 3, PART // 2 + 6), (1, 1, 16), (5, 8, 20), (0, 2, 16)]


class ConnectionConformance:
    @pytest.mark.parametrize("kinds", [1, 2])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_streams_are_folded_and_spread(self, draw, dtype, shape, kinds):
        (rows, count, width), num_gates = shape, kinds * shape[1]
        joined = count * width
        streams, x = draw.normal(rows, joined, dtype=dtype), draw.normal(rows, width, dtype=dtype)
        weight = draw.normal(num_gates, joined, scale=joined**-0.5)
        scale, bias = draw.normal(kinds), draw.normal(num_gates)
        wide = streams.float().unflatten(1, (count, width))
        want = plain.gates_of(wide, weight, scale, bias, *NUMBERS)
        out, gates = (
            poisoned(rows, columns, dtype=kind, device=draw.device)
            for columns, kind in ((width, dtype), (2 * count, torch.float32))
        )
        sizes = rows, connections.num_parts(joined), 2 * count + 1
        parts = poisoned(*sizes, dtype=torch.float32, device=draw.device)
        connections.fold(out, gates, streams, parts, weight, scale, bias, NUMBERS)
        assert_close(gates[:, :num_gates], want, 1e-5, 1e-5)
        assert gates[:, num_gates:].isnan().all(), "a gate of another kind was written"
        assert_close(out, plain.fold(wide, want).to(dtype), *tolerances(dtype))
        if kinds == 2:
            want = plain.spread(wide, x.float(), gates).flatten(1)
            connections.spread(streams, x, gates)
            assert_close(streams, want.to(dtype), *tolerances(dtype))

    @pytest.mark.parametrize("iterations", [1, 7])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_streams_are_mixed(self, draw, dtype, shape, iterations):
        (rows, count, width), num_gates = shape, (2 + shape[1]) * shape[1]
        joined = count * width
        streams, x = draw.normal(rows, joined, dtype=dtype), draw.normal(rows, width, dtype=dtype)
        weight = draw.normal(num_gates, joined, scale=joined**-0.5)
        scale, bias = draw.normal(3), draw.normal(num_gates)
        wide, (own, behind) = (
            streams.float().unflatten(1, (count, width)),
            weight.split([2 * count, count**2]),
        )
        want = plain.gates_of(wide, own, scale[:2], bias[: 2 * count], *NUMBERS)
        numbers = NUMBERS.norm_eps, NUMBERS.eps, iterations
        mixture = plain.mixture_of(wide, behind, scale[2:], bias[2 * count :], *numbers)
        out, gates, parts = (
            poisoned(rows, *sizes, dtype=kind, device=draw.device)
            for *sizes, kind in (
                (width, dtype),
                (num_gates, torch.float32),
                (connections.num_parts(joined), num_gates + 1, torch.float32),
            )
        )
        operands = out, gates, streams, parts, weight, scale, bias, NUMBERS
        connections.fold(*operands, iterations)
        assert_close(gates, torch.cat([want, mixture.flatten(1)], 1), 1e-5, 1e-5)
        assert_close(out, plain.fold(wide, want).to(dtype), *tolerances(dtype))
        want = plain.spread(wide, x.float(), gates, mixture).flatten(1)
        connections.spread(streams, x, gates)
        assert_close(streams, want.to(dtype), *tolerances(dtype))

    def test_a_rows_bits_do_not_depend_on_the_others(self, draw, dtype):
        streams, weight = draw.normal(5, 4 * 40, dtype=dtype), draw.normal(8, 4 * 40)
        scale, bias = draw.normal(2), draw.normal(8)

        def folded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out = poisoned(len(rows), 40, dtype=dtype, device=draw.device)
            gates, parts = (
                poisoned(len(rows), size, dtype=torch.float32, device=draw.device)
                for size in (8, 9)
            )
            connections.fold(out, gates, rows, parts, weight, scale, bias, NUMBERS)
            return out, gates

        for every, alone in zip(folded(streams), folded(streams[3:4]), strict=True):
            assert torch.equal(every[3:4], alone)
