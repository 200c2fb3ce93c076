"""Several residual streams that layers read the weighted sum of (hyper-connections; Zhu et al.,
2024), and mix (Xie et al., 2026).

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
    """The numbers of gates; see `reference.connections.gates_of`. eps_of_added is that of the
    second kind."""

    norm_eps: float
    magnitude: float
    eps: float
    eps_of_added: float


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
def _mixture_of(
    own_ptr, scale_ptr, bias_ptr, num_parts, factor, eps,
    NUM: tl.constexpr, NUM_GATES: tl.constexpr, NUM_PADDED: tl.constexpr,
    PARTS_PADDED: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Returns the mixture of a row's streams, zeros around it, and where its elements are."""
    parts, lines = tl.arange(0, PARTS_PADDED), tl.arange(0, NUM_PADDED)
    is_inside = (lines < NUM)[:, None] & (lines < NUM)[None, :]
    places = 2 * NUM + lines[:, None] * NUM + lines[None, :]
    wanted = (parts < num_parts)[:, None, None] & is_inside[None, :, :]
    of_parts = own_ptr + (parts * (NUM_GATES + 1))[:, None, None] + places[None, :, :]
    logits = tl.sum(tl.load(of_parts, mask=wanted, other=0.0), axis=0)
    bias = tl.load(bias_ptr + places, mask=is_inside, other=0.0)
    logits = tl.where(is_inside, logits * factor * tl.load(scale_ptr + 2) + bias, float("-inf"))
    largest = tl.where(lines < NUM, tl.max(logits, axis=1), 0.0)
    shares = tl.where(is_inside, tl.exp(logits - largest[:, None]), 0.0)
    mixture = shares / tl.where(lines < NUM, tl.sum(shares, axis=1), 1.0)[:, None]
    mixture = tl.where(is_inside, mixture + eps, 0.0)
    floor = tl.where(lines < NUM, eps, 1.0)  # of lines that are zeros, too
    mixture /= (tl.sum(mixture, axis=0) + floor)[None, :]
    for _ in range(ITERATIONS - 1):
        mixture /= (tl.sum(mixture, axis=1) + floor)[:, None]
        mixture /= (tl.sum(mixture, axis=0) + floor)[None, :]
    return mixture, places, is_inside


@triton.jit
def _fold(
    out_ptr, gates_ptr, streams_ptr, parts_ptr, scale_ptr, bias_ptr, width, num_parts, stride,
    numbers,
    NUM: tl.constexpr, NUM_PADDED: tl.constexpr, NUM_GATES: tl.constexpr,
    GATES_PADDED: tl.constexpr, PARTS_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    ITERATIONS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    gates, parts = tl.arange(0, GATES_PADDED), tl.arange(0, PARTS_PADDED)
    is_gate, is_part = gates < min(NUM_GATES, 2 * NUM), parts < num_parts
    own = parts_ptr + (row * num_parts + parts) * (NUM_GATES + 1)
    wanted = is_part[:, None] & is_gate[None, :]
    logits = tl.sum(tl.load(own[:, None] + gates[None, :], mask=wanted, other=0.0), axis=0)
    squares = tl.sum(tl.load(own + NUM_GATES, mask=is_part, other=0.0), axis=0)
    factor = tl.rsqrt(squares / (NUM * width) + numbers.norm_eps)
    logits *= factor
    scale = tl.load(scale_ptr + gates // NUM, mask=is_gate, other=0.0)
    bias = tl.load(bias_ptr + gates, mask=is_gate, other=0.0)
    magnitude = tl.where(gates < NUM, 1.0, numbers.magnitude)
    eps = tl.where(gates < NUM, numbers.eps, numbers.eps_of_added)
    opened = sigmoid(logits * scale + bias) * magnitude + eps
    if tl.program_id(1) == 0:
        tl.store(gates_ptr + row * stride + gates, opened, mask=is_gate)
        if NUM_GATES > 2 * NUM:
            mixture, places, is_inside = _mixture_of(
                parts_ptr + row * num_parts * (NUM_GATES + 1), scale_ptr, bias_ptr, num_parts,
                factor, numbers.eps, NUM, NUM_GATES, NUM_PADDED, PARTS_PADDED, ITERATIONS,
            )  # fmt: skip
            tl.store(gates_ptr + row * stride + places, mixture, mask=is_inside)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(NUM):
        place = streams_ptr + (row * NUM + i) * width + columns
        stream = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(tl.where(gates == i, opened, 0.0), axis=0) * stream
    tl.store(out_ptr + row * width + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _spread(
    streams_ptr, x_ptr, gates_ptr, width, stride,
    NUM: tl.constexpr, NUM_PADDED: tl.constexpr, MIXES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    gates_ptr += row * stride
    lines = tl.arange(0, NUM_PADDED)
    is_stream, first = lines < NUM, streams_ptr + row * NUM * width
    if MIXES:  # all are read before any is written
        places = first + lines[:, None] * width + columns[None, :]
        every = tl.load(places, mask=is_stream[:, None] & inside[None, :], other=0.0).to(tl.float32)
    for i in tl.static_range(NUM):
        place = first + i * width + columns
        gate = tl.load(gates_ptr + NUM + i)
        if MIXES:
            shares = tl.load(gates_ptr + 2 * NUM + lines * NUM + i, mask=is_stream, other=0.0)
            own = tl.sum(shares[:, None] * every, axis=0)
        else:
            own = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, (own + gate * x).to(streams_ptr.dtype.element_ty), mask=inside)


def _shapes(rows: int, count: int) -> list[tuple[int, int]]:
    return [(rows, 2 * count), (rows, (2 + count) * count)]


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
    iterations: int = 0,
) -> None:
    """Computes ``reference.connections.gates_of``, ``reference.connections.fold`` and, if there is
    a mixture, ``reference.connections.mixture_of``.

    Args:
        out: [rows, width], contiguous, in the streams' dtype.
        gates: [rows, 2 * streams, or with a mixture (2 + streams) * streams] float32, contiguous,
            the mixture behind the gates; those behind ``len(bias)`` stay.
        streams: [rows, streams * width], contiguous; float32, float16 or bfloat16. There are at
            most MOST_STREAMS.
        parts: [rows, num_parts(streams * width), at least len(bias) + 1] float32, contiguous:
            scratch memory, of which a part is used if there are fewer gates.
        weight: [streams, 2 * streams or all gates, streams * width] float32, contiguous.
        scale: [1, 2 or 3] float32, contiguous.
        bias: [streams, 2 * streams or all gates] float32, contiguous.
        numbers: the numbers of gates.
        iterations: how often the columns of the mixture are normalised; 0: there is none.

    Two launches twice a layer. With four streams of 2,816 elements in bfloat16 the first reads 22
    KB for a token, and for two of them 360 KB of weights from the L2 cache; the second reads the
    streams again and writes 5.6 KB.
    """
    (rows, joined), width = streams.shape, out.shape[1]
    count = joined // width
    num_gates, pieces = len(bias), num_parts(joined)
    assert 0 < count <= MOST_STREAMS, "streams: some, but no more than kernels compute"
    assert gates.shape in _shapes(rows, count), "gates: two for each row and stream, or a mixture"
    assert weight.shape == (num_gates, joined), "weight: a row for each gate"
    mixes = num_gates > 2 * count
    assert not mixes or iterations, "iterations: some, if there is a mixture"
    of_kinds = [count, 2 * count, gates.shape[1]]
    assert num_gates == of_kinds[len(scale) - 1], "scale: one for each kind of gates"
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
        out, gates, streams, parts, scale, bias, width, pieces, gates.shape[1], numbers, NUM=count,
        NUM_PADDED=next_power_of_two(count), NUM_GATES=num_gates, GATES_PADDED=padded,
        PARTS_PADDED=next_power_of_two(pieces), BLOCK=BLOCK, ITERATIONS=iterations if mixes else 0,
        num_warps=4,
    )  # fmt: skip


def spread(streams: Tensor, x: Tensor, gates: Tensor) -> None:
    """Replaces the streams by ``reference.connections.spread(streams, x, gates)``, with the mixture
    that is behind the gates, if there is one.

    Args:
        streams: as of `fold`.
        x: [rows, width], contiguous, in the streams' dtype.
        gates: as of `fold`.

    One launch twice a layer: 51 KB for a token of four streams of 2,816 elements in bfloat16.
    """
    (rows, joined), width = streams.shape, x.shape[1]
    count = joined // width
    assert gates.shape in _shapes(rows, count), "gates: two for each row and stream, or a mixture"
    assert gates.dtype is torch.float32, "gates are float32"
    assert x.dtype is streams.dtype, "x has the streams' dtype"
    assert all(each.is_contiguous() for each in (streams, x, gates)), "all are contiguous"
    if rows:
        grid = rows, triton.cdiv(width, BLOCK)
        _spread[grid](
            streams, x, gates, width, gates.shape[1], NUM=count,
            NUM_PADDED=next_power_of_two(count), MIXES=gates.shape[1] > 2 * count, BLOCK=BLOCK,
            num_warps=4,
        )  # fmt: skip
