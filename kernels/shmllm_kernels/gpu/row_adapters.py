"""What low-rank adapters add to a product of few rows, within the launch of the product.

A launch begins with programs that multiply rows with the A of their adapters, one for some ranks of
each row. They count themselves when their results are written; the programs of columns, which read
the matrix meanwhile, wait for that count before they multiply with B. Programs start in the order
of their numbers, so a program waits only for those that have started before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.grid_meeting import Meeting, await_arrivals, leave
from shmllm_kernels.gpu.lora import LoraPlaces, StepUnits

RANKS_AT_ONCE = tl.constexpr(16)


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """The adapters of a product of few rows.

    Attributes:
        shrunk: [rows or more, ranks or more], the rows' dtype, each row contiguous; overwritten.
        counters: [2] int32, both 0, as a launch leaves them.
        places: the adapters' matrices.
        step: the rows that have one.
    """

    shrunk: Tensor
    counters: Tensor
    places: LoraPlaces
    step: StepUnits


class RowOperands(NamedTuple):
    """Pointers and strides of `RowAdapters`, and the sizes of the launch."""

    shrunk: Any
    counters: Any
    a: Any
    b: Any
    scales: Any
    is_used: Any
    num_units: Any
    places: Any
    shrunk_stride: Any
    a_stride: Any
    b_stride: Any
    scales_stride: Any
    is_used_stride: Any
    num_ranks: Any
    num_programs: Any


def operands_of(adapters: RowAdapters, x: Tensor, width: int, block_n: int) -> RowOperands:
    """Returns the operands of a launch.

    Args:
        adapters: the adapters.
        x: [rows, k], the rows.
        width: the columns of the product.
        block_n: the rows of a matrix that a program multiplies with.
    """
    places, step, shrunk = adapters.places, adapters.step, adapters.shrunk
    num_ranks = places.a.shape[1]
    assert places.a.shape[2] == x.shape[1], "a: rows of k"
    assert places.b.shape[1:] == (width, num_ranks), "b: [columns, ranks] for each place"
    assert shrunk.dtype is places.a.dtype is places.b.dtype is x.dtype, "one dtype"
    assert places.a[0].is_contiguous(), "a place of a must be contiguous"
    assert places.b[0].is_contiguous(), "a place of b must be contiguous"
    assert places.scales.stride(1) == shrunk.stride(1) == 1, "rows must be contiguous"
    assert len(shrunk) >= len(x) <= len(step.places), "memory for each row"
    assert shrunk.shape[1] >= num_ranks, "memory for each rank"
    assert adapters.counters.shape == (2,), "two counters"
    assert adapters.counters.dtype is torch.int32, "counters are int32"
    return RowOperands(
        shrunk, adapters.counters, places.a, places.b, places.scales, places.is_used,
        step.num_units, step.places, shrunk.stride(0), places.a.stride(0), places.b.stride(0),
        places.scales.stride(0), places.is_used.stride(0), num_ranks,
        len(x) * triton.cdiv(num_ranks, block_n),
    )  # fmt: skip


@triton.jit
def has_adapters(adapters):
    """Returns whether any row of the step has an adapter."""
    return tl.load(adapters.num_units) > 0


@triton.jit
def place_of(adapters, rows, is_row):
    """Returns the place of each row's adapter, int64; -1: none adds anything to the product."""
    place = tl.load(adapters.places + rows, mask=is_row, other=-1).to(tl.int64)
    is_used = adapters.is_used + place * adapters.is_used_stride
    return tl.where(tl.load(is_used, mask=place >= 0, other=0) != 0, place, -1)


@triton.jit
def store_shrunk(adapters, product, row, place, ranks, ROWS: tl.constexpr):
    """Stores a row's ranks, of the product of some rows of A with all rows, [ranks, ROWS]."""
    is_rank = ranks < adapters.num_ranks
    scales = tl.load(adapters.scales + place * adapters.scales_stride + ranks, mask=is_rank)
    own = (tl.arange(0, ROWS) == row)[None, :] & is_rank[:, None]
    value = (product * scales[:, None]).to(adapters.shrunk.dtype.element_ty)
    targets = adapters.shrunk + row * adapters.shrunk_stride + ranks[:, None]
    tl.store(targets + tl.zeros((1, ROWS), tl.int32), value, mask=own)


@triton.jit
def _expanded(adapters, columns, is_column, num_rows, ROWS: tl.constexpr):
    """Returns what adapters add to some columns, [columns, ROWS] float32."""
    rows = tl.arange(0, ROWS)
    place = place_of(adapters, rows, rows < num_rows)
    total = tl.zeros((ROWS, columns.shape[0]), tl.float32)
    for first in range(0, adapters.num_ranks, RANKS_AT_ONCE):
        ranks = first + tl.arange(0, RANKS_AT_ONCE)
        is_there = (place >= 0)[:, None] & (ranks < adapters.num_ranks)[None, :]
        shrunk = adapters.shrunk + rows[:, None] * adapters.shrunk_stride + ranks[None, :]
        t = tl.load(shrunk, mask=is_there, other=0.0).to(tl.float32)
        b = adapters.b + place[:, None, None] * adapters.b_stride
        b += columns[None, :, None] * adapters.num_ranks + ranks[None, None, :]
        mask = is_there[:, None, :] & is_column[None, :, None]
        total += tl.sum(tl.load(b, mask=mask, other=0.0).to(tl.float32) * t[:, None, :], axis=2)
    return tl.trans(total)


@triton.jit
def added(adapters, columns, is_column, num_rows, ROWS: tl.constexpr):
    """Returns what adapters, if there are any, add to some columns, [columns, ROWS] float32, when
    their ranks are there."""
    if adapters is None:
        return 0.0
    else:
        total = tl.zeros((columns.shape[0], ROWS), tl.float32)
        if has_adapters(adapters):
            await_arrivals(Meeting(adapters.counters, adapters.num_programs))
            leave(adapters.counters, tl.num_programs(0) - adapters.num_programs)
            total = _expanded(adapters, columns, is_column, num_rows, ROWS)
        return total
