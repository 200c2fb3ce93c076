"""Several residual streams that layers read the weighted sum of (hyper-connections; Zhu et al.,
2024).

The kernels compute the same as `reference.connections`, in float32, and round streams and sums
once. The streams of a row lie side by side, [rows, streams * width]. A row's bits do not depend on
the other rows: of each part of its columns the same number of rows is multiplied at a time, in the
same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.functions import sigmoid

MOST_STREAMS = 8
PART = 1024
"""The columns that a program multiplies."""
ROWS = 2
"""The rows that it multiplies with weights that it has loaded."""
COLUMNS = 128
"""The columns of these that it multiplies at a time."""
BLOCK = 512
"""The columns that a program folds, or adds to."""


class GateNumbers(NamedTuple):
    """The numbers of gates; see `reference.connections.gates_of`."""

    norm_eps: float
    magnitude: float
    eps: float


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    parts_ptr, streams_ptr, weight_ptr, num_rows, width,
    NUM_GATES: tl.constexpr, GATES_PADDED: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    gates = tl.arange(0, GATES_PADDED)
    is_row, is_gate = rows < num_rows, gates < NUM_GATES
    sums = tl.zeros((ROWS, GATES_PADDED, COLUMNS), tl.float32)
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, PART, COLUMNS):
        columns = tl.program_id(1) * PART + begin + tl.arange(0, COLUMNS)
        inside = (columns < width)[None, :]
        places = streams_ptr + rows[:, None] * width + columns[None, :]
        x = tl.load(places, mask=is_row[:, None] & inside, other=0.0).to(tl.float32)
        places = weight_ptr + gates[:, None] * width + columns[None, :]
        weight = tl.load(places, mask=is_gate[:, None] & inside, other=0.0)
        sums += x[:, None, :] * weight[None, :, :]
        squares += x * x
    own = parts_ptr + (rows * tl.num_programs(1) + tl.program_id(1)) * (NUM_GATES + 1)
    is_stored = is_row[:, None] & is_gate[None, :]
    tl.store(own[:, None] + gates[None, :], tl.sum(sums, axis=2), mask=is_stored)
    tl.store(own + NUM_GATES, tl.sum(squares, axis=1), mask=is_row)


@triton.jit
def _fold(
    out_ptr, gates_ptr, streams_ptr, parts_ptr, scale_ptr, bias_ptr, width, num_parts, numbers,
    NUM: tl.constexpr, NUM_GATES: tl.constexpr, GATES_PADDED: tl.constexpr,
    PARTS_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    gates, parts = tl.arange(0, GATES_PADDED), tl.arange(0, PARTS_PADDED)
    is_gate, is_part = gates < NUM_GATES, parts < num_parts
    own = parts_ptr + (row * num_parts + parts) * (NUM_GATES + 1)
    wanted = is_part[:, None] & is_gate[None, :]
    logits = tl.sum(tl.load(own[:, None] + gates[None, :], mask=wanted, other=0.0), axis=0)
    squares = tl.sum(tl.load(own + NUM_GATES, mask=is_part, other=0.0), axis=0)
    logits *= tl.rsqrt(squares / (NUM * width) + numbers.norm_eps)
    scale = tl.load(scale_ptr + gates // NUM, mask=is_gate, other=0.0)
    bias = tl.load(bias_ptr + gates, mask=is_gate, other=0.0)
    magnitude = tl.where(gates < NUM, 1.0, numbers.magnitude)
    opened = sigmoid(logits * scale + bias) * magnitude + numbers.eps
    if tl.program_id(1) == 0:
        tl.store(gates_ptr + row * (2 * NUM) + gates, opened, mask=is_gate)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(NUM):
        place = streams_ptr + (row * NUM + i) * width + columns
        stream = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(tl.where(gates == i, opened, 0.0), axis=0) * stream
    tl.store(out_ptr + row * width + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _spread(streams_ptr, x_ptr, gates_ptr, width, NUM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(NUM):
        place = streams_ptr + (row * NUM + i) * width + columns
        gate = tl.load(gates_ptr + row * (2 * NUM) + NUM + i)
        added = tl.load(place, mask=inside, other=0.0).to(tl.float32) + gate * x
        tl.store(place, added.to(streams_ptr.dtype.element_ty), mask=inside)


def num_parts(width: int) -> int:
    """Returns the number of parts of the product of rows of a width."""
    return -(-width // PART)


def fold(
    out: Tensor,
    gates: Tensor,
    streams: Tensor,
    parts: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    numbers: GateNumbers,
) -> None:
    """Computes ``reference.connections.gates_of`` and ``reference.connections.fold``.

    Args:
        out: [rows, width], contiguous, in the streams' dtype.
        gates: [rows, 2 * streams] float32, contiguous; those behind ``len(bias)`` stay.
        streams: [rows, streams * width], contiguous; float32, float16 or bfloat16. There are at
            most MOST_STREAMS.
        parts: [rows, num_parts(streams * width), at least 2 * streams + 1] float32, contiguous:
            scratch memory, of which a part is used if there are fewer gates.
        weight: [streams or 2 * streams, streams * width] float32, contiguous.
        scale: [1 or 2] float32, contiguous.
        bias: [streams or 2 * streams] float32, contiguous.
        numbers: the numbers of gates.

    Two launches twice a layer. With four streams of 2,816 elements in bfloat16 the first reads 22
    KB for a token, and for two of them 360 KB of weights from the L2 cache; the second reads the
    streams again and writes 5.6 KB.
    """
    (rows, joined), width = streams.shape, out.shape[1]
    count = joined // width
    num_gates, pieces = len(bias), num_parts(joined)
    assert 0 < count <= MOST_STREAMS, "streams: some, but no more than kernels compute"
    assert gates.shape == (rows, 2 * count), "gates: two for each row and stream"
    assert weight.shape == (num_gates, joined), "weight: a row for each gate"
    assert num_gates == len(scale) * count, "scale: one for each kind of gates"
    assert parts.numel() >= rows * pieces * (num_gates + 1), "parts: too few"
    floats = gates, parts, weight, scale, bias
    assert all(each.dtype is torch.float32 for each in floats), "weights and gates are float32"
    assert all(each.is_contiguous() for each in (*floats, out, streams)), "all are contiguous"
    assert out.dtype is streams.dtype, "out has the streams' dtype"
    if rows == 0:
        return
    padded = next_power_of_two(num_gates)
    _multiply[(triton.cdiv(rows, ROWS), pieces)](
        parts, streams, weight, rows, joined, NUM_GATES=num_gates, GATES_PADDED=padded, PART=PART,
        ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    _fold[(rows, triton.cdiv(width, BLOCK))](
        out, gates, streams, parts, scale, bias, width, pieces, numbers, NUM=count,
        NUM_GATES=num_gates, GATES_PADDED=padded, PARTS_PADDED=next_power_of_two(pieces),
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def spread(streams: Tensor, x: Tensor, gates: Tensor) -> None:
    """Replaces the streams by ``reference.connections.spread(streams, x, gates)``.

    Args:
        streams: as of `fold`.
        x: [rows, width], contiguous, in the streams' dtype.
        gates: [rows, 2 * streams] float32, contiguous.

    One launch twice a layer: 51 KB for a token of four streams of 2,816 elements in bfloat16.
    """
    (rows, joined), width = streams.shape, x.shape[1]
    count = joined // width
    assert gates.shape == (rows, 2 * count), "gates: two for each row and stream"
    assert gates.dtype is torch.float32, "gates are float32"
    assert x.dtype is streams.dtype, "x has the streams' dtype"
    assert all(each.is_contiguous() for each in (streams, x, gates)), "all are contiguous"
    if rows:
        grid = rows, triton.cdiv(width, BLOCK)
        _spread[grid](streams, x, gates, width, NUM=count, BLOCK=BLOCK, num_warps=4)
