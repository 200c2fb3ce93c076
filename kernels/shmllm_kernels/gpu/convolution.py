"""The causal convolution of each channel before a recurrent layer, for the tokens of a step.

`reference.convolution` has the formula. One program computes some channels of all tokens of a
request in the step, one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.states import Requests, state_block

MOST_TAPS = 4
CHANNELS = 128
"""The channels of a program."""


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
    first = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - first
    if count <= 0:
        return
    start = tl.load(context_ptr + request) - count
    table_ptr += request.to(tl.int64) * table_stride
    has_b = inside & (TAPS > 2)
    has_a = inside & (TAPS > 3)
    newest = tl.load(weights_ptr + (TAPS - 1) * channels + columns, mask=inside, other=0.0)
    of_c = tl.load(weights_ptr + (TAPS - 2) * channels + columns, mask=inside, other=0.0)
    of_b = tl.load(weights_ptr + (TAPS - 3) * channels + columns, mask=has_b, other=0.0)
    of_a = tl.load(weights_ptr + columns, mask=has_a, other=0.0)
    bias = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + columns, mask=inside, other=0.0)
    began = start > 0
    place = states_ptr + columns
    place += state_block(table_ptr, tl.maximum(start - 1, 0), interval) * state_stride
    c = tl.load(place + (TAPS - 2) * channels, mask=inside & began, other=0.0)
    b = tl.load(place + (TAPS - 3) * channels, mask=has_b & began, other=0.0)
    a = tl.load(place, mask=has_a & began, other=0.0)
    for token in range(count):
        position = start + token
        row = x_ptr + (first + token).to(tl.int64) * x_stride + columns
        x = tl.load(row, mask=inside, other=0.0).to(tl.float32)
        total = bias + a * of_a + b * of_b + c * of_c + x * newest
        total = total / (1.0 + tl.exp(-total))
        tl.store(row, total.to(x_ptr.dtype.element_ty), mask=inside)
        a = b
        b = c
        c = x
        if ((position + 1) % interval == 0) | (token == count - 1):
            place = states_ptr + state_block(table_ptr, position, interval) * state_stride + columns
            tl.store(place + (TAPS - 2) * channels, c, mask=inside)
            tl.store(place + (TAPS - 3) * channels, b, mask=has_b)
            tl.store(place, a, mask=has_a)


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
