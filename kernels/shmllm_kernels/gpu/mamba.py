"""Mamba for the tokens of a step, behind the convolution: the norms of its projections and the
scan.

`reference.mamba` has the formulas. A program of the scan computes all tokens of a request in the
step, one after the other, for some channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.functions import sigmoid, softplus
from shmllm_kernels.gpu.states import Requests, is_kept, own_states, state_before, state_behind

CHANNELS = 32
"""The channels of a program of the scan."""
NUMBERS_PER_WARP = 1024
"""The numbers of states that a warp has in registers, beside as many rates."""


@triton.jit
def next_state(state, given, key, query, time, rates, AXIS: tl.constexpr):
    """Returns the state behind a token, and what C reads of it. All are float32, of a shape that
    broadcasts to that of the state; AXIS are the numbers of a channel."""
    state = state * tl.exp(rates * time) + key * (given * time)
    return state, tl.sum(state * query, axis=AXIS)


@triton.jit
def gated_output(read, given, skip, gate):
    """Returns the output of a token times ``silu(gate)``, float32."""
    return (read + skip * given) * (gate * sigmoid(gate))


@triton.jit
def _normalise(
    x_ptr, first_ptr, second_ptr, third_ptr, x_stride, eps,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width = tl.where(part == 0, FIRST, tl.where(part == 1, SECOND, THIRD))
    begin = tl.where(part == 0, 0, tl.where(part == 1, FIRST, FIRST + SECOND))
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    places = x_ptr + row * x_stride + begin + columns
    x = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    weight = 1.0
    if HAS_WEIGHTS:
        weight_ptr = first_ptr
        if part == 1:
            weight_ptr = second_ptr
        if part == 2:
            weight_ptr = third_ptr
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps) * weight
    tl.store(places, normed.to(x_ptr.dtype.element_ty), mask=inside)


def normalise(
    x: Tensor, sizes: tuple[int, int, int], weights: Sequence[Tensor] | None, eps: float
) -> None:
    """Replaces three parts of each row by their RMSNorms, each rounded once, at the end.

    Args:
        x: [tokens, sum of sizes]: float32, float16 or bfloat16. Rows may have any stride.
        sizes: the widths of the parts, side by side.
        weights: those of each part, contiguous; None: all are 1.
        eps: added to the mean square.

    One launch a layer, a program for each part of each row. It moves 2 * tokens * width elements:
    288 in bfloat16 for Jamba's 256 + 16 + 16, so one launch takes 1 us, and 8,192 tokens 9 MB, 3
    us.
    """
    assert x.shape[1] == sum(sizes), "x: three parts"
    if len(x):
        _normalise[len(x), 3](
            x, *((x, x, x) if weights is None else weights), x.stride(0), eps,
            *sizes, HAS_WEIGHTS=weights is not None, BLOCK=next_power_of_two(max(sizes)),
            num_warps=1,
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
    own = own_states(
        request, states_ptr, starts_ptr, context_ptr, table_ptr, state_stride, table_stride,
        interval,
    )  # fmt: skip
    if own.count <= 0:
        return
    cells = rows[:, None] * channels + columns[None, :]
    inside = of_keys[:, None] & of_inputs[None, :]
    state = tl.zeros([BLOCK_N, BLOCK], tl.float32)
    if own.start > 0:
        state = tl.load(state_before(own) + cells, mask=inside, other=0.0)
    rates = -tl.exp(tl.load(logs_ptr + cells, mask=inside, other=0.0))
    skip = tl.load(skips_ptr + columns, mask=of_inputs, other=0.0)
    for token in range(own.count):
        index = (own.first + token).to(tl.int64)
        given = tl.load(x_ptr + index * x_stride + columns, mask=of_inputs, other=0.0)
        given = given.to(tl.float32)
        target = out_ptr + index * out_stride + columns
        time = softplus(tl.load(target, mask=of_inputs, other=0.0).to(tl.float32))
        places = keys_ptr + index * keys_stride + rows
        key = tl.load(places, mask=of_keys, other=0.0).to(tl.float32)
        query = tl.load(places + state_size, mask=of_keys, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + index * gate_stride + columns, mask=of_inputs, other=0.0)
        state, read = next_state(
            state, given[None, :], key[:, None], query[:, None], time[None, :], rates, 0
        )
        out = gated_output(read, given, skip, gate.to(tl.float32))
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=of_inputs)
        if is_kept(own, token):
            tl.store(state_behind(own, token) + cells, state, mask=inside)


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
