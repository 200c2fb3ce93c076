"""CPU products with a matrix for each head: the bits of one product for each head."""

from __future__ import annotations

import pytest
import torch
from support.cpu_kernels import NEEDS_BFLOAT16, run_kernel
from torch import Tensor

from shmllm_kernels.cpu.head_products import MULTIPLY_HEADS
from shmllm_kernels.cpu.products import DTYPES, MULTIPLY, ROWS_AT_ONCE
from tests.unit.kernels.cpu.test_products import multiply

KINDS = [
    *(("float32", kind) for kind in DTYPES),
    pytest.param(("bfloat16", "bfloat16"), marks=NEEDS_BFLOAT16),
]
"""The dtype names of activations and weights."""


def multiply_heads(kinds: tuple[str, str], x: Tensor, weight: Tensor, num_threads: int) -> Tensor:
    """Multiplies the first k elements of each head of x [rows, heads, ...]; what the kernel must
    not write is NaN beforehand and afterwards."""
    heads, columns, k = weight.shape
    out = torch.full((len(x) + 1, heads, columns + 3), torch.nan)
    size = x.element_size()
    run_kernel(
        MULTIPLY_HEADS[kinds], len(x), x, size * x.stride(0), size * x.stride(1), out,
        4 * out.stride(0), 4 * out.stride(1), weight, heads, columns, k, num_threads=num_threads,
    )  # fmt: skip
    assert out[len(x) :].isnan().all()
    assert out[..., columns:].isnan().all()
    return out[: len(x), :, :columns]


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("shape", [(1, 4, 5), (3, 512, 128), (16, 33, 40), (5, 7, 1100)])
def test_heads_have_the_bits_of_products(kinds: tuple[str, str], shape: tuple[int, ...]) -> None:
    x_dtype, dtype = (getattr(torch, kind) for kind in kinds)
    heads, _, k = shape
    weight = (torch.randn(shape) * k**-0.5).to(dtype)
    for rows in (0, 1, 6, ROWS_AT_ONCE + 2):
        x = torch.randn(rows, heads, k + 8).to(x_dtype)
        found = multiply_heads(kinds, x, weight, num_threads=2)
        assert torch.equal(found, multiply_heads(kinds, x, weight, num_threads=3))
        want = torch.einsum("rhk,hck->rhc", x[..., :k].double(), weight.double())
        torch.testing.assert_close(found.double(), want, atol=1e-5, rtol=1e-5)
        for head in range(heads if rows else 0):
            kernel = MULTIPLY[kinds[0], kinds[1], kinds[1]]
            alone = multiply(kernel, x[:, head, :k].contiguous(), weight[head])
            assert torch.equal(found[:, head], alone)
