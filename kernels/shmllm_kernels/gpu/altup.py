"""A residual stream that consists of several (AltUp; Baykal et al., 2023).

The kernels compute the same as `reference.altup`, in float32, and round the results once. The
streams are [streams, rows, width], each of them contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import next_power_of_two, row_warps
from shmllm_kernels.gpu.functions import tanh
from shmllm_kernels.gpu.norm import MAX_DIM

BLOCK = 512
_LEAST_MEAN_SQUARE = tl.constexpr(1e-5)


@triton.jit
def _mixed(routed_ptr, weight_ptr, row, first, factor, NUM: tl.constexpr, PADDED: tl.constexpr):
    """Returns ``weight[first : first + NUM] @ tanh(factor * routed[row])``, and zeros behind."""
    streams = tl.arange(0, PADDED)
    inside = streams < NUM
    routed = tl.load(routed_ptr + row * NUM + streams, mask=inside, other=0.0).to(tl.float32)
    places = weight_ptr + (first + streams[:, None]) * NUM + streams[None, :]
    weight = tl.load(places, mask=inside[:, None] & inside[None, :], other=0.0).to(tl.float32)
    return tl.sum(weight * tanh(factor * routed)[None, :], axis=1)


@triton.jit
def _predict(
    streams_ptr, routed_ptr, weight_ptr, out_ptr, stride, width, factor, active,
    NUM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    streams = tl.arange(0, PADDED)
    own = streams_ptr + row * width + columns
    places = own[None, :] + streams[:, None] * stride
    within = (streams < NUM)[:, None] & inside[None, :]
    before = tl.load(places, mask=within, other=0.0).to(tl.float32)
    tl.debug_barrier()  # a thread may load what another one overwrites
    dtype = out_ptr.dtype.element_ty
    for i in tl.static_range(NUM):
        mixed = _mixed(routed_ptr, weight_ptr, row, i * NUM, factor, NUM, PADDED)
        mixed += tl.where(streams == i, 1.0, 0.0)
        predicted = tl.sum(mixed[:, None] * before, axis=0).to(dtype)
        tl.store(own + i * stride, predicted, mask=inside)
        tl.store(out_ptr + row * width + columns, predicted, mask=inside & (i == active))


@triton.jit
def _correct(
    streams_ptr, x_ptr, routed_ptr, weight_ptr, scale_ptr, stride, width, factor, active,
    NUM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    streams = tl.arange(0, PADDED)
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    places = streams_ptr + row * width + columns[None, :] + streams[:, None] * stride
    within = (streams < NUM)[:, None] & inside[None, :]
    before = tl.load(places, mask=within, other=0.0).to(tl.float32)
    tl.debug_barrier()  # a thread may load what another one overwrites
    mixed = _mixed(routed_ptr, weight_ptr, row, 0, factor, NUM, PADDED) + 1.0
    is_active = (streams == active)[:, None]
    innovation = x - tl.sum(tl.where(is_active, before, 0.0), axis=0)
    after = before + mixed[:, None] * innovation[None, :]
    of_active = tl.sum(tl.where(is_active, after, 0.0), axis=0)
    if scale_ptr is not None:
        of_active *= tl.load(scale_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(places, after.to(x_ptr.dtype.element_ty), mask=within)
    tl.store(x_ptr + row * width + columns, of_active.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _match_magnitude(x_ptr, like_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    like = tl.load(like_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    own = tl.maximum(tl.sum(x * x, axis=0) / width, _LEAST_MEAN_SQUARE)
    matched = x * (tl.sqrt(tl.sum(like * like, axis=0) / width) * tl.rsqrt(own))
    tl.store(out_ptr + row * width + columns, matched.to(out_ptr.dtype.element_ty), mask=inside)


def predict(
    streams: Tensor, routed: Tensor, weight: Tensor, factor: float, active: int, out: Tensor
) -> None:
    """Replaces the streams by ``reference.altup.predict(streams, routed, weight, factor)``, and
    writes the stream `active` of them to ``out``.

    Args:
        streams: [streams, rows, width], of one dtype with all others: float32, float16 or bfloat16.
        routed: [rows, streams], contiguous.
        weight: [streams * streams, streams], contiguous.
        factor: the factor of ``routed``.
        active: a stream.
        out: [rows, width], contiguous.

    One launch a layer: 36 KB for a token of four streams of 2,048 elements in bfloat16.
    """
    count = len(streams)
    assert weight.shape == (count * count, count), "weight: a row for each pair of streams"
    _check(streams, routed, weight, out)
    _predict[_grid(out)](
        streams, routed, weight, out, streams.stride(0), out.shape[1], factor, active,
        NUM=count, PADDED=next_power_of_two(count), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def correct(
    streams: Tensor,
    x: Tensor,
    routed: Tensor,
    weight: Tensor,
    factor: float,
    active: int,
    scale: Tensor | None,
) -> None:
    """Replaces the streams by ``reference.altup.correct(streams, x, routed, weight, factor,
    active)``, and ``x`` by the stream `active` of them, times the scale.

    Args:
        streams: [streams, rows, width], of one dtype with all others: float32, float16 or bfloat16.
        x: [rows, width], contiguous.
        routed: [rows, streams], contiguous.
        weight: [streams, streams], contiguous.
        factor: the factor of ``routed``.
        active: a stream.
        scale: [width], contiguous; None: it is 1.

    One launch a layer: 40 KB for a token of four streams of 2,048 elements in bfloat16.
    """
    count = len(streams)
    assert weight.shape == (count, count), "weight: a row for each stream"
    _check(streams, routed, weight, x)
    _correct[_grid(x)](
        streams, x, routed, weight, scale, streams.stride(0), x.shape[1], factor, active,
        NUM=count, PADDED=next_power_of_two(count), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def match_magnitude(x: Tensor, like: Tensor, out: Tensor) -> None:
    """Writes ``reference.altup.match_magnitude(x, like)`` to ``out``.

    Args:
        x: [rows, width], contiguous.
        like: likewise, x's dtype.
        out: likewise; may be ``x``.

    Two launches a step for each stream but the first.
    """
    assert x.shape == like.shape == out.shape, "all have one shape"
    assert all(each.is_contiguous() for each in (x, like, out)), "all are contiguous"
    assert x.dtype == like.dtype == out.dtype, "all have one dtype"
    rows, width = x.shape
    assert 0 < width <= MAX_DIM, f"rows of {width} elements do not fit into registers"
    if rows:
        block = next_power_of_two(width)
        _match_magnitude[(rows,)](x, like, out, width, BLOCK=block, num_warps=row_warps(width))


def _grid(rows: Tensor) -> tuple[int, int]:
    return len(rows), triton.cdiv(rows.shape[1], BLOCK)


def _check(streams: Tensor, routed: Tensor, weight: Tensor, rows: Tensor) -> None:
    assert streams.shape[1:] == rows.shape, "streams: rows of one width"
    others = routed, weight, rows
    assert all(each.is_contiguous() for each in (streams[0], *others)), "streams are contiguous"
    assert routed.shape == (len(rows), len(streams)), "routed: a number for each row and stream"
    assert {each.dtype for each in others} == {streams.dtype}, "all have one dtype"
