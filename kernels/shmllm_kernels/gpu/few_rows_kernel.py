"""The kernel of the product of up to eight rows with a matrix, which `few_rows` launches.

As in `single_row_kernel`, a launch reads each weight once, computes the norm before and the
activation or the sum behind the product, and loads its first weights before it waits for the launch
before. But the rows share the weights that a program has loaded, and tensor cores multiply them: a
tile of 16 rows of the matrix with eight rows takes one instruction for each 16 elements.

Such an instruction needs the sum of the one before: 33 cycles, so that one warp would take 2.4 us
for rows of 2,048 elements, however few columns it has. So each warp has a slice of the elements of
every iteration, with sums of its own, which are added at the end in the order of the slices. Eight
warps take 0.3 us for the same rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shmllm_kernels.gpu.grid_meeting import arrive
from shmllm_kernels.gpu.row_adapters import added, has_adapters, place_of, store_shrunk
from shmllm_kernels.gpu.single_row_kernel import finished, load_factors, load_if, multiplied
from shmllm_kernels.gpu.unpacking import half_run


class NormedSum(NamedTuple):
    """What is added to rows before a product reads them: an RMSNorm of other rows.

    Attributes:
        x: the other rows.
        weight: the norm's weight.
        kept: where the sums go: not where the rows are, which other programs still read.
        stride: the elements from one row to the next, in `x`.
        kept_stride: the same in `kept`.
        eps: added to the mean square.
        offset: added to the norm's weight.
        scale: the factor of the norm in the sum.
    """

    x: Any
    weight: Any
    kept: Any
    stride: Any
    kept_stride: Any
    eps: Any
    offset: Any
    scale: Any


class NormedRows(NamedTuple):
    """The rows of a product and their norm: pointers, sizes, strides and numbers.

    Attributes:
        x: the rows.
        weight: the norm's weight.
        bias: what a LayerNorm adds.
        num_rows: the number of rows.
        k: the elements of a row.
        stride: the elements from one row to the next.
        eps: added to the mean square, or to the variance.
        offset: added to the norm's weight.
        added: what is added to the rows before, a `NormedSum`, or None.
        factor: the factor of the sums, or None; here, because Triton 3.6 takes no tuple with a None
            in another tuple.
    """

    x: Any
    weight: Any
    bias: Any
    num_rows: Any
    k: Any
    stride: Any
    eps: Any
    offset: Any
    added: Any
    factor: Any


@triton.jit
def elements(start, HALF: tl.constexpr, SLICES: tl.constexpr, DEPTH: tl.constexpr):
    """Returns the elements of half an iteration, [SLICES, 1, DEPTH]: a slice has two halves."""
    slices = tl.arange(0, SLICES)[:, None, None]
    return start + (2 * slices + HALF) * DEPTH + tl.arange(0, DEPTH)[None, None, :]


@triton.jit
def _load_weights(
    weight_ptr, parameters_ptr, places, is_place, start, k, weight_stride, parameters_stride,
    HALF: tl.constexpr, dtype: tl.constexpr, PACKING: tl.constexpr, IS_WHOLE: tl.constexpr,
    SLICES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Returns the elements of half an iteration of some rows of a matrix, [SLICES, places, DEPTH]
    in a dtype. Packed ones have a run of 64 elements in each slice."""
    if PACKING is None:
        ks = elements(start, HALF, SLICES, DEPTH)
        found = weight_ptr + places[None, :, None] * weight_stride + ks
        if IS_WHOLE:
            return tl.load(found)
        return tl.load(found, mask=is_place[None, :, None] & (ks < k), other=0.0)
    else:
        num_pairs: tl.constexpr = SLICES * places.shape[0]
        shape: tl.constexpr = [SLICES, places.shape[0]]
        own = tl.reshape(tl.broadcast_to(places[None, :], shape), [num_pairs])
        is_own = tl.reshape(tl.broadcast_to(is_place[None, :], shape), [num_pairs])
        run = start // 64 + tl.arange(0, num_pairs) // places.shape[0]
        values = half_run(
            weight_ptr + own * weight_stride, parameters_ptr + own * parameters_stride, run,
            is_own & (run * 64 < k), k, HALF, PACKING,
        )  # fmt: skip
        return tl.reshape(tl.trans(values.to(dtype)), [SLICES, places.shape[0], 32])


@triton.jit
def factors_of_sums(rows, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the factor of the norm of what is added to each row, [ROWS] float32, or 1."""
    factor = tl.zeros((ROWS,), tl.float32) + 1.0
    if rows.added is not None:
        row, inner = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
        squares = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, rows.k, BLOCK):
            mask = (row < rows.num_rows) & (start + inner < rows.k)
            places = rows.added.x + row * rows.added.stride + start + inner
            x = tl.load(places, mask=mask, other=0.0).to(tl.float32)
            squares += x * x
        factor = tl.rsqrt(tl.sum(squares, axis=1) / rows.k + rows.added.eps)
    return factor


@triton.jit
def _load_rows(rows, row, ks, mask, factor, is_kept, HAS_OFFSET: tl.constexpr):
    """Returns some elements of rows, with what is added to them. It rounds as a norm and a sum of
    their own do.

    Args:
        rows: the rows.
        row, ks, mask: which elements; they have one shape, or 1 where others have more.
        factor: the factors of the norms of what is added, in that shape.
        is_kept: whether the sums are stored.
    """
    x = tl.load(rows.x + row * rows.stride + ks, mask=mask, other=0.0)
    if rows.added is not None:
        added = rows.added
        dtype: tl.constexpr = x.dtype
        normed = tl.load(added.x + row * added.stride + ks, mask=mask, other=0.0).to(tl.float32)
        normed *= factor
        weight = tl.load(added.weight + ks, mask=ks < rows.k, other=0.0).to(tl.float32)
        if HAS_OFFSET:
            normed *= weight + added.offset
        else:
            normed = normed.to(dtype).to(tl.float32) * weight
        x = (x.to(tl.float32) + normed.to(dtype).to(tl.float32) * added.scale).to(dtype)
        if rows.factor is not None:
            x = (x.to(tl.float32) * tl.load(rows.factor).to(tl.float32)).to(dtype)
        tl.store(added.kept + row * added.kept_stride + ks, x, mask=mask & is_kept)
    return x


@triton.jit
def statistics(
    rows, factor, HAS_MEAN: tl.constexpr, HAS_OFFSET: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the mean of each row, or 0, and the factor of its norm, [ROWS] float32.

    Args:
        rows: the rows.
        factor: `factors_of_sums` of them.
    """
    row, inner = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    mean = tl.zeros((ROWS,), tl.float32)
    if HAS_MEAN:
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, rows.k, BLOCK):
            mask = (row < rows.num_rows) & (start + inner < rows.k)
            x = _load_rows(rows, row, start + inner, mask, factor[:, None], False, HAS_OFFSET)
            total += x.to(tl.float32)
        mean = tl.sum(total, axis=1) / rows.k
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, rows.k, BLOCK):
        mask = (row < rows.num_rows) & (start + inner < rows.k)
        x = _load_rows(rows, row, start + inner, mask, factor[:, None], False, HAS_OFFSET)
        away = tl.where(mask, x.to(tl.float32) - mean[:, None], 0.0)
        squares += away * away
    return mean, tl.rsqrt(tl.sum(squares, axis=1) / rows.k + rows.eps)


@triton.jit
def norms_of(
    rows, NORM: tl.constexpr, IS_FIRST: tl.constexpr, HAS_OFFSET: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns `factors_of_sums`, and the means and factors of the norms of rows, as far as they are
    computed before the product; otherwise 0 and 1."""
    of_sums = factors_of_sums(rows, ROWS, BLOCK)
    mean = tl.zeros((ROWS,), tl.float32)
    factor = mean + 1.0
    if IS_FIRST:
        mean, factor = statistics(rows, of_sums, NORM != "rms", HAS_OFFSET, ROWS, BLOCK)
    return of_sums, mean, factor


@triton.jit
def _normed(rows, x, ks, mean, factor, NORM: tl.constexpr, IS_FIRST: tl.constexpr):
    """Returns some elements of rows as the product reads them, and their squares. If the factor of
    their norm is not known yet, it is left out."""
    values = x.to(tl.float32)
    squares = values * values
    weight = tl.load(rows.weight + ks, mask=ks < rows.k, other=0.0).to(tl.float32) + rows.offset
    if IS_FIRST:
        values = (values - mean[None, :, None]) * factor[None, :, None]
    values *= weight
    if NORM == "layer":
        values += tl.load(rows.bias + ks, mask=ks < rows.k, other=0.0).to(tl.float32)
    return values.to(x.dtype), squares


@triton.jit
def multiply_half(
    total, squares, weight, rows, ks, norms, is_kept,
    NORM: tl.constexpr, IS_FIRST: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Adds half an iteration to the products, [SLICES, places, ROWS], and to the rows' squares.
    Rows behind the last one are 0.

    Args:
        norms: the norms of the rows, see `norms_of`.
        is_kept: whether the rows, with what is added to them, are stored.
    """
    row = tl.arange(0, ROWS)[None, :, None]
    mask = row < rows.num_rows
    if not IS_WHOLE:
        mask = mask & (ks < rows.k)
    of_sums, mean, factor = norms
    x = _load_rows(rows, row, ks, mask, of_sums[None, :, None], is_kept, HAS_OFFSET)
    if NORM is not None:
        x, square = _normed(rows, x, ks, mean, factor, NORM, IS_FIRST)
        squares += square
    total = tl.dot(weight, tl.permute(x, (0, 2, 1)), total, input_precision="ieee")
    return total, squares


@triton.jit
def _multiply_tiles(
    low, high, rows, weight_ptr, parameters_ptr, places, is_place, weight_stride,
    parameters_stride, is_kept, NORM: tl.constexpr, IS_FIRST: tl.constexpr, PACKING: tl.constexpr,
    IS_WHOLE: tl.constexpr, HAS_OFFSET: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Returns the product of some rows of a matrix with all normed rows, [places, ROWS] float32.
    The halves of the first iteration's weights are loaded already."""
    dtype: tl.constexpr = rows.x.dtype.element_ty
    step: tl.constexpr = 2 * SLICES * DEPTH
    norms = norms_of(rows, NORM, IS_FIRST, HAS_OFFSET, ROWS, 4 * DEPTH)
    total = tl.zeros((SLICES, places.shape[0], ROWS), tl.float32)
    squares = tl.zeros((SLICES, ROWS, DEPTH), tl.float32)
    for half in tl.static_range(2):
        total, squares = multiply_half(
            total, squares, low if half == 0 else high, rows, elements(0, half, SLICES, DEPTH),
            norms, is_kept, NORM, IS_FIRST, IS_WHOLE, HAS_OFFSET, ROWS,
        )  # fmt: skip
    for start in range(step, rows.k, step):
        for half in tl.static_range(2):
            weight = _load_weights(
                weight_ptr, parameters_ptr, places, is_place, start, rows.k, weight_stride,
                parameters_stride, half, dtype, PACKING, IS_WHOLE, SLICES, DEPTH,
            )  # fmt: skip
            total, squares = multiply_half(
                total, squares, weight, rows, elements(start, half, SLICES, DEPTH),
                norms, is_kept, NORM, IS_FIRST, IS_WHOLE, HAS_OFFSET, ROWS,
            )  # fmt: skip
    product = tl.sum(total, axis=0)
    if NORM is not None and not IS_FIRST:
        mean_square = tl.sum(tl.sum(squares, axis=2), axis=0) / rows.k
        product *= tl.rsqrt(mean_square + rows.eps)[None, :]
    return product


@triton.jit
def _shrink(
    adapters, rows, NORM: tl.constexpr, IS_FIRST: tl.constexpr, HAS_OFFSET: tl.constexpr,
    IS_DEPENDENT: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Multiplies some ranks of A of a row's adapter with the row."""
    dtype: tl.constexpr = rows.x.dtype.element_ty
    row = tl.program_id(0) % rows.num_rows
    ranks = tl.program_id(0) // rows.num_rows * BLOCK_N + tl.arange(0, BLOCK_N)
    place = place_of(adapters, row, True)
    is_rank = (ranks < adapters.num_ranks) & (place >= 0)
    a = adapters.a + place * adapters.a_stride
    low = _load_weights(
        a, a, ranks, is_rank, 0, rows.k, rows.k, 0, 0, dtype, None, False, SLICES, DEPTH
    )
    high = _load_weights(
        a, a, ranks, is_rank, 0, rows.k, rows.k, 0, 1, dtype, None, False, SLICES, DEPTH
    )
    if IS_DEPENDENT:
        gdc_wait()
    product = _multiply_tiles(
        low, high, rows, a, a, ranks, is_rank, rows.k, 0, False,
        NORM, IS_FIRST, None, False, HAS_OFFSET, ROWS, SLICES, DEPTH,
    )  # fmt: skip
    store_shrunk(adapters, product, row, place, ranks, ROWS)
    arrive(adapters.counters)


@triton.jit
def multiply_few_rows(
    out_ptr,
    rows,
    weight_ptr,
    parameters_ptr,
    bias_ptr,
    factors_ptr,
    adapters,
    n,
    out_stride,
    factors_stride,
    weight_stride,
    parameters_stride,
    scale,
    NORM: tl.constexpr,
    IS_FIRST: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    NAME: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    PACKING: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    if IS_DEPENDENT:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if adapters is not None:
        if program < adapters.num_programs:
            if has_adapters(adapters):
                _shrink(
                    adapters, rows, NORM, IS_FIRST, HAS_OFFSET, IS_DEPENDENT, BLOCK_N, ROWS, SLICES,
                    DEPTH,
                )  # fmt: skip
            elif IS_DEPENDENT:
                gdc_wait()
            return
        program -= adapters.num_programs
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    # The rows of the matrix: of a gated product the gates of some columns, then their seconds.
    num_columns: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    own = tl.arange(0, BLOCK_N)
    column = program * num_columns + own % num_columns
    is_place = column < n
    places = (column + own // num_columns * n).to(tl.int64)
    low = _load_weights(
        weight_ptr, parameters_ptr, places, is_place, 0, rows.k, weight_stride, parameters_stride,
        0, dtype, PACKING, IS_WHOLE, SLICES, DEPTH,
    )  # fmt: skip
    high = _load_weights(
        weight_ptr, parameters_ptr, places, is_place, 0, rows.k, weight_stride, parameters_stride,
        1, dtype, PACKING, IS_WHOLE, SLICES, DEPTH,
    )  # fmt: skip
    bias = load_if(HAS_BIAS, bias_ptr + places, is_place)
    if IS_DEPENDENT:
        gdc_wait()

    row, columns = tl.arange(0, ROWS), program * num_columns + tl.arange(0, num_columns)
    targets = out_ptr + row[None, :] * out_stride + columns[:, None]
    is_target = (row < rows.num_rows)[None, :] & (columns < n)[:, None]
    before = load_if(ADDS, targets, is_target)
    places_of_factors = row[None, :] * factors_stride + columns[:, None]
    factors = load_factors(factors_ptr, places_of_factors, is_target)
    product = _multiply_tiles(
        low, high, rows, weight_ptr, parameters_ptr, places, is_place, weight_stride,
        parameters_stride, program == 0, NORM, IS_FIRST, PACKING, IS_WHOLE, HAS_OFFSET, ROWS,
        SLICES, DEPTH,
    )  # fmt: skip
    if HAS_BIAS:
        product += bias[:, None]
    product += added(adapters, places, is_place, rows.num_rows, ROWS)
    up = product
    if IS_GATED:
        halves = tl.reshape(product, [2, num_columns, ROWS])
        product, up = tl.split(tl.permute(halves, (1, 2, 0)))
    result = finished(product, up, 0.0, 0.0, before, scale, dtype, NAME, IS_GATED, ADDS, False)
    result = multiplied(result, factors_ptr, factors, dtype)
    tl.store(targets, result.to(dtype), mask=is_target)
