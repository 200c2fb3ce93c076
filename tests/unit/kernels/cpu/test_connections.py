"""CPU kernels of hyper-connections: compared with the reference, and independent of the batch."""

from __future__ import annotations

import pytest
import torch
from support.cpu_kernels import run_kernel
from torch import Tensor

from shmllm_kernels.cpu import word_of_float
from shmllm_kernels.cpu.connections import FOLD, SPREAD
from shmllm_kernels.reference import connections

SHAPES = [(3, 4, 40), (2, 1, 24), (5, 8, 33), (2, 2, 2049), (0, 2, 16)]
NUMBERS = 1e-3, 1.5, 1e-2  # eps of the norm, magnitude, eps of gates


def fold(
    streams: Tensor, logits: Tensor, scale: Tensor, bias: Tensor, iterations: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns the gates, beside columns that no kernel writes, and the sum of streams."""
    rows, count, width = streams.shape
    gates = torch.full((rows, max(2 * count, len(bias))), torch.nan)
    gates[:, : len(bias)] = logits
    out = torch.full((rows, width), torch.nan)
    places = [streams, count, width, gates, 4 * gates.stride(0), len(bias), scale, bias, out]
    run_kernel(FOLD, rows, *places, *map(word_of_float, NUMBERS), iterations)
    return gates, out


@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_streams_are_folded_and_spread(shape: tuple[int, int, int], kinds: int) -> None:
    rows, count, width = shape
    streams, x, scale = torch.randn(shape), torch.randn(rows, width), torch.randn(kinds)
    bias, weight = torch.randn(kinds * count), torch.randn(kinds * count, count * width)
    want = connections.gates_of(streams, weight, scale, bias, *NUMBERS)
    gates, out = fold(streams, streams.flatten(1) @ weight.T, scale, bias)
    torch.testing.assert_close(gates[:, : len(bias)], want)
    assert gates[:, len(bias) :].isnan().all()
    torch.testing.assert_close(out, connections.fold(streams, want))
    if kinds == 2:
        want = connections.spread(streams, x, gates)
        run_kernel(SPREAD, rows, streams, count, width, gates, 4 * gates.stride(0), x, 0)
        torch.testing.assert_close(streams, want)


@pytest.mark.parametrize("iterations", [1, 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_streams_are_mixed(shape: tuple[int, int, int], iterations: int) -> None:
    rows, count, width = shape
    streams, x, scale = torch.randn(shape), torch.randn(rows, width), torch.randn(3)
    num_gates = count * (2 + count)
    bias, weight = torch.randn(num_gates), torch.randn(num_gates, count * width)
    norm_eps, magnitude, eps = NUMBERS
    (own, of_mixture), (first, last) = (
        each.split([2 * count, count**2]) for each in (weight, bias)
    )
    want = connections.gates_of(streams, own, scale[:2], first, norm_eps, magnitude, eps, 0.0)
    mixture = connections.mixture_of(
        streams, of_mixture, scale[2:], last, norm_eps, eps, iterations
    )
    gates, out = fold(streams, streams.flatten(1) @ weight.T, scale, bias, iterations)
    torch.testing.assert_close(
        gates, torch.cat([want, mixture.flatten(1)], 1), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(out, connections.fold(streams, want), rtol=1e-4, atol=1e-5)
    changed = connections.spread(streams, x, want, mixture)
    run_kernel(SPREAD, rows, streams, count, width, gates, 4 * gates.stride(0), x, 1)
    torch.testing.assert_close(streams, changed, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_gates", "iterations"), [(8, 0), (24, 3)])
def test_a_row_does_not_depend_on_the_others(num_gates: int, iterations: int) -> None:
    streams, logits = torch.randn(9, 4, 700), torch.randn(9, num_gates)
    scale, bias = torch.randn(3), torch.randn(num_gates)
    every = fold(streams, logits, scale, bias, iterations)
    alone = fold(streams[5:6], logits[5:6], scale, bias, iterations)
    for some, one in zip(every, alone, strict=True):
        assert torch.equal(some[5:6], one)
