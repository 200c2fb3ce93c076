"""Mamba for the tokens of a step, behind the convolution: the norms of its projections and the
scan.

`reference.mamba` has the formulas. A program of the scan computes all tokens of a request in the
step, one after the other, for some channels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.functions import sigmoid, softplus
from shmllm_kernels.gpu.states import Requests, state_block

CHANNELS = 32
"""The channels of a program of the scan."""
NUMBERS_PER_WARP = 1024
"""The numbers of states that a warp has in registers, beside as many rates."""


@triton.jit
def _normalise(
    x_ptr, weight_ptr, stride, width, eps, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    places = x_ptr + tl.program_id(0).to(tl.int64) * stride + columns
    x = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    if HAS_WEIGHT:
        normed *= tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(places, normed.to(x_ptr.dtype.element_ty), mask=inside)


def normalise(x: Tensor, weight: Tensor | None, eps: float) -> None:
    """Replaces each row of x by ``rms_norm(x) * weight``.

    Args:
        x: [rows, width], with any stride between rows: float32, float16 or bfloat16.
        weight: [width], contiguous, or None: it is 1.
        eps: added to the mean square.

    One launch for each of up to three projections of a layer, of a program for each row. It moves
    2 * rows * width elements: with 256 in bfloat16, 0.3 MB for 256 decodes, 2 us, the launch, and
    8.4 MB for 8,192 tokens, 2 us.
    """
    rows, width = x.shape
    if rows:
        _normalise[rows,](
            x, weight, x.stride(0), width, eps,
            HAS_WEIGHT=weight is not None, BLOCK=next_power_of_two(width), num_warps=1,
        )  # fmt: skip


@triton.jit
def _selective_scan(
    x_ptr,
    keys_ptr,
    gate_ptr,
    logs_ptr,
    skips_ptr,
    states_ptr,
    out_ptr,
    starts_ptr,
    context_ptr,
    table_ptr,
    x_stride,
    keys_stride,
    gate_stride,
    state_stride,
    out_stride,
    table_stride,
    interval,
    channels,
    state_size,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, BLOCK_N)
    of_keys = rows < state_size
    of_inputs = columns < channels
    first = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - first
    if count <= 0:
        return
    start = tl.load(context_ptr + request) - count
    table_ptr += request.to(tl.int64) * table_stride
    cells = rows[:, None] * channels + columns[None, :]
    inside = of_keys[:, None] & of_inputs[None, :]
    state = tl.zeros([BLOCK_N, BLOCK], tl.float32)
    if start > 0:
        place = states_ptr + state_block(table_ptr, start - 1, interval) * state_stride
        state = tl.load(place + cells, mask=inside, other=0.0)
    rates = -tl.exp(tl.load(logs_ptr + cells, mask=inside, other=0.0))
    skip = tl.load(skips_ptr + columns, mask=of_inputs, other=0.0)
    for token in range(count):
        position = start + token
        index = (first + token).to(tl.int64)
        given = tl.load(x_ptr + index * x_stride + columns, mask=of_inputs, other=0.0)
        given = given.to(tl.float32)
        target = out_ptr + index * out_stride + columns
        time = softplus(tl.load(target, mask=of_inputs, other=0.0).to(tl.float32))
        places = keys_ptr + index * keys_stride + rows
        key = tl.load(places, mask=of_keys, other=0.0).to(tl.float32)
        query = tl.load(places + state_size, mask=of_keys, other=0.0).to(tl.float32)
        state = state * tl.exp(rates * time[None, :]) + key[:, None] * (given * time)[None, :]
        gate = tl.load(gate_ptr + index * gate_stride + columns, mask=of_inputs, other=0.0)
        gate = gate.to(tl.float32)
        out = tl.sum(state * query[:, None], axis=0) + skip * given
        out *= gate * sigmoid(gate)
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=of_inputs)
        if ((position + 1) % interval == 0) | (token == count - 1):
            place = states_ptr + state_block(table_ptr, position, interval) * state_stride
            tl.store(place + cells, state, mask=inside)


def selective_scan(
    out: Tensor,
    x: Tensor,
    keys: Tensor,
    gate: Tensor,
    logs: Tensor,
    skips: Tensor,
    states: Tensor,
    requests: Requests,
) -> None:
    """Replaces time steps, before softplus, by the outputs of ``reference.mamba.selective_scan``
    times ``silu(gate)``, for each request.

    Args:
        out: [tokens, channels], the time steps: float32, float16 or bfloat16. Rows may have any
            stride, as those of x, keys and gate.
        x: [tokens, channels], out's dtype.
        keys: [tokens, 2 * state_size], B and C side by side, out's dtype.
        gate: [tokens, channels], out's dtype.
        logs: [state_size, channels] float32, contiguous.
        skips: [channels] float32.
        states: [blocks, state_size * channels] float32, with any stride between blocks.
        requests: the requests.

    One launch a layer. It reads the state of each request once and writes it once, and once more
    for each further block that the step completes. For Jamba-1.7-Mini (8,192 channels, states of
    16) a state has 0.5 MB: a decode moves 1 MB, 2 us, the launch, and 256 decodes 270 MB, 63 us.
    The tokens of a prompt follow one another: at 0.5 us for each, 8,192 take 4 ms.
    """
    state_size, channels = logs.shape
    rows = next_power_of_two(state_size)
    grid = len(requests.context_lens), triton.cdiv(channels, CHANNELS)
    _selective_scan[grid](
        x, keys, gate, logs, skips, states, out,
        requests.query_starts, requests.context_lens, requests.block_table,
        x.stride(0), keys.stride(0), gate.stride(0), states.stride(0), out.stride(0),
        requests.block_table.stride(0), requests.interval, channels, state_size,
        BLOCK_N=rows, BLOCK=CHANNELS, num_warps=max(rows * CHANNELS // NUMBERS_PER_WARP, 1),
    )  # fmt: skip
