"""A gated short convolution for the tokens of a step.

`reference.convolution` has the formula. One program computes some channels of at most ROWS tokens
of a request, one after the other: a long prompt has many programs, which read the inputs before
their first token from the step's own rows. A request's first program alone reads and writes its
states, because a state may lie where the one before it was.

A dependent launch (from compute capability 9.0 on) loads weights and states before it waits for the
launch before, which is the projection: no launch of the step but this one changes them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shmllm_kernels.gpu.convolution import (
    CHANNELS,
    MOST_TAPS,
    Window,
    load_channels,
    store_window,
    weighted_sum,
)
from shmllm_kernels.gpu.states import Requests, is_kept, own_states, state_behind

ROWS = 32
"""The most tokens of a program."""


@triton.jit
def _gated_input(x_ptr, x_stride, own, token, of, channels):
    """Returns the product of a token's input gates and inputs, rounded to their dtype, in
    float32."""
    row = x_ptr + (own.first + token).to(tl.int64) * x_stride + of.columns
    gate = tl.load(row, mask=of.inside, other=0.0).to(tl.float32)
    value = tl.load(row + 2 * channels, mask=of.inside, other=0.0).to(tl.float32)
    return (gate * value).to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _window_before(x_ptr, x_stride, own, token, of, channels):
    """Returns the `Window` before a token that has at least three of the step before it."""
    a = _gated_input(x_ptr, x_stride, own, token - 3, of, channels)
    b = _gated_input(x_ptr, x_stride, own, token - 2, of, channels)
    c = _gated_input(x_ptr, x_stride, own, token - 1, of, channels)
    return Window(a, b, c)


@triton.jit
def _store_windows_behind(x_ptr, x_stride, own, first, of, channels, TAPS: tl.constexpr):
    """Stores the states that are kept behind the tokens from ``first``, at least the third, on."""
    last = own.count - 1
    for block in range(own.start // own.interval, (own.start + last) // own.interval + 1):
        token = tl.minimum((block + 1) * own.interval - 1 - own.start, last)
        if token >= first:
            window = _window_before(x_ptr, x_stride, own, token + 1, of, channels)
            store_window(state_behind(own, token), window, of, channels, TAPS)


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
    of = load_channels(weights_ptr, bias_ptr, own, columns, inside, channels, TAPS, HAS_BIAS)
    if IS_DEPENDENT:
        gdc_wait()

    dtype: tl.constexpr = x_ptr.dtype.element_ty
    window = of.before
    if first > 0:
        window = _window_before(x_ptr, x_stride, own, first, of, channels)
    for token in range(first, tl.minimum(first + MOST, own.count)):
        x = _gated_input(x_ptr, x_stride, own, token, of, channels)
        total = weighted_sum(x, window, of.taps).to(dtype).to(tl.float32)
        window = Window(window.b, window.c, x)
        index = (own.first + token).to(tl.int64)
        gate = tl.load(x_ptr + index * x_stride + channels + columns, mask=inside, other=0.0)
        out = total * gate.to(tl.float32)
        tl.store(out_ptr + index * out_stride + columns, out.to(dtype), mask=inside)
        if (first == 0) & is_kept(own, token):
            store_window(state_behind(own, token), window, of, channels, TAPS)
    if first == 0:
        _store_windows_behind(x_ptr, x_stride, own, MOST, of, channels, TAPS)


def short_convolution(
    out: Tensor,
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    states: Tensor,
    requests: Requests,
    most_tokens: int,
    is_dependent: bool = False,
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

    One launch a layer, a program for each request, CHANNELS channels and ROWS tokens. With 2,048
    channels and three taps in bfloat16, one decode moves 0.05 MB: 2 us, the launch. 256 decodes
    move 13 MB: 3 us at 4.26 TB/s. A prompt of 8,192 tokens moves 134 MB, 32 us, in 4,096 programs;
    each loads a token when it has stored the one before, 32 times 0.7 us, and most are resident
    together.
    """
    taps, channels = weights.shape
    num_requests = len(requests.context_lens)
    assert 2 <= taps <= MOST_TAPS
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
        TAPS=taps, HAS_BIAS=bias is not None, IS_DEPENDENT=is_dependent, MOST=ROWS,
        BLOCK=CHANNELS, num_warps=1, **({"launch_pdl": True} if is_dependent else {}),
    )  # fmt: skip
