"""The causal convolution of each channel before a recurrent layer, for the tokens of a step.

`reference.convolution` has the formula. One program computes some channels of all tokens of a
request in the step, one after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.states import Requests, is_kept, own_states, state_before, state_behind

MOST_TAPS = 4
CHANNELS = 128
"""The channels of a program."""


class Taps(NamedTuple):
    """The weights of some channels, float32, 0 for taps that do not exist.

    Attributes:
        a, b, c: those of the three tokens before, the oldest first.
        newest: that of the token itself.
        bias: the bias, or 0.
    """

    a: Any
    b: Any
    c: Any
    newest: Any
    bias: Any


class Window(NamedTuple):
    """The inputs of some channels of the three tokens before one, float32, the oldest first; 0 for
    tokens that do not exist."""

    a: Any
    b: Any
    c: Any


class Channels(NamedTuple):
    """Some channels of a request.

    Attributes:
        columns: where they are in a row.
        inside: which of these there are.
        taps: their `Taps`.
        before: the `Window` before the request's first token in the step.
    """

    columns: Any
    inside: Any
    taps: Any
    before: Any


@triton.jit
def load_taps(
    weights_ptr, bias_ptr, columns, inside, channels, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Returns the `Taps` of some channels. The weights are [TAPS, channels]."""
    newest = tl.load(weights_ptr + (TAPS - 1) * channels + columns, mask=inside, other=0.0)
    c = tl.load(weights_ptr + (TAPS - 2) * channels + columns, mask=inside, other=0.0)
    b = tl.load(weights_ptr + (TAPS - 3) * channels + columns, mask=inside & (TAPS > 2), other=0.0)
    a = tl.load(weights_ptr + columns, mask=inside & (TAPS > 3), other=0.0)
    bias = tl.zeros(columns.shape, tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + columns, mask=inside, other=0.0)
    return Taps(a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), newest.to(tl.float32), bias)


@triton.jit
def _load_window(state_ptr, columns, inside, channels, TAPS: tl.constexpr):
    """Returns the `Window` that a state has of some channels."""
    c = tl.load(state_ptr + (TAPS - 2) * channels + columns, mask=inside, other=0.0)
    b = tl.load(state_ptr + (TAPS - 3) * channels + columns, mask=inside & (TAPS > 2), other=0.0)
    a = tl.load(state_ptr + columns, mask=inside & (TAPS > 3), other=0.0)
    return Window(a, b, c)


@triton.jit
def store_window(state_ptr, window, of, channels, TAPS: tl.constexpr):
    """Stores a `Window` of some `Channels`."""
    columns, inside = of.columns, of.inside
    tl.store(state_ptr + (TAPS - 2) * channels + columns, window.c, mask=inside)
    tl.store(state_ptr + (TAPS - 3) * channels + columns, window.b, mask=inside & (TAPS > 2))
    tl.store(state_ptr + columns, window.a, mask=inside & (TAPS > 3))


@triton.jit
def load_channels(
    weights_ptr, bias_ptr, own, columns, inside, channels,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Returns the `Channels` of some columns, of which the states of a request have ``channels`` at
    their beginning."""
    taps = load_taps(weights_ptr, bias_ptr, columns, inside, channels, TAPS, HAS_BIAS)
    before = _load_window(state_before(own), columns, inside & (own.start > 0), channels, TAPS)
    return Channels(columns, inside, taps, before)


@triton.jit
def load_inputs(row, of):
    """Returns a token's inputs of some `Channels`, float32. ``row`` is a pointer to all of its
    channels."""
    return tl.load(row + of.columns, mask=of.inside, other=0.0).to(tl.float32)


@triton.jit
def weighted_sum(x, window, taps):
    """Returns the convolution of inputs behind a `Window`."""
    return taps.bias + window.a * taps.a + window.b * taps.b + window.c * taps.c + x * taps.newest


@triton.jit
def convolved(x, window, taps, dtype: tl.constexpr):
    """Returns ``silu`` of the convolution of inputs behind a `Window`, rounded to the dtype, in
    float32."""
    total = weighted_sum(x, window, taps)
    out = total / (1.0 + tl.exp(-total))
    return out.to(dtype).to(tl.float32)


@triton.jit
def convolve_next(x, window, of, dtype: tl.constexpr):
    """Returns ``silu`` of the convolution of a token's channels, rounded to the dtype, in float32,
    and the `Window` behind it.

    Args:
        x: the inputs of the token.
        window: the `Window` before it.
        of: the `Channels`.
    """
    return convolved(x, window, of.taps, dtype), Window(window.b, window.c, x)


@triton.jit
def store_windows(x_ptr, x_stride, of, own, channels, TAPS: tl.constexpr):
    """Stores the inputs of some `Channels` wherever a request's states are kept."""
    window = of.before
    for token in range(own.count):
        x = load_inputs(x_ptr + (own.first + token).to(tl.int64) * x_stride, of)
        window = Window(window.b, window.c, x)
        if is_kept(own, token):
            store_window(state_behind(own, token), window, of, channels, TAPS)


@triton.jit
def _convolve(
    x_ptr,
    weights_ptr,
    bias_ptr,
    states_ptr,
    starts_ptr,
    context_ptr,
    table_ptr,
    x_stride,
    state_stride,
    table_stride,
    interval,
    channels,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < channels
    own = own_states(
        request, states_ptr, starts_ptr, context_ptr, table_ptr, state_stride, table_stride,
        interval,
    )  # fmt: skip
    if own.count <= 0:
        return
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    of = load_channels(weights_ptr, bias_ptr, own, columns, inside, channels, TAPS, HAS_BIAS)
    window = of.before
    for token in range(own.count):
        row = x_ptr + (own.first + token).to(tl.int64) * x_stride
        out, window = convolve_next(load_inputs(row, of), window, of, dtype)
        tl.store(row + columns, out.to(dtype), mask=inside)
        if is_kept(own, token):
            store_window(state_behind(own, token), window, of, channels, TAPS)


def convolve(
    x: Tensor, weights: Tensor, bias: Tensor | None, states: Tensor, requests: Requests
) -> None:
    """Replaces each channel by ``silu`` of its causal convolution, in place.

    Args:
        x: [tokens, channels], with any stride between rows: float32, float16 or bfloat16.
        weights: [taps, channels], contiguous, x's dtype.
        bias: [channels], x's dtype, or None.
        states: [blocks, (taps - 1) * channels] float32, with any stride between blocks.
        requests: the requests.

    One launch a layer, a program for each request and CHANNELS channels, which goes through the
    tokens one after the other. It reads and writes tokens * channels elements, and the states. With
    8,192 channels in bfloat16, one decode moves 0.2 MB: 2 us, the launch. 256 decodes move 58 MB:
    14 us. A prompt of 8,192 tokens moves 268 MB, 63 us, but each token is loaded when the one
    before is stored: at 0.7 us for each, 6 ms.
    """
    taps, channels = weights.shape
    assert 2 <= taps <= MOST_TAPS
    grid = len(requests.context_lens), triton.cdiv(channels, CHANNELS)
    _convolve[grid](
        x, weights, bias, states,
        requests.query_starts, requests.context_lens, requests.block_table,
        x.stride(0), states.stride(0), requests.block_table.stride(0), requests.interval, channels,
        TAPS=taps, HAS_BIAS=bias is not None, BLOCK=CHANNELS, num_warps=1,
    )  # fmt: skip
