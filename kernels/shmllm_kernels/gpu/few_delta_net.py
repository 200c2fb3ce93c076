"""A gated delta net of a step of few tokens in one launch: convolution, delta rule and gated norm.

`reference.convolution` and `reference.delta_net` have the formulas. A program computes a value head
of a request, all of its tokens in the step one after the other, with the head's whole state in
registers, and convolves the channels of its query, key and value heads itself. A dependent launch
(from compute capability 9.0 on) loads the states before it waits for the launch before, which is
the projection: no launch of the step but this one changes them.

Value heads share key heads. So the program that ends last among those of a key head stores the
inputs of its channels, which the next step's convolution reads; the others have read by then what
it replaces.
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
from shmllm_kernels.gpu.delta_net import NORM_EPS, next_state, normed_and_gated, read_state
from shmllm_kernels.gpu.functions import softplus
from shmllm_kernels.gpu.states import Requests, is_kept, own_states, state_before, state_behind

MOST_CELLS = 128 * 128
"""The most elements of a head's state: 128 registers of each thread. With more than WARPS warps the
compiler loads the other vectors of a head once for each of a thread's rows, and runs out of
registers."""
WARPS = 4


@triton.jit
def _run_delta_net(
    x_ptr,
    weights_ptr,
    norm_ptr,
    logs_ptr,
    biases_ptr,
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
    query_scale,
    most,
    eps,
    norm_eps,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    IS_TILED: tl.constexpr,
    TAPS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    SHARING: tl.constexpr = VALUE_HEADS // KEY_HEADS
    request = tl.program_id(0)
    head = tl.program_id(1)
    key_head = head % KEY_HEADS if IS_TILED else head // SHARING
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
    rows, columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    of_keys, of_values = rows < KEY_DIM, columns < VALUE_DIM
    # The part that differs between rows is by itself, so that it takes no register for each row.
    of_head = (TAPS - 1) * CHANNELS + head * KEY_DIM * VALUE_DIM
    cells = rows[:, None] * VALUE_DIM + columns[None, :]
    inside = of_keys[:, None] & of_values[None, :]
    state = tl.load(state_before(own) + of_head + cells, mask=inside & (own.start > 0), other=0.0)

    query_at = key_head * KEY_DIM + rows
    key_at = KEY_HEADS * KEY_DIM + query_at
    value_at = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + columns
    query_of = load_channels(
        weights_ptr, weights_ptr, own, query_at, of_keys, CHANNELS, TAPS, False
    )
    key_of = load_channels(weights_ptr, weights_ptr, own, key_at, of_keys, CHANNELS, TAPS, False)
    value_of = load_channels(
        weights_ptr, weights_ptr, own, value_at, of_values, CHANNELS, TAPS, False
    )
    growth = -tl.exp(tl.load(logs_ptr + head))
    bias = tl.load(biases_ptr + head).to(tl.float32)
    norm = tl.load(norm_ptr + columns, mask=of_values, other=0.0).to(tl.float32)
    if IS_DEPENDENT:
        gdc_wait()

    dtype: tl.constexpr = x_ptr.dtype.element_ty
    query_window, key_window, value_window = query_of.before, key_of.before, value_of.before
    for token in range(own.count):
        index = (own.first + token).to(tl.int64)
        row = x_ptr + index * x_stride
        # All is loaded at once. The query is convolved when it is read: it takes registers.
        query_x, key_x = load_inputs(row, query_of), load_inputs(row, key_of)
        value_x = load_inputs(row, value_of)
        key, key_window = convolve_next(key_x, key_window, key_of, dtype)
        value, value_window = convolve_next(value_x, value_window, value_of, dtype)
        gates = row + CHANNELS + head * VALUE_DIM + columns
        gate = tl.load(gates, mask=of_values, other=0.0).to(tl.float32)
        rates = row + CHANNELS + VALUE_HEADS * VALUE_DIM + head
        rate = tl.load(rates).to(tl.float32)
        time = tl.load(rates + VALUE_HEADS).to(tl.float32) + bias
        state = next_state(state, key, value, rate, tl.exp(growth * softplus(time)), most, eps)
        query, query_window = convolve_next(query_x, query_window, query_of, dtype)
        out = read_state(state, query, query_scale, eps)
        out = normed_and_gated(out.to(dtype).to(tl.float32), gate, norm, VALUE_DIM, norm_eps)
        target = out_ptr + index * out_stride + head * VALUE_DIM + columns
        tl.store(target, out.to(dtype), mask=of_values)
        if is_kept(own, token):
            tl.store(state_behind(own, token) + of_head + cells, state, mask=inside)
    store_windows(x_ptr, x_stride, value_of, own, CHANNELS, TAPS)
    if is_last_part(counters_ptr + request * KEY_HEADS + key_head, SHARING):
        store_windows(x_ptr, x_stride, query_of, own, CHANNELS, TAPS)
        store_windows(x_ptr, x_stride, key_of, own, CHANNELS, TAPS)


def takes(key_dim: int, value_dim: int) -> bool:
    """Returns whether the state of a head fits into the registers of a program."""
    return next_power_of_two(key_dim) * next_power_of_two(value_dim) <= MOST_CELLS


def run_delta_net(
    out: Tensor,
    x: Tensor,
    weights: Tensor,
    norm_weight: Tensor,
    logs: Tensor,
    biases: Tensor,
    states: Tensor,
    counters: Tensor,
    requests: Requests,
    heads: tuple[int, int, int, int],
    norm_eps: float,
    is_dependent: bool = False,
    is_tiled: bool = False,
    most: float = 1.0,
) -> None:
    """Computes `convolution.convolve`, `delta_net.delta_rule` and `delta_net.gated_norm`.

    Args:
        out: [tokens, value_heads * value_dim], x's dtype, each row contiguous.
        x: [tokens, 2 * key_heads * key_dim + 2 * value_heads * (value_dim + 1)], queries, keys,
            values, gates, rates and decays, each row contiguous: float32, float16 or bfloat16.
        weights: [taps, 2 * key_heads * key_dim + value_heads * value_dim], those of the
            convolution, contiguous, x's dtype.
        norm_weight: [value_dim], contiguous.
        logs: [value_heads] float32.
        biases: [value_heads].
        states: [blocks, (taps - 1) * channels + value_heads * key_dim * value_dim] float32, the
            state of the convolution and that of the delta rule, with any stride between blocks.
        counters: at least requests * key_heads int32, 0 before and after the launch.
        requests: the requests.
        heads: key_heads, key_dim, value_heads, value_dim, as `takes`.
        norm_eps: that of the gated norm.
        is_dependent: whether the launch may begin before the launch before it has ended. The GPU
            must have compute capability 9.0. No other launch of the step may write what is not
            ``x``.
        is_tiled, most: see `delta_net.delta_rule`.

    One launch a layer, a program for each request and value head. For Qwen3.6-35B-A3B (32 value
    heads of 128 x 128) a decode moves 4.2 MB of states: 1 us at 4.26 TB/s; 32 programs get 64 KiB
    each, 1 us. With the launch and its sums about 3.5 us, where three launches take 7.
    """
    key_heads, key_dim, value_heads, value_dim = heads
    taps, channels = weights.shape
    num_requests = len(requests.context_lens)
    assert 2 <= taps <= MOST_TAPS
    assert takes(key_dim, value_dim), "the state of a head is too large"
    assert channels == 2 * key_heads * key_dim + value_heads * value_dim, "weights: all channels"
    assert x.shape[1] == channels + value_heads * (value_dim + 2), "x: what the projection returns"
    assert x.stride(1) == out.stride(1) == 1, "rows must be contiguous"
    assert len(counters) >= num_requests * key_heads, "counters: one for each request and key head"
    if num_requests == 0:
        return
    block_k, block_v = next_power_of_two(key_dim), next_power_of_two(value_dim)
    _run_delta_net[num_requests, value_heads](
        x, weights, norm_weight, logs, biases, states, out, counters,
        requests.query_starts, requests.context_lens, requests.block_table,
        x.stride(0), states.stride(0), out.stride(0), requests.block_table.stride(0),
        requests.interval, key_dim**-0.5, most, NORM_EPS, norm_eps,
        KEY_HEADS=key_heads, KEY_DIM=key_dim, VALUE_HEADS=value_heads, VALUE_DIM=value_dim,
        IS_TILED=is_tiled, TAPS=taps, IS_DEPENDENT=is_dependent, BLOCK_K=block_k, BLOCK_V=block_v,
        num_warps=max(WARPS * block_k * block_v // MOST_CELLS, 1),
        **({"launch_pdl": True} if is_dependent else {}),
    )  # fmt: skip
