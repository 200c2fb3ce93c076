"""The kernel of the product of many rows with a matrix, which `many_rows` launches.

The tensor memory accelerator copies tiles of both operands, and a program computes tiles of the
result one after the other. There are as many programs as multiprocessors, and each takes the same
number of iterations over elements of the rows: 224 tiles on 132 multiprocessors would be two waves,
of which the second is 0.7 full.

So a program may begin, or end, within a tile. Whoever begins a tile finishes it: it adds the parts
that the programs behind it have stored, in their order, so that the bits do not depend on which of
them was faster. It ends with that tile, and the next program began with the rest of it, so it does
not wait long. Programs start in the order of their numbers, and here the first number has the last
iterations: those that a program waits for have started before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shmllm_kernels.gpu.grid_meeting import Meeting, arrive, await_arrivals
from shmllm_kernels.gpu.single_row_kernel import finished, load_if


class PartMemory(NamedTuple):
    """The scratch memory of tiles that several programs compute.

    Attributes:
        sums: pointer to a tile of float32 for each program: that which another one finishes.
        counters: pointer to an int32 for each program, how many parts of the tile that it finishes
            are stored; 0 between launches.
    """

    sums: Any
    counters: Any


class Result(NamedTuple):
    """Where the result goes: a pointer, its rows and columns, the elements from one row to the
    next, and a pointer to the bias."""

    first: Any
    rows: Any
    columns: Any
    stride: Any
    bias: Any


class Shares(NamedTuple):
    """How iterations are spread over programs.

    Attributes:
        programs: the number of programs, at most that of iterations.
        total: the number of iterations of all tiles.
    """

    programs: Any
    total: Any


@triton.jit
def begin_of(shares, program):
    """Returns the first iteration of a program; it ends where the next one begins."""
    return program * shares.total // shares.programs


@triton.jit
def owner_of(shares, iteration):
    """Returns the program that computes an iteration."""
    return ((iteration + 1) * shares.programs - 1) // shares.total


@triton.jit
def _multiply(
    x, weight, row, column, columns, first, end,
    IS_GATED: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Returns a tile of the product over some iterations, and one of the second half of a gated
    product, [BLOCK_M, WIDTH] float32."""
    product = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    up = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for index in range(first, end):
        rows = x.load([row, index * BLOCK_K])
        weights = weight.load([column, index * BLOCK_K])
        product = tl.dot(rows, weights.T, product, input_precision="ieee")
        if IS_GATED:
            weights = weight.load([columns + column, index * BLOCK_K])
            up = tl.dot(rows, weights.T, up, input_precision="ieee")
    return product, up


@triton.jit
def _store(
    result, product, up, row, column,
    HAS_BIAS: tl.constexpr, NAME: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """Stores a tile of the result."""
    rows = row + tl.arange(0, product.shape[0])
    columns = column + tl.arange(0, product.shape[1])
    is_column = columns < result.columns
    biases = result.bias + columns[None, :]
    bias = load_if(HAS_BIAS, biases, is_column[None, :])
    up_bias = load_if(HAS_BIAS and IS_GATED, biases + result.columns, is_column[None, :])
    dtype: tl.constexpr = result.first.dtype.element_ty
    found = finished(product, up, bias, up_bias, 0.0, 1.0, dtype, NAME, IS_GATED, False, False)
    targets = result.first + rows.to(tl.int64)[:, None] * result.stride + columns[None, :]
    mask = (rows < result.rows)[:, None] & is_column[None, :]
    tl.store(targets, found.to(dtype), mask=mask)


@triton.jit
def _places(memory, program, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, HALVES: tl.constexpr):
    """Returns where a program stores the sums of a tile that another one finishes."""
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, WIDTH)
    first = memory.sums + program * (HALVES * BLOCK_M * WIDTH)
    return first + rows[:, None] * WIDTH + columns[None, :]


@triton.jit
def _store_part(
    memory, product, up, program, finisher,
    IS_GATED: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Stores a program's part of a tile for the one that finishes it."""
    places = _places(memory, program, BLOCK_M, WIDTH, HALVES)
    tl.store(places, product)
    if IS_GATED:
        tl.store(places + BLOCK_M * WIDTH, up)
    arrive(memory.counters + finisher)


@triton.jit
def _add_parts(
    memory, product, up, program, last,
    IS_GATED: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Returns a tile with the parts of the programs behind this one, up to the last one."""
    counter = memory.counters + program
    await_arrivals(Meeting(counter, last - program))
    tl.store(counter, 0)
    for other in range(program + 1, last + 1):
        places = _places(memory, other, BLOCK_M, WIDTH, HALVES)
        product += tl.load(places)
        if IS_GATED:
            up += tl.load(places + BLOCK_M * WIDTH)
    return product, up


@triton.jit(do_not_specialize=["num_rows"])
def multiply_many_rows(
    out_ptr,
    x,
    weight,
    bias_ptr,
    memory,
    num_rows,
    num_columns,
    k,
    out_stride,
    HAS_BIAS: tl.constexpr,
    NAME: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    HALVES: tl.constexpr = 2 if IS_GATED else 1
    WIDTH: tl.constexpr = BLOCK_N // HALVES
    row_tiles, depth = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(k, BLOCK_K)
    total = row_tiles * tl.cdiv(num_columns, WIDTH) * depth
    shares = Shares(tl.num_programs(0), total)
    program = shares.programs - 1 - tl.program_id(0)
    result = Result(out_ptr, num_rows, num_columns, out_stride, bias_ptr)
    at, end = begin_of(shares, program), begin_of(shares, program + 1)
    while at < end:
        # Tiles of the same columns follow one another: one reads the weights from memory.
        tile = at // depth
        row, column = tile % row_tiles * BLOCK_M, tile // row_tiles * WIDTH
        first, last = at - tile * depth, tl.minimum(depth, end - tile * depth)
        product, up = _multiply(
            x, weight, row, column, num_columns, first, last, IS_GATED, BLOCK_M, WIDTH, BLOCK_K
        )
        if first > 0:
            finisher = owner_of(shares, tile * depth)
            _store_part(memory, product, up, program, finisher, IS_GATED, BLOCK_M, WIDTH, HALVES)
        else:
            if last < depth:
                last_program = owner_of(shares, tile * depth + depth - 1)
                product, up = _add_parts(
                    memory, product, up, program, last_program, IS_GATED, BLOCK_M, WIDTH, HALVES
                )
            _store(result, product, up, row, column, HAS_BIAS, NAME, IS_GATED)
        at = tile * depth + last
