"""Elementary functions of compiled code: compared with float64, at all magnitudes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.cpu_kernels import run_kernel

from shmllm_kernels.cpu import Kernel, functions
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import floats, word


@compiled
def _one_piece(operands, piece, thread, num_threads):
    return 1


@compiled
def _silu(x):
    return functions.silu(x, np.float32(1.0))


def kernel_of(function: object) -> Kernel:
    @compiled
    def apply(operands, piece, thread, num_threads, name):
        source, out = floats(word(operands, 1)), floats(word(operands, 2))
        for i in range(word(word(operands, 0), 0)):
            out[i] = function(source[i])

    return Kernel(_one_piece, apply, getattr(function, "__name__", ""))


def applied(function: object, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    run_kernel(kernel_of(function), len(x), x, out, num_threads=1)
    return out


def numbers(limit: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    evenly = torch.linspace(-limit, limit, 20_001)
    tiny = torch.randn(1000, generator=generator) * 10.0 ** -torch.arange(1, 31).repeat(34)[:1000]
    return torch.cat([evenly, tiny, torch.zeros(1)])


CASES: list[tuple[object, Callable[[float], float], float, float]] = [
    (functions.exp, math.exp, 80, 3e-7),
    (functions.tanh, math.tanh, 12, 2.5e-7),
    (functions.erfc, math.erfc, 4, 1e-6),
    (functions.erfc, math.erfc, 9, 6e-6),
    (functions.sigmoid, lambda x: 1 / (1 + math.exp(-x)), 80, 4e-7),
]


@pytest.mark.parametrize(("function", "exact", "limit", "tolerance"), CASES)
def test_functions_are_exact_relative_to_their_result(function, exact, limit, tolerance):
    x = numbers(limit)
    expected = torch.tensor([exact(value) for value in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(applied(function, x).double(), expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (functions.gelu, torch.nn.functional.gelu),
        (functions.gelu_tanh, lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        (_silu, torch.nn.functional.silu),
    ],
)
def test_activations_are_exact_relative_to_their_input(function, exact):
    x = numbers(30)
    error = (applied(function, x).double() - exact(x.double())).abs()
    assert (error <= 3e-7 * x.abs().clamp(1e-30)).all()


@pytest.mark.parametrize(
    "function", [functions.tanh, functions.erfc, functions.gelu, functions.gelu_tanh]
)
def test_results_beyond_every_range_are_the_limits(function):
    x = torch.tensor([1e4, 1e20, 3e38, -1e4, -1e20, -3e38, torch.nan])
    limits = {"tanh": (1, -1), "erfc": (0, 2), "gelu": (x[:3], 0), "gelu_tanh": (x[:3], 0)}
    got = applied(function, x)
    above, below = limits[function.__name__]
    assert torch.equal(got[:3], torch.as_tensor(above, dtype=torch.float32).expand(3))
    torch.testing.assert_close(
        got[3:6] / x[3:6].abs(), torch.as_tensor(below, dtype=torch.float32) / x[3:6].abs()
    )
    assert got[6].isnan()


@pytest.mark.parametrize("function", [functions.exp, functions.tanh, functions.gelu])
def test_a_result_does_not_depend_on_the_place_in_a_vector(function):
    x = torch.randn(67) * 5
    alone = torch.cat([applied(function, x[i : i + 1]) for i in range(67)])
    assert torch.equal(applied(function, x), alone)
