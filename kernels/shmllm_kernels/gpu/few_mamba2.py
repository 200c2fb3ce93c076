"""Mamba 2 of a step of few tokens, before the gated norm, in one launch: convolution and scan.

`reference.convolution` and `reference.mamba` have the formulas. A program computes some columns of
a head of a request, all of its tokens in the step one after the other, and convolves the channels
of its inputs, B and C itself. A dependent launch (from compute capability 9.0 on) loads the states
before it waits for the launch before, which is the projection: no launch of the step but this one
changes them.

Heads share B and C. So the program that ends last among those of a group of heads stores the inputs
of these channels, which the next step's convolution reads; the others have read by then what it
replaces. The norm is over a whole group, so it has a launch of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.convolution import (
    MOST_TAPS,
    convolve_next,
    load_channels,
    load_inputs,
    store_windows,
)
from shmllm_kernels.gpu.decode_parts import is_last_part
from shmllm_kernels.gpu.mamba2 import COLUMNS, bounded, next_state
from shmllm_kernels.gpu.states import Requests, is_kept, own_states, state_before, state_behind


@triton.jit
def _run_mamba2(
    x_ptr,
    weights_ptr,
    bias_ptr,
    logs_ptr,
    biases_ptr,
    skips_ptr,
    states_ptr,
    out_ptr,
    counters_ptr,
    starts_ptr,
    context_ptr,
    table_ptr,
    x_stride,
    state_stride,
    out_stride,
    table_stride,
    interval,
    least,
    most,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    CHANNELS: tl.constexpr = HEADS * HEAD_DIM + 2 * GROUPS * STATE
    SHARING: tl.constexpr = HEADS // GROUPS
    request = tl.program_id(0)
    head = tl.program_id(1)
    group = head // SHARING
    if IS_DEPENDENT:
        gdc_launch_dependents()
    own = own_states(
        request, states_ptr, starts_ptr, context_ptr, table_ptr, state_stride, table_stride,
        interval,
    )  # fmt: skip
    if own.count <= 0:
        if IS_DEPENDENT:
            gdc_wait()
        return
    rows, columns = tl.arange(0, BLOCK_N), tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    of_keys, of_inputs = rows < STATE, columns < HEAD_DIM
    cells = (TAPS - 1) * CHANNELS + head * STATE * HEAD_DIM
    cells += rows[:, None] * HEAD_DIM + columns[None, :]
    inside = of_keys[:, None] & of_inputs[None, :]
    state = tl.load(state_before(own) + cells, mask=inside & (own.start > 0), other=0.0)

    input_at = head * HEAD_DIM + columns
    key_at = HEADS * HEAD_DIM + group * STATE + rows
    query_at = key_at + GROUPS * STATE
    input_of = load_channels(
        weights_ptr, bias_ptr, own, input_at, of_inputs, CHANNELS, TAPS, HAS_BIAS
    )
    key_of = load_channels(weights_ptr, bias_ptr, own, key_at, of_keys, CHANNELS, TAPS, HAS_BIAS)
    query_of = load_channels(
        weights_ptr, bias_ptr, own, query_at, of_keys, CHANNELS, TAPS, HAS_BIAS
    )
    growth = -tl.exp(tl.load(logs_ptr + head))
    bias = tl.load(biases_ptr + head)
    skip = tl.load(skips_ptr + head)
    if IS_DEPENDENT:
        gdc_wait()

    dtype: tl.constexpr = x_ptr.dtype.element_ty
    input_window, key_window, query_window = input_of.before, key_of.before, query_of.before
    for token in range(own.count):
        index = (own.first + token).to(tl.int64)
        row = x_ptr + index * x_stride
        given, input_window = convolve_next(
            load_inputs(row, input_of), input_window, input_of, dtype
        )
        key, key_window = convolve_next(load_inputs(row, key_of), key_window, key_of, dtype)
        query, query_window = convolve_next(
            load_inputs(row, query_of), query_window, query_of, dtype
        )
        time = tl.load(row + CHANNELS + head).to(tl.float32) + bias
        state, out = next_state(state, given, key, query, time, growth, skip, least, most)
        tl.store(out_ptr + index * out_stride + input_at, out.to(dtype), mask=of_inputs)
        if is_kept(own, token):
            tl.store(state_behind(own, token) + cells, state, mask=inside)
    store_windows(x_ptr, x_stride, input_of, own, CHANNELS, TAPS)
    if is_last_part(counters_ptr + request * GROUPS + group, SHARING * tl.num_programs(2)):
        store_windows(x_ptr, x_stride, key_of, own, CHANNELS, TAPS)
        store_windows(x_ptr, x_stride, query_of, own, CHANNELS, TAPS)


def run_mamba2(
    out: Tensor,
    x: Tensor,
    weights: Tensor,
    convolution_bias: Tensor | None,
    logs: Tensor,
    biases: Tensor,
    skips: Tensor,
    states: Tensor,
    counters: Tensor,
    requests: Requests,
    sizes: tuple[int, int, int, int],
    limits: tuple[float, float],
    is_dependent: bool = False,
) -> None:
    """Computes `convolution.convolve` and `mamba2.scan`.

    Args:
        out: [tokens, heads * head_dim], x's dtype, each row contiguous.
        x: [tokens, heads * (head_dim + 1) + 2 * groups * state_size], inputs, B, C and time steps,
            each row contiguous: float32, float16 or bfloat16.
        weights, convolution_bias: [taps, channels] and [channels], contiguous, x's dtype; those of
            the convolution of inputs, B and C.
        logs, biases, skips: [heads] float32.
        states: [blocks, (taps - 1) * channels + heads * state_size * head_dim] float32, the state
            of the convolution and that of the scan, with any stride between blocks.
        counters: at least requests * groups int32, 0 before and after the launch.
        requests: the requests.
        sizes: heads, head_dim, groups, state_size.
        limits: the limits of time steps.
        is_dependent: see `few_delta_net.run_delta_net`.

    One launch a layer, a program for each request, head and COLUMNS columns of it. For
    Granite-4.0-H-Small (128 heads of 64, states of 128) a decode moves 8.4 MB of states: 2 us at
    4.26 TB/s. With the launch and its sums about 4 us, where two launches take 6.
    """
    heads, head_dim, groups, state_size = sizes
    taps, channels = weights.shape
    num_requests = len(requests.context_lens)
    assert 2 <= taps <= MOST_TAPS
    assert channels == heads * head_dim + 2 * groups * state_size, "weights: all channels"
    assert x.shape[1] == channels + heads, "x: what the projection returns"
    assert x.stride(1) == out.stride(1) == 1, "rows must be contiguous"
    assert len(counters) >= num_requests * groups, "counters: one for each request and group"
    if num_requests == 0:
        return
    columns = min(COLUMNS, next_power_of_two(head_dim))
    _run_mamba2[num_requests, heads, triton.cdiv(head_dim, columns)](
        x, weights, x if convolution_bias is None else convolution_bias, logs, biases, skips,
        states, out, counters,
        requests.query_starts, requests.context_lens, requests.block_table,
        x.stride(0), states.stride(0), out.stride(0), requests.block_table.stride(0),
        requests.interval, *bounded(limits),
        HEADS=heads, HEAD_DIM=head_dim, GROUPS=groups, STATE=state_size, TAPS=taps,
        HAS_BIAS=convolution_bias is not None, IS_DEPENDENT=is_dependent,
        BLOCK_N=next_power_of_two(state_size), BLOCK_P=columns, num_warps=4,
        **({"launch_pdl": True} if is_dependent else {}),
    )  # fmt: skip
