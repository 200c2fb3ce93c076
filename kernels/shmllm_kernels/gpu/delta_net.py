"""Gated delta nets for the tokens of a step, behind the convolution: the delta rule and the gated
norm.

`reference.delta_net` has the formulas. One program computes all tokens of a request in the step,
one after the other, for some columns of a head's state.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.functions import sigmoid, softplus
from shmllm_kernels.gpu.states import Requests, is_kept, own_states, state_before, state_behind

COLUMNS = 32
"""The columns of a state that a program has in registers, beside all its rows."""
NORM_EPS = 1e-6


@triton.jit
def _unit(x, eps):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + eps)


@triton.jit
def next_state(state, key, value, rate, decay, most, eps):
    """Returns the state behind a token, [keys, values] float32. decay: a factor of the state, or
    one of each of its rows, [keys, 1]. most: the factor of the rate's sigmoid."""
    key = _unit(key, eps)
    strength = most * (1.0 / (1.0 + tl.exp(-rate)))
    state *= decay
    change = (value - tl.sum(state * key[:, None], axis=0)) * strength
    return state + key[:, None] * change[None, :]


@triton.jit
def read_state(state, query, query_scale, eps):
    """Returns what a query reads of a state, [values] float32."""
    query = _unit(query, eps) * query_scale
    return tl.sum(state * query[:, None], axis=0)


@triton.jit
def _delta_rule(
    x_ptr,
    rates_ptr,
    decays_ptr,
    logs_ptr,
    biases_ptr,
    states_ptr,
    out_ptr,
    starts_ptr,
    context_ptr,
    table_ptr,
    x_stride,
    rates_stride,
    decays_stride,
    state_stride,
    out_stride,
    table_stride,
    interval,
    key_heads,
    key_dim,
    value_dim,
    sharing,
    query_scale,
    most,
    least,
    eps,
    BY_ROW: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    rows = tl.arange(0, BLOCK_K)
    columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    of_keys = rows < key_dim
    of_values = columns < value_dim
    own = own_states(
        request, states_ptr, starts_ptr, context_ptr, table_ptr, state_stride, table_stride,
        interval,
    )  # fmt: skip
    if own.count <= 0:
        return
    cells = head * key_dim * value_dim + rows[:, None] * value_dim + columns[None, :]
    inside = of_keys[:, None] & of_values[None, :]
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if own.start > 0:
        state = tl.load(state_before(own) + cells, mask=inside, other=0.0)
    query_at = head // sharing % key_heads * key_dim + rows
    key_at = key_heads * key_dim + query_at
    value_at = 2 * key_heads * key_dim + head * value_dim + columns
    growth = -tl.exp(tl.load(logs_ptr + head))
    if BY_ROW:
        bias = tl.load(biases_ptr + head * key_dim + rows, mask=of_keys, other=0.0).to(tl.float32)
    else:
        bias = tl.load(biases_ptr + head).to(tl.float32)
    for token in range(own.count):
        index = (own.first + token).to(tl.int64)
        row = x_ptr + index * x_stride
        query = tl.load(row + query_at, mask=of_keys, other=0.0).to(tl.float32)
        key = tl.load(row + key_at, mask=of_keys, other=0.0).to(tl.float32)
        value = tl.load(row + value_at, mask=of_values, other=0.0).to(tl.float32)
        rate = tl.load(rates_ptr + index * rates_stride + head).to(tl.float32)
        decays = decays_ptr + index * decays_stride
        if BY_ROW:
            times = tl.load(decays + head * key_dim + rows, mask=of_keys, other=0.0).to(tl.float32)
            if IS_BOUNDED:
                log = least * sigmoid(-growth * (times + bias))
            else:
                log = growth * softplus(times + bias)
            decay = tl.exp(log)[:, None]
        else:
            decay = tl.exp(growth * softplus(tl.load(decays + head).to(tl.float32) + bias))
        state = next_state(state, key, value, rate, decay, most, eps)
        out = read_state(state, query, query_scale, eps)
        target = out_ptr + index * out_stride + head * value_dim + columns
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=of_values)
        if is_kept(own, token):
            tl.store(state_behind(own, token) + cells, state, mask=inside)


def delta_rule(
    out: Tensor,
    x: Tensor,
    rates: Tensor,
    decays: Tensor,
    logs: Tensor,
    biases: Tensor,
    states: Tensor,
    requests: Requests,
    heads: tuple[int, int, int, int],
    is_tiled: bool = False,
    most: float = 1.0,
    least: float | None = None,
) -> None:
    """Writes the outputs of ``reference.delta_net.delta_rule`` for each request.

    Args:
        out: [tokens, value_heads * value_dim], x's dtype.
        x: [tokens, 2 * key_heads * key_dim + value_heads * value_dim], queries, keys and values:
            float32, float16 or bfloat16. Rows of x, rates, decays and out may have any stride.
        rates: [tokens, value_heads], x's dtype.
        decays: [tokens, value_heads], or [tokens, value_heads * key_dim], one for each channel of
            the key, x's dtype.
        logs: [value_heads] float32.
        biases: as many as decays of a token.
        states: [blocks, value_heads * key_dim * value_dim] float32, with any stride between blocks.
        requests: the requests.
        heads: key_heads, key_dim, value_heads, value_dim.
        is_tiled, most, least: see the reference.

    One launch a layer. It reads the state of each request once and writes it once, and once more
    for each further block that the step completes. For Qwen3.6-35B-A3B (32 value heads of 128 x
    128) a state has 2.1 MB: a decode moves 4.2 MB, 3 us with the launch, and 256 decodes 1.1 GB,
    250 us. The tokens of a prompt follow one another, each with two sums over the rows of a state:
    at 0.5 us for each, 8,192 tokens take 4 ms.
    """
    key_heads, key_dim, value_heads, value_dim = heads
    sharing = 1 if is_tiled else value_heads // key_heads
    columns = min(COLUMNS, next_power_of_two(value_dim))
    grid = len(requests.context_lens), value_heads, triton.cdiv(value_dim, columns)
    _delta_rule[grid](
        x, rates, decays, logs, biases, states, out,
        requests.query_starts, requests.context_lens, requests.block_table,
        x.stride(0), rates.stride(0), decays.stride(0), states.stride(0), out.stride(0),
        requests.block_table.stride(0), requests.interval,
        key_heads, key_dim, value_dim, sharing, key_dim**-0.5, most,
        0.0 if least is None else least, NORM_EPS,
        BY_ROW=decays.shape[1] > value_heads, IS_BOUNDED=least is not None,
        BLOCK_K=next_power_of_two(key_dim), BLOCK_V=columns, num_warps=4,
    )  # fmt: skip


@triton.jit
def normed_and_gated(x, gate, weight, width, eps, IS_SIGMOID: tl.constexpr = False):
    """Returns the norm of a head times ``silu`` of its gates, or their sigmoid, float32."""
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps) * weight
    factor = 1.0 / (1.0 + tl.exp(-gate)) if IS_SIGMOID else gate / (1.0 + tl.exp(-gate))
    return normed * factor


@triton.jit
def _gated_norm(
    x_ptr,
    gate_ptr,
    weight_ptr,
    x_stride,
    gate_stride,
    width,
    eps,
    IS_SIGMOID: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    places = x_ptr + row * x_stride + head * width + columns
    x = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    gates = gate_ptr + row * gate_stride + head * width + columns
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    normed = normed_and_gated(x, gate, weight, width, eps, IS_SIGMOID)
    tl.store(places, normed.to(x_ptr.dtype.element_ty), mask=inside)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, is_sigmoid: bool = False
) -> None:
    """Replaces each head of x by ``reference.delta_net.gated_norm``.

    Args:
        x: [tokens, heads * width]: float32, float16 or bfloat16.
        gate: [tokens, heads * width], x's dtype. Rows of both may have any stride.
        weight: [width], contiguous.
        eps: added to the mean square.
        is_sigmoid: see there.

    One launch a layer, a program for each head of each token. It moves 3 * tokens * heads * width
    elements: with 32 heads of 128 in bfloat16, 6.3 MB for 256 decodes, 2 us, and 201 MB for 8,192
    tokens, 47 us.
    """
    width = len(weight)
    grid, block = (len(x), x.shape[1] // width), next_power_of_two(width)
    if grid[0]:
        _gated_norm[grid](
            x, gate, weight, x.stride(0), gate.stride(0), width, eps,
            IS_SIGMOID=is_sigmoid, BLOCK=block, num_warps=min(max(block // 256, 1), 16),
        )  # fmt: skip
