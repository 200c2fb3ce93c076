"""Mamba 2 for the tokens of a step, behind the convolution: the scan and the gated norm.

`reference.mamba` has the formulas. One program computes all tokens of a request in the step, one
after the other, for some columns of a head's state.
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
_LARGEST = 3.0e38


@triton.jit
def next_state(state, given, key, query, time, growth, skip, least, most):
    """Returns the state [keys, inputs] behind a token, and its output, all float32."""
    time = tl.minimum(tl.maximum(softplus(time), least), most)
    state = state * tl.exp(growth * time) + key[:, None] * (given * time)[None, :]
    return state, tl.sum(state * query[:, None], axis=0) + skip * given


@triton.jit
def _scan(
    x_ptr,
    steps_ptr,
    logs_ptr,
    biases_ptr,
    skips_ptr,
    states_ptr,
    out_ptr,
    starts_ptr,
    context_ptr,
    table_ptr,
    x_stride,
    steps_stride,
    state_stride,
    out_stride,
    table_stride,
    interval,
    heads,
    head_dim,
    groups,
    state_size,
    least,
    most,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    rows = tl.arange(0, BLOCK_N)
    columns = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    of_keys = rows < state_size
    of_inputs = columns < head_dim
    own = own_states(
        request, states_ptr, starts_ptr, context_ptr, table_ptr, state_stride, table_stride,
        interval,
    )  # fmt: skip
    if own.count <= 0:
        return
    cells = head * state_size * head_dim + rows[:, None] * head_dim + columns[None, :]
    inside = of_keys[:, None] & of_inputs[None, :]
    state = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
    if own.start > 0:
        state = tl.load(state_before(own) + cells, mask=inside, other=0.0)
    input_at = head * head_dim + columns
    key_at = heads * head_dim + head // (heads // groups) * state_size + rows
    query_at = key_at + groups * state_size
    growth = -tl.exp(tl.load(logs_ptr + head))
    bias = tl.load(biases_ptr + head)
    skip = tl.load(skips_ptr + head)
    for token in range(own.count):
        index = (own.first + token).to(tl.int64)
        row = x_ptr + index * x_stride
        given = tl.load(row + input_at, mask=of_inputs, other=0.0).to(tl.float32)
        key = tl.load(row + key_at, mask=of_keys, other=0.0).to(tl.float32)
        query = tl.load(row + query_at, mask=of_keys, other=0.0).to(tl.float32)
        time = tl.load(steps_ptr + index * steps_stride + head).to(tl.float32) + bias
        state, out = next_state(state, given, key, query, time, growth, skip, least, most)
        target = out_ptr + index * out_stride + input_at
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=of_inputs)
        if is_kept(own, token):
            tl.store(state_behind(own, token) + cells, state, mask=inside)


def scan(
    out: Tensor,
    x: Tensor,
    steps: Tensor,
    logs: Tensor,
    biases: Tensor,
    skips: Tensor,
    states: Tensor,
    requests: Requests,
    sizes: tuple[int, int, int, int],
    limits: tuple[float, float],
) -> None:
    """Writes the outputs of ``reference.mamba.scan`` for each request.

    Args:
        out: [tokens, heads * head_dim], x's dtype.
        x: [tokens, heads * head_dim + 2 * groups * state_size], inputs, B and C: float32, float16
            or bfloat16. Rows of x, steps and out may have any stride.
        steps: [tokens, heads], before `reference.mamba.time_steps`, x's dtype.
        logs, biases, skips: [heads] float32.
        states: [blocks, heads * state_size * head_dim] float32, with any stride between blocks.
        requests: the requests.
        sizes: heads, head_dim, groups, state_size.
        limits: the limits of time steps.

    One launch a layer. It reads the state of each request once and writes it once, and once more
    for each further block that the step completes. For Granite-4.0-H-Small (128 heads of 64, states
    of 128) a state has 4.2 MB: a decode moves 8.4 MB, 4 us with the launch, and 256 decodes 2.1 GB,
    500 us. The tokens of a prompt follow one another: at 0.5 us for each, 8,192 take 4 ms.
    """
    heads, head_dim, groups, state_size = sizes
    columns = min(COLUMNS, next_power_of_two(head_dim))
    grid = len(requests.context_lens), heads, triton.cdiv(head_dim, columns)
    least, most = bounded(limits)
    _scan[grid](
        x, steps, logs, biases, skips, states, out,
        requests.query_starts, requests.context_lens, requests.block_table,
        x.stride(0), steps.stride(0), states.stride(0), out.stride(0),
        requests.block_table.stride(0), requests.interval,
        heads, head_dim, groups, state_size, least, most,
        BLOCK_N=next_power_of_two(state_size), BLOCK_P=columns, num_warps=4,
    )  # fmt: skip


def bounded(limits: tuple[float, float]) -> tuple[float, float]:
    """Returns limits of time steps that a kernel can compare with."""
    least, most = limits
    return min(least, _LARGEST), min(most, _LARGEST)


@triton.jit
def _gated_norm(
    x_ptr,
    gate_ptr,
    weight_ptr,
    x_stride,
    gate_stride,
    width,
    eps,
    HAS_NORM: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    columns += group * width
    places = x_ptr + row * x_stride + columns
    x = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    gates = gate_ptr + row * gate_stride + columns
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    gate *= sigmoid(gate)
    if GATES_FIRST:
        x *= gate
    if HAS_NORM:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / width + eps) * weight
    if not GATES_FIRST:
        x *= gate
    tl.store(places, x.to(x_ptr.dtype.element_ty), mask=inside)


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    groups: int,
    eps: float,
    gates_first: bool = True,
) -> None:
    """Replaces x by ``reference.mamba.gated_norm``.

    Args:
        x: [tokens, width]: float32, float16 or bfloat16.
        gate: [tokens, width], x's dtype. Rows of both may have any stride.
        weight: [width], contiguous, or None, see there.
        groups: the number of groups of columns.
        eps: added to the mean square.
        gates_first: see there.

    One launch a layer, a program for each group of each token. It moves 3 * tokens * width
    elements: with 8,192 in bfloat16, 13 MB for 256 decodes, 3 us, and 403 MB for 8,192 tokens, 94
    us.
    """
    width = x.shape[1] // groups
    if len(x):
        block = next_power_of_two(width)
        _gated_norm[len(x), groups](
            x, gate, x if weight is None else weight, x.stride(0), gate.stride(0), width, eps,
            HAS_NORM=weight is not None, GATES_FIRST=gates_first, BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
