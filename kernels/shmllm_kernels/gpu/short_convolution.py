"""A gated short convolution for the tokens of a step.

`reference.convolution` has the formula. One program computes some channels of at most ROWS tokens
of a request, one after the other: a long prompt has many programs, which read the inputs before
their first token from the step's own rows. A request's first program alone reads and writes its
states, because a state may lie where the one before it was.

A dependent launch (from compute capability 9.0 on) loads weights and states before it waits for the
launch before, which is the projection: no launch of the step but this one changes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shmllm_kernels.gpu.convolution import CHANNELS
from shmllm_kernels.gpu.states import Requests, is_kept, own_states, state_before, state_behind

ROWS = 32
"""The most tokens of a program, at least as many as a convolution reads before one."""
MOST_TAPS = 8


class Channels(NamedTuple):
    """Some channels of a request.

    Attributes:
        columns: where they are in a row.
        inside: which of these there are.
    """

    columns: Any
    inside: Any


@triton.jit
def _load_rows(rows_ptr, of, channels, COUNT: tl.constexpr):
    """Returns some channels of so many rows, float32, as a tuple."""
    rows = ()
    for row in tl.static_range(COUNT):
        x = tl.load(rows_ptr + row * channels + of.columns, mask=of.inside, other=0.0)
        rows += (x.to(tl.float32),)  # type: ignore[assignment]
    return rows


@triton.jit
def _store_rows(rows_ptr, rows, of, channels):
    """Stores some channels of rows."""
    for row in tl.static_range(len(rows)):
        tl.store(rows_ptr + row * channels + of.columns, rows[row], mask=of.inside)


@triton.jit
def _gated_input(x_ptr, x_stride, own, token, of, channels):
    """Returns the product of a token's input gates and inputs, rounded to their dtype, in float32;
    zeros if the request has no such token in the step."""
    inside = of.inside & (token >= 0) & (token < own.count)
    row = x_ptr + (own.first + token).to(tl.int64) * x_stride + of.columns
    gate = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(row + 2 * channels, mask=inside, other=0.0).to(tl.float32)
    return (gate * value).to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _window_before(x_ptr, x_stride, own, token, of, channels, COUNT: tl.constexpr):
    """Returns the gated inputs of so many tokens before one, all of the step, as a tuple, the
    oldest first."""
    window = ()
    for before in tl.static_range(COUNT):
        x = _gated_input(x_ptr, x_stride, own, token - COUNT + before, of, channels)
        window += (x,)  # type: ignore[assignment]
    return window


@triton.jit
def _store_windows_behind(x_ptr, x_stride, own, first, of, channels, COUNT: tl.constexpr):
    """Stores the states that are kept behind the tokens from ``first`` on, which have COUNT - 1
    others of the step before them."""
    last = own.count - 1
    for block in range(own.start // own.interval, (own.start + last) // own.interval + 1):
        token = tl.minimum((block + 1) * own.interval - 1 - own.start, last)
        if token >= first:
            window = _window_before(x_ptr, x_stride, own, token + 1, of, channels, COUNT)
            _store_rows(state_behind(own, token), window, of, channels)


@triton.jit
def _weighted_sum(rows, weights, bias):
    """Returns the sum of rows times weights, both tuples, added to a bias in their order."""
    total = bias
    for row in tl.static_range(len(rows)):
        total += rows[row] * weights[row]
    return total


@triton.jit
def _short_convolution(
    x_ptr,
    weights_ptr,
    bias_ptr,
    states_ptr,
    out_ptr,
    starts_ptr,
    context_ptr,
    table_ptr,
    x_stride,
    state_stride,
    out_stride,
    table_stride,
    interval,
    channels,
    TAPS: tl.constexpr,
    AHEAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request, first = tl.program_id(0), tl.program_id(2) * MOST
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < channels
    if IS_DEPENDENT:
        gdc_launch_dependents()
    own = own_states(
        request, states_ptr, starts_ptr, context_ptr, table_ptr, state_stride, table_stride,
        interval,
    )  # fmt: skip
    if own.count <= first:
        if IS_DEPENDENT:
            gdc_wait()
        return
    of = Channels(columns, inside)
    taps = _load_rows(weights_ptr, of, channels, TAPS)
    bias = tl.zeros(columns.shape, tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + columns, mask=inside, other=0.0)
    before = Channels(columns, inside & (own.start > 0))
    window = _load_rows(state_before(own), before, channels, TAPS - 1)
    if IS_DEPENDENT:
        gdc_wait()

    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if first + AHEAD > 0:
        window = _window_before(x_ptr, x_stride, own, first + AHEAD, of, channels, TAPS - 1)
    for token in range(first, tl.minimum(first + MOST, own.count)):
        x = _gated_input(x_ptr, x_stride, own, token + AHEAD, of, channels)
        window += (x,)
        total = _weighted_sum(window, taps, bias).to(dtype).to(tl.float32)
        window = window[1:]
        index = (own.first + token).to(tl.int64)
        gate = tl.load(x_ptr + index * x_stride + channels + columns, mask=inside, other=0.0)
        out = total * gate.to(tl.float32)
        tl.store(out_ptr + index * out_stride + columns, out.to(dtype), mask=inside)
        if (AHEAD == 0) & (first == 0) & is_kept(own, token):
            _store_rows(state_behind(own, token), window, of, channels)
    if (AHEAD == 0) & (first == 0):
        _store_windows_behind(x_ptr, x_stride, own, MOST, of, channels, TAPS - 1)


def short_convolution(
    out: Tensor,
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    states: Tensor,
    requests: Requests,
    most_tokens: int,
    is_dependent: bool = False,
    ahead: int = 0,
) -> None:
    """Writes the outputs of ``reference.convolution.convolve_gated`` for each request.

    Args:
        out: [tokens, channels], x's dtype, each row contiguous.
        x: [tokens, 3 * channels], input gates, output gates and inputs, each row contiguous:
            float32, float16 or bfloat16.
        weights: [taps, channels], contiguous, x's dtype.
        bias: [channels], x's dtype, or None.
        states: [blocks, (taps - 1) * channels] float32, with any stride between blocks.
        requests: the requests.
        most_tokens: no request has more tokens in the step.
        is_dependent: see `few_delta_net.run_delta_net`.
        ahead: how many tokens behind its own a convolution reads. If there are any, the outputs are
            those of ``convolve_gated_ahead``, all tokens of a request are in the step, and states
            stay as they are.

    One launch a layer, a program for each request, CHANNELS channels and ROWS tokens. With 2,048
    channels and three taps in bfloat16, one decode moves 0.05 MB: 2 us, the launch. 256 decodes
    move 13 MB: 3 us at 4.26 TB/s. A prompt of 8,192 tokens moves 134 MB, 32 us, in 4,096 programs;
    each loads a token when it has stored the one before, 32 times 0.7 us, and most are resident
    together.
    """
    taps, channels = weights.shape
    num_requests = len(requests.context_lens)
    assert 2 <= taps <= min(MOST_TAPS, ROWS + 1)
    assert 0 <= ahead < taps
    assert x.shape[1] == 3 * channels, "x: what the projection returns"
    assert out.shape == (len(x), channels), "out: a row for each token"
    assert x.stride(1) == out.stride(1) == 1, "rows must be contiguous"
    if num_requests == 0:
        return
    grid = num_requests, triton.cdiv(channels, CHANNELS), triton.cdiv(most_tokens, ROWS)
    _short_convolution[grid](
        x, weights, x if bias is None else bias, states, out,
        requests.query_starts, requests.context_lens, requests.block_table,
        x.stride(0), states.stride(0), out.stride(0), requests.block_table.stride(0),
        requests.interval, channels,
        TAPS=taps, AHEAD=ahead, HAS_BIAS=bias is not None, IS_DEPENDENT=is_dependent,
        MOST=ROWS, BLOCK=CHANNELS, num_warps=1, **({"launch_pdl": True} if is_dependent else {}),
    )  # fmt: skip
