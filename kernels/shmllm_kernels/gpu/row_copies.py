"""The kernels that copy rows by their indices: embeddings of tokens, and gathered rows.

They compute the same as `reference.step`. Rows of a packed table are unpacked (`unpacking`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.packings import RUN, PackedRows, Rows
from shmllm_kernels.gpu.products import check_rows
from shmllm_kernels.gpu.unpacking import FLAGS, half_run
from shmllm_kernels.reference.step import LearnedRows

BLOCK = 1024
"""The number of elements in a tile."""


@dataclass(frozen=True, slots=True)
class TableShare:
    """The rows of a table that a rank of a group has.

    Attributes:
        first: the index of the first one.
        keeps: whether rows of ``out`` that are embeddings of a prompt stay; else they become 0, so
            that the sum over the ranks has them once.
    """

    first: int
    keeps: bool


@triton.jit
def source_of(indices_ptr, last_tokens_ptr, row, is_row, HAS_SAMPLED: tl.constexpr):
    """Returns the index of each row's source; -1: it has none."""
    index = tl.load(indices_ptr + row, mask=is_row, other=-1)
    if HAS_SAMPLED:
        sampled = tl.load(last_tokens_ptr - 2 - index, mask=index < -1, other=-1)
        index = tl.where(index < -1, sampled, index)
    return index


@triton.jit
def place_of(index, first, IS_SHARE: tl.constexpr):
    """Returns the row of an index in a table whose first row has the index `first`."""
    return tl.where(index < 0, -1, index - first) if IS_SHARE else index


@triton.jit
def _learned(table_ptr, indices_ptr, stride, row, column, is_row, is_inside):
    """Returns the learned rows of a tile, float32."""
    index = tl.load(indices_ptr + row, mask=is_row, other=0)
    return tl.load(table_ptr + index * stride + column, mask=is_inside, other=0.0).to(tl.float32)


@triton.jit
def _store(
    out,
    values,
    index,
    found,
    row,
    column,
    is_row,
    is_inside,
    scale,
    one_ptr,
    one_indices_ptr,
    one_stride,
    other_ptr,
    other_indices_ptr,
    other_stride,
    HAS_SCALE: tl.constexpr,
    NUM_LEARNED: tl.constexpr,
    IS_SHARE: tl.constexpr,
    KEEPS: tl.constexpr,
):
    """Stores a tile of rows that were found, scaled, plus what is added to these and to those of
    the index -1. With a share of the table the other rows become 0."""
    if IS_SHARE:
        values = tl.where(found, values, 0.0)
        found = (index != -1) | (not KEEPS)
    if HAS_SCALE:
        values = (values.to(tl.float32) * scale).to(values.dtype)
    mask = is_inside & found
    if NUM_LEARNED > 0:
        given = tl.load(out, mask=is_inside & (index == -1), other=0.0)
        total = tl.where(index == -1, given, values).to(tl.float32)
        total += _learned(one_ptr, one_indices_ptr, one_stride, row, column, is_row, is_inside)
        if NUM_LEARNED > 1:
            total += _learned(
                other_ptr, other_indices_ptr, other_stride, row, column, is_row, is_inside
            )
        values = total.to(values.dtype)
        mask = is_inside & (found | (index == -1))
    tl.store(out, values, mask=mask)


@triton.jit(do_not_specialize=["count", "num_rows", "first"])
def _copy_rows(
    out_ptr,
    source_ptr,
    indices_ptr,
    last_tokens_ptr,
    one_ptr,
    one_indices_ptr,
    one_stride,
    other_ptr,
    other_indices_ptr,
    other_stride,
    count,
    num_rows,
    dim,
    out_stride,
    scale,
    first,
    source_stride,
    HAS_SAMPLED: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    NUM_LEARNED: tl.constexpr,
    IS_SHARE: tl.constexpr,
    KEEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    index = source_of(indices_ptr, last_tokens_ptr, row, row < count, HAS_SAMPLED)
    place = place_of(index, first, IS_SHARE)
    found = (place >= 0) & (place < num_rows)
    is_inside = (row < count) & (column < dim)
    source = source_ptr + place * source_stride + column
    values = tl.load(source, mask=is_inside & found, other=0.0)
    _store(
        out_ptr + row * out_stride + column, values, index, found, row, column, row < count,
        is_inside, scale, one_ptr, one_indices_ptr, one_stride, other_ptr,
        other_indices_ptr, other_stride, HAS_SCALE, NUM_LEARNED, IS_SHARE, KEEPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "num_rows", "first"])
def _unpack_rows(
    out_ptr,
    codes_ptr,
    indices_ptr,
    last_tokens_ptr,
    one_ptr,
    one_indices_ptr,
    one_stride,
    other_ptr,
    other_indices_ptr,
    other_stride,
    count,
    num_rows,
    dim,
    out_stride,
    scale,
    first,
    parameters_ptr,
    codes_stride,
    parameters_stride,
    HAS_SAMPLED: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    NUM_LEARNED: tl.constexpr,
    IS_SHARE: tl.constexpr,
    KEEPS: tl.constexpr,
    PACKING: tl.constexpr,
    RUNS: tl.constexpr,
):
    """A program unpacks RUNS runs of a row."""
    row = tl.program_id(0).to(tl.int64)
    index = source_of(indices_ptr, last_tokens_ptr, row, row < count, HAS_SAMPLED)
    place = place_of(index, first, IS_SHARE)
    found = (place >= 0) & (place < num_rows)
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    is_there = found & (run * 64 < dim)
    source = place + tl.zeros((RUNS,), tl.int64)
    code_rows = codes_ptr + source * codes_stride
    parameter_rows = parameters_ptr + source * parameters_stride
    for half in tl.static_range(2):
        values = half_run(code_rows, parameter_rows, run, is_there, dim, half, PACKING)
        column = run[None, :] * 64 + half * 32 + tl.arange(0, 32)[:, None]
        _store(
            out_ptr + row * out_stride + column, values.to(out_ptr.dtype.element_ty), index, found,
            row, column, row < count, column < dim, scale, one_ptr, one_indices_ptr,
            one_stride, other_ptr, other_indices_ptr, other_stride, HAS_SCALE, NUM_LEARNED,
            IS_SHARE, KEEPS,
        )  # fmt: skip


def embed(
    out: Tensor,
    table: Rows,
    token_ids: Tensor,
    last_tokens: Tensor,
    scale: float = 1.0,
    learned: Sequence[LearnedRows] = (),
    share: TableShare | None = None,
) -> None:
    """Writes the embeddings of a step's tokens, multiplied by a factor, plus learned ones. The sum
    is float32 and rounded once.

    Args:
        out: [tokens, hidden], each row contiguous, with any stride between rows.
        table: [vocab, hidden], out's dtype, rows as those of ``out``; or packed, and the values are
            rounded to out's dtype first.
        token_ids: [tokens] int64: an index of the table, or ``-2 - row`` for the token that was
            last sampled for that row. -1: the row of ``out`` is an embedding that a prompt gave,
            and only learned ones are added. Ids that are not in the table leave the row unchanged.
        last_tokens: [rows] int64, the token that was last sampled for each row.
        scale: the factor, applied in float32.
        learned: the embeddings of positions, of token types, or of both.
        share: which rows of a larger table ``table`` has, and ids that it does not have give rows
            of 0; None: all.

    Moves 2 * tokens * hidden elements, 16 KiB for a row of 4,096. One launch a step: 2 us for one
    token, 31 us for 8,192.
    """
    assert last_tokens.dtype is torch.int64, "last_tokens are int64"
    assert last_tokens.stride(0) == 1, "last_tokens must be contiguous"
    assert len(learned) <= 2, "a kernel adds two learned rows"
    for each in learned:
        _check_indices(each.indices, len(out))
        assert each.table.shape[1:] == out.shape[1:], "rows of out and learned differ in length"
        assert each.table.dtype is out.dtype, "out must have the dtype of learned tables"
        assert each.table.stride(1) == 1, "rows must be contiguous"
    _launch(out, table, token_ids, last_tokens, scale, learned, share)


def gather_rows(out: Tensor, source: Tensor, indices: Tensor) -> None:
    """Writes ``out[i] = source[indices[i]]``.

    Args:
        out: [count, dim], each row contiguous, with any stride between rows; must not overlap
            ``source``.
        source: [rows, dim], out's dtype, rows as those of ``out``.
        indices: [count] int64; -1 and indices that are not in ``source`` leave the row of ``out``
            unchanged.

    Moves 2 * count * dim elements, 16 KiB for a row of 4,096. One launch a step: 2 us for one row,
    3 us for 256.
    """
    _launch(out, source, indices, None, 1.0, ())


def _launch(
    out: Tensor,
    source: Rows,
    indices: Tensor,
    last_tokens: Tensor | None,
    scale: float,
    learned: Sequence[LearnedRows],
    share: TableShare | None = None,
) -> None:
    count, dim = out.shape
    assert source.shape[1:] == (dim,), "rows of out and source differ in length"
    assert out.stride(1) == 1, "rows must be contiguous"
    _check_indices(indices, count)
    if count == 0 or dim == 0:
        return
    one, other = (*learned, *[LearnedRows(out, indices)] * (2 - len(learned)))
    operands = [
        indices,
        indices if last_tokens is None else last_tokens,
        *(one.table, one.indices, one.table.stride(0)),
        *(other.table, other.indices, other.table.stride(0)),
        count,
        source.shape[0],
        dim,
        out.stride(0),
        scale,
        0 if share is None else share.first,
    ]
    flags = {
        "HAS_SAMPLED": last_tokens is not None,
        "HAS_SCALE": scale != 1,
        "NUM_LEARNED": len(learned),
        "IS_SHARE": share is not None,
        "KEEPS": share is None or share.keeps,
    }
    if isinstance(source, PackedRows):
        _launch_packed(out, source, operands, flags)
        return
    assert source.dtype is out.dtype, "out must have the dtype of source"
    assert source.stride(1) == 1, "rows must be contiguous"
    columns = min(next_power_of_two(dim), BLOCK)
    rows = BLOCK // columns
    grid = triton.cdiv(count, rows), triton.cdiv(dim, columns)
    _copy_rows[grid](out, source, *operands, source.stride(0), **flags, ROWS=rows, COLUMNS=columns)


def _launch_packed(
    out: Tensor, source: PackedRows, operands: list[Any], flags: dict[str, int]
) -> None:
    codes, parameters = source.codes, source.parameters
    check_rows(source)
    count, dim = out.shape
    runs = min(next_power_of_two(triton.cdiv(dim, RUN)), BLOCK // RUN)
    _unpack_rows[(count, triton.cdiv(dim, runs * RUN))](
        out,
        codes,
        *operands,
        parameters,
        codes.stride(0),
        parameters.stride(0),
        **flags,
        PACKING=source.packing,
        RUNS=runs,
        **FLAGS,
    )


def _check_indices(numbers: Tensor, count: int) -> None:
    assert numbers.shape == (count,), "one number for each row"
    assert numbers.dtype is torch.int64, "numbers are int64"
    assert numbers.stride(0) == 1 or count < 2, "numbers must be contiguous"
