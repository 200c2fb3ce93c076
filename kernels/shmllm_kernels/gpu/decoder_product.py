"""Kernel functions of the products of a decoder in one launch: its programs divide the columns.

A program multiplies up to eight rows with its columns as `few_rows_kernel` does, with two
differences. Its tiles follow one another in one loop, so that the weights of a tile are loaded
while the one before is multiplied. And before it waits for other programs it has asked the L2 cache
for the weights that it reads next, so that memory does not rest while programs meet.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from shmllm_kernels.gpu.few_rows_kernel import elements, multiply_half, norms_of
from shmllm_kernels.gpu.grid_meeting import await_arrivals
from shmllm_kernels.gpu.single_row_kernel import finished, load_if
from shmllm_kernels.gpu.weights_ahead import request


class Columns(NamedTuple):
    """A matrix, and the columns of its product that a program computes.

    Attributes:
        weight: the matrix, [n, k], or [2 * n, k] for a gated activation, contiguous.
        bias: one for each row of the matrix.
        n: the number of columns of all programs.
        k: the number of elements of a row.
        begin, end: the program's first column, and the one behind its last.
    """

    weight: Any
    bias: Any
    n: Any
    k: Any
    begin: Any
    end: Any


class Target(NamedTuple):
    """Where a product goes: a pointer to rows, the elements from one to the next, and the factor of
    the product if it is added to what is there."""

    out: Any
    stride: Any
    scale: Any


@triton.jit
def own_columns(weight, bias, n, k):
    """Returns the columns of this program: all programs have as many, but for the last ones."""
    each = tl.cdiv(n, tl.num_programs(0))
    begin = tl.program_id(0) * each
    return Columns(weight, bias, n, k, begin, tl.minimum(begin + each, n))


@triton.jit
def _places(columns, tile, own, IS_GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns which rows of the matrix some rows of a tile are, int64, and whether they are there:
    a tile of a gated product has the gates of some columns, then their seconds."""
    num_columns: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    column = columns.begin + tile * num_columns + own % num_columns
    return (column + own // num_columns * columns.n).to(tl.int64), column < columns.end


@triton.jit
def _targets(
    target, columns, rows, tile,
    IS_GATED: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Returns where a tile's results go, [columns, ROWS], and whether they go anywhere."""
    num_columns: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    row = tl.arange(0, ROWS)
    column = columns.begin + tile * num_columns + tl.arange(0, num_columns)
    places = target.out + row[None, :] * target.stride + column[:, None]
    return places, (row < rows.num_rows)[None, :] & (column < columns.end)[:, None]


@triton.jit
def _weights(
    columns, index,
    HALF: tl.constexpr, IS_GATED: tl.constexpr, IS_WHOLE: tl.constexpr, BLOCK_N: tl.constexpr,
    SLICES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Returns half of the weights of an iteration, [SLICES, BLOCK_N, DEPTH]."""
    iterations = tl.cdiv(columns.k, 2 * SLICES * DEPTH)
    own = tl.arange(0, BLOCK_N)
    places, is_place = _places(columns, index // iterations, own, IS_GATED, BLOCK_N)
    ks = elements(index % iterations * (2 * SLICES * DEPTH), HALF, SLICES, DEPTH)
    mask = is_place[None, :, None]
    if not IS_WHOLE:
        mask = mask & (ks < columns.k)
    return tl.load(columns.weight + places[None, :, None] * columns.k + ks, mask=mask, other=0.0)


@triton.jit
def ask_cache(
    columns,
    IS_GATED: tl.constexpr, AHEAD: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Asks the L2 cache for the weights of a program's first AHEAD iterations, of compute
    capability 9.0 on. Rows must begin at multiples of 16 bytes.

    A request is for the elements of a row in an iteration. The threads of a warp request one after
    another, so that all warps have as many requests.
    """
    step: tl.constexpr = 2 * SLICES * DEPTH
    each: tl.constexpr = 32 * SLICES // (AHEAD * BLOCK_N)
    itemsize: tl.constexpr = columns.weight.dtype.element_ty.primitive_bitwidth // 8
    threads = tl.arange(0, 32 * SLICES)
    index, own = threads // each // BLOCK_N, threads // each % BLOCK_N
    iterations = tl.cdiv(columns.k, step)
    start = index % iterations * step
    num_bytes = tl.minimum(step, columns.k - start) * itemsize
    places, is_place = _places(columns, index // iterations, own, IS_GATED, BLOCK_N)
    found = columns.weight + places * columns.k + start
    request(found.to(tl.int64), (is_place & (threads % each == 0)).to(tl.int32), num_bytes)


@triton.jit
def _finish(
    total, squares, bias, before, target, columns, rows, tile,
    NORM: tl.constexpr, IS_FIRST: tl.constexpr, ADDS: tl.constexpr, NAME: tl.constexpr,
    IS_GATED: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Stores what follows from the sums of a tile."""
    dtype: tl.constexpr = target.out.dtype.element_ty
    product = tl.sum(total, axis=0)
    if NORM is not None and not IS_FIRST:
        mean_square = tl.sum(tl.sum(squares, axis=2), axis=0) / rows.k
        product *= tl.rsqrt(mean_square + rows.eps)[None, :]
    product += bias
    up = product
    if IS_GATED:
        halves = tl.reshape(product, [2, BLOCK_N // 2, ROWS])
        product, up = tl.split(tl.permute(halves, (1, 2, 0)))
    result = finished(
        product, up, 0.0, 0.0, before, target.scale, dtype, NAME, IS_GATED, ADDS, False
    )
    places, is_target = _targets(target, columns, rows, tile, IS_GATED, BLOCK_N, ROWS)
    tl.store(places, result.to(dtype), mask=is_target)


@triton.jit
def _bias_of(columns, tile, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the bias of a tile's rows, [BLOCK_N, 1] float32, or 0."""
    places, is_place = _places(columns, tile, tl.arange(0, BLOCK_N), IS_GATED, BLOCK_N)
    return load_if(HAS_BIAS, (columns.bias + places)[:, None], is_place[:, None])


@triton.jit
def _before(
    target, columns, rows, tile,
    ADDS: tl.constexpr, IS_GATED: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Returns what a tile's products are added to, float32, or 0."""
    places, is_target = _targets(target, columns, rows, tile, IS_GATED, BLOCK_N, ROWS)
    return load_if(ADDS, places, is_target)


@triton.jit
def multiply_columns(
    target, rows, columns, following, meeting,
    NORM: tl.constexpr, IS_FIRST: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr,
    NAME: tl.constexpr, IS_GATED: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_OFFSET: tl.constexpr,
    AHEAD: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Computes a program's columns of a product, with its norm, activation or sum. The first
    program stores the rows with what is added to them.

    Args:
        target: where they go.
        rows: the rows, `few_rows_kernel.NormedRows`, which other programs write.
        columns: the matrix and the columns.
        following: the columns that the program computes next, for which it asks the cache when it
            has read its own; None: it asks for none.
        meeting: the meeting behind which the rows are there.
    """
    num_columns: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    step: tl.constexpr = 2 * SLICES * DEPTH
    low = _weights(columns, 0, 0, IS_GATED, IS_WHOLE, BLOCK_N, SLICES, DEPTH)
    high = _weights(columns, 0, 1, IS_GATED, IS_WHOLE, BLOCK_N, SLICES, DEPTH)
    bias = _bias_of(columns, 0, HAS_BIAS, IS_GATED, BLOCK_N)
    await_arrivals(meeting)

    before = _before(target, columns, rows, 0, ADDS, IS_GATED, BLOCK_N, ROWS)
    norms = norms_of(rows, NORM, IS_FIRST, HAS_OFFSET, ROWS, 4 * DEPTH)
    is_kept = tl.program_id(0) == 0
    total = tl.zeros((SLICES, BLOCK_N, ROWS), tl.float32)
    squares = tl.zeros((SLICES, ROWS, DEPTH), tl.float32)
    for half in tl.static_range(2):
        total, squares = multiply_half(
            total, squares, low if half == 0 else high, rows, elements(0, half, SLICES, DEPTH),
            norms, is_kept, NORM, IS_FIRST, IS_WHOLE, HAS_OFFSET, ROWS,
        )  # fmt: skip
    iterations = tl.cdiv(columns.k, step)
    tile = columns.begin * 0
    for index in range(1, tl.cdiv(columns.end - columns.begin, num_columns) * iterations):
        start = index % iterations * step
        if start == 0:
            _finish(
                total, squares, bias, before, target, columns, rows, tile,
                NORM, IS_FIRST, ADDS, NAME, IS_GATED, BLOCK_N, ROWS,
            )  # fmt: skip
            tile += 1
            total = tl.zeros((SLICES, BLOCK_N, ROWS), tl.float32)
            squares = tl.zeros((SLICES, ROWS, DEPTH), tl.float32)
            bias = _bias_of(columns, tile, HAS_BIAS, IS_GATED, BLOCK_N)
            before = _before(target, columns, rows, tile, ADDS, IS_GATED, BLOCK_N, ROWS)
        for half in tl.static_range(2):
            weight = _weights(columns, index, half, IS_GATED, IS_WHOLE, BLOCK_N, SLICES, DEPTH)
            total, squares = multiply_half(
                total, squares, weight, rows, elements(start, half, SLICES, DEPTH),
                norms, is_kept, NORM, IS_FIRST, IS_WHOLE, HAS_OFFSET, ROWS,
            )  # fmt: skip
    if AHEAD and following is not None:
        ask_cache(following, False, AHEAD, BLOCK_N, SLICES, DEPTH)
    _finish(
        total, squares, bias, before, target, columns, rows, tile,
        NORM, IS_FIRST, ADDS, NAME, IS_GATED, BLOCK_N, ROWS,
    )  # fmt: skip
