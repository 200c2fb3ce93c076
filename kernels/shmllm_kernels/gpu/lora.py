"""Low-rank adapters on a GPU: what their two small matrices add to a matrix product.

The rows of a step are sorted by adapter, on the host, and divided into units of up to UNIT_ROWS
rows of one adapter. Adapters lie at places in memory of the device. The grids depend on the number
of rows alone, and programs without a unit return at once: a captured graph stays valid when the
adapters of a step change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.products import multiply

UNIT_ROWS = 16
UNIT_WORDS = 3
"""The words of a unit: the adapter's place, the first of its sorted rows, the number of them."""
BLOCK_K, BLOCK_RANKS, BLOCK_COLUMNS = 64, 16, 128


@dataclass(frozen=True, slots=True)
class StepUnits:
    """The rows of a step that have an adapter.

    Attributes:
        num_units: [1] int32, the number of units.
        units: [max_units, UNIT_WORDS] int32, the units.
        order: [max_rows] int32, the rows in the order of the units.
        places: [max_rows] int32, the place of each row's adapter; -1: it has none. Garbage if there
            are no units.
    """

    num_units: Tensor
    units: Tensor
    order: Tensor
    places: Tensor

    @classmethod
    def allocate(cls, max_loras: int, max_rows: int, device: torch.device) -> StepUnits:
        """Allocates those of a step without adapters."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        most = max_units(max_rows, max_loras)
        return cls(zeros(1), zeros(most, UNIT_WORDS), zeros(max_rows), zeros(max_rows))


@dataclass(frozen=True, slots=True)
class LoraPlaces:
    """The adapters' matrices for one product.

    Attributes:
        a: [places, ranks, k]: the A of all projections of the product, one after the other.
        b: [places, columns, ranks]: their B, with zeros where a column's projection is another.
        scales: [places, ranks] float32, the factor of what each rank adds.
        is_used: [places] int32, whether the adapter changes anything in the product.

    Each place is contiguous, with any stride between places.
    """

    a: Tensor
    b: Tensor
    scales: Tensor
    is_used: Tensor


def max_units(num_rows: int, max_loras: int) -> int:
    """Returns the largest number of units of so many rows."""
    return -(-num_rows // UNIT_ROWS) + max_loras


@triton.jit
def _unit(num_units_ptr, units_ptr, is_used_ptr, is_used_stride):
    """Returns place, first sorted row and number of rows of this program's unit; 0 rows: it has
    none, or nothing to compute."""
    index = tl.program_id(0)
    is_there = index < tl.load(num_units_ptr)
    place = tl.load(units_ptr + 3 * index, mask=is_there, other=0).to(tl.int64)
    first = tl.load(units_ptr + 3 * index + 1, mask=is_there, other=0)
    count = tl.load(units_ptr + 3 * index + 2, mask=is_there, other=0)
    return place, first, count * tl.load(is_used_ptr + place * is_used_stride)


@triton.jit
def _shrink(
    t_ptr, x_ptr, a_ptr, scales_ptr, is_used_ptr, num_units_ptr, units_ptr, order_ptr,
    is_used_stride, num_ranks, k, t_stride, x_stride, a_stride, scales_stride,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    place, first, count = _unit(num_units_ptr, units_ptr, is_used_ptr, is_used_stride)
    if count > 0:
        own = tl.arange(0, BLOCK_M)
        is_row = own < count
        rows = tl.load(order_ptr + first + own, mask=is_row, other=0).to(tl.int64)
        ranks = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_rank = ranks < num_ranks
        a_place = a_ptr + place * a_stride
        result = multiply(
            x_ptr + rows * x_stride, is_row, a_place, a_place, ranks, is_rank, k, k, 0,
            None, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        scales = tl.load(scales_ptr + place * scales_stride + ranks, mask=is_rank, other=0.0)
        targets = t_ptr + (first + own).to(tl.int64)[:, None] * t_stride + ranks[None, :]
        value = (result * scales[None, :]).to(t_ptr.dtype.element_ty)
        tl.store(targets, value, mask=is_row[:, None] & is_rank[None, :])


@triton.jit
def _expand(
    out_ptr, t_ptr, b_ptr, is_used_ptr, num_units_ptr, units_ptr, order_ptr,
    is_used_stride, num_columns, num_ranks, out_stride, t_stride, b_stride,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    place, first, count = _unit(num_units_ptr, units_ptr, is_used_ptr, is_used_stride)
    if count > 0:
        own = tl.arange(0, BLOCK_M)
        is_row = own < count
        rows = tl.load(order_ptr + first + own, mask=is_row, other=0).to(tl.int64)
        columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = columns < num_columns
        b_place = b_ptr + place * b_stride
        result = multiply(
            t_ptr + (first + own).to(tl.int64) * t_stride, is_row, b_place, b_place, columns,
            is_column, num_ranks, num_ranks, 0, None, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        targets = out_ptr + rows[:, None] * out_stride + columns[None, :]
        mask = is_row[:, None] & is_column[None, :]
        before = tl.load(targets, mask=mask, other=0.0).to(tl.float32)
        tl.store(targets, (before + result).to(out_ptr.dtype.element_ty), mask=mask)


def add_adapters(out: Tensor, x: Tensor, t: Tensor, places: LoraPlaces, step: StepUnits) -> None:
    """Adds ``scale * (x @ A.T) @ B.T`` to the rows of ``out`` that have an adapter, in place.

    Sums are float32; x @ A.T and the result are rounded once each.

    Args:
        out: [rows, columns], float32, float16 or bfloat16, each row contiguous.
        x: [rows, k], float32, float16 or bfloat16, rows as those of ``out``.
        t: [rows or more, ranks or more], x's dtype, each row contiguous; is overwritten.
        places: the adapters' matrices, x's dtype.
        step: the rows that have one.

    Two launches for each matrix. They read A and B of each adapter that the step uses once for each
    UNIT_ROWS of its rows. With a rank of 16 and 4,096 x 4,096 in bfloat16 both have 0.26 MB: one
    adapter takes 5 us, two launches of which each waits for the one before, and 64 adapters of
    256 decodes read 17 MB and move 6 MB of rows, 10 us.
    """
    num_rows, k = x.shape
    max_loras, num_ranks, _ = places.a.shape
    num_columns = out.shape[1]
    assert places.a.shape[2] == k, "a: rows of k"
    assert places.b.shape[1:] == (num_columns, num_ranks), "b: [columns, ranks] for each place"
    assert x.dtype is t.dtype is places.a.dtype is places.b.dtype, "one dtype"
    assert places.a[0].is_contiguous(), "a place of a must be contiguous"
    assert places.b[0].is_contiguous(), "a place of b must be contiguous"
    assert places.scales.stride(1) == 1, "a place of scales must be contiguous"
    assert out.stride(1) == x.stride(1) == t.stride(1) == 1, "rows must be contiguous"
    assert len(t) >= num_rows <= len(step.order), "memory for each row"
    if num_rows == 0:
        return
    units = max_units(num_rows, max_loras)
    of_step = places.is_used, step.num_units, step.units, step.order, places.is_used.stride(0)
    _shrink[units, triton.cdiv(num_ranks, BLOCK_RANKS)](
        t, x, places.a, places.scales, *of_step, num_ranks, k, t.stride(0), x.stride(0),
        places.a.stride(0), places.scales.stride(0),
        EVEN_K=k % BLOCK_K == 0, BLOCK_M=UNIT_ROWS, BLOCK_N=BLOCK_RANKS, BLOCK_K=BLOCK_K,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    _expand[units, triton.cdiv(num_columns, BLOCK_COLUMNS)](
        out, t, places.b, *of_step, num_columns, num_ranks, out.stride(0), t.stride(0),
        places.b.stride(0),
        EVEN_K=num_ranks % BLOCK_RANKS == 0, BLOCK_M=UNIT_ROWS, BLOCK_N=BLOCK_COLUMNS,
        BLOCK_K=BLOCK_RANKS, num_warps=4, num_stages=2,
    )  # fmt: skip
