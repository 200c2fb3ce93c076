"""The second of two launches of Mamba 1 in a step of few tokens: time steps and scan.

`reference.convolution` and `reference.mamba` have the formulas. A program computes some channels of
all requests: it normalises what `few_mamba_inputs`, the launch before, has projected, and projects
it to time steps, convolves its inputs again, and changes their states, the tokens of a request one
after the other. So the weights are read once, which tensor cores multiply, as in `few_rows_kernel`:
the bits of a token do not depend on the others.

A dependent launch (from compute capability 9.0 on) loads the projection's weights and the states
before it waits for the launch before: no other launch of the step changes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.convolution import (
    Channels,
    convolve_next,
    load_channels,
    load_inputs,
    store_window,
)
from shmllm_kernels.gpu.few_mamba_inputs import check_inputs
from shmllm_kernels.gpu.few_rows import MAX_ROWS
from shmllm_kernels.gpu.functions import softplus
from shmllm_kernels.gpu.kept_rows import WEIGHTS_PER_WARP
from shmllm_kernels.gpu.mamba import CHANNELS, gated_output, next_state
from shmllm_kernels.gpu.states import Requests, is_kept, own_states, state_before, state_behind

NUM_WARPS = 4
"""Each multiplies a slice of the rank."""
WEIGHTS = NUM_WARPS * WEIGHTS_PER_WARP
FEWEST_CHANNELS = 16
"""The least channels of a program: tensor cores multiply that many."""
MOST_CELLS = 1024
"""The numbers of a request's state in such a program."""
REGISTERS = 255
"""The registers of a thread of such a program, of which two run on a multiprocessor at once. By
itself the assembler chooses fewer for a third one, and spills."""
SHORTEST_RANK = 16 * NUM_WARPS
"""The least elements of a row of the projection to time steps: tensor cores multiply 16."""


@triton.jit
def _load_rank(
    row, ranks, norm_ptr, eps,
    HAS_NORMS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Returns the rank of projected rows, normalised and rounded to their dtype, [slices, rows,
    depth]."""
    x = tl.load(row[None, :, None] + ranks, mask=ranks < RANK, other=0.0)
    if HAS_NORMS:
        values = x.to(tl.float32)
        squares = tl.sum(tl.sum(values * values, axis=2), axis=0)
        values *= tl.rsqrt(squares / RANK + eps)[None, :, None]
        if HAS_WEIGHTS:
            values *= tl.load(norm_ptr + ranks, mask=ranks < RANK, other=0.0).to(tl.float32)
        x = values.to(x.dtype)
    return x


@triton.jit
def _load_keys(
    row, columns, norm_ptr, eps,
    HAS_NORMS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Returns B or C of projected rows, normalised and rounded to their dtype, [rows, state_size]
    float32."""
    inside = columns < STATE
    x = tl.load(row[:, None] + columns[None, :], mask=inside[None, :], other=0.0)
    values = x.to(tl.float32)
    if HAS_NORMS:
        mean = tl.sum(values * values, axis=1) / STATE
        values *= tl.rsqrt(mean + eps)[:, None]
        if HAS_WEIGHTS:
            values *= tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        values = values.to(x.dtype).to(tl.float32)
    return values


@triton.jit(do_not_specialize=["num_requests"])
def _scan_inputs(
    out_ptr,
    x_ptr,
    projected_ptr,
    taps_ptr,
    bias_ptr,
    weight_ptr,
    weight_bias_ptr,
    rank_norm_ptr,
    key_norm_ptr,
    query_norm_ptr,
    logs_ptr,
    skips_ptr,
    states_ptr,
    starts_ptr,
    context_ptr,
    table_ptr,
    num_requests,
    out_stride,
    x_stride,
    projected_stride,
    state_stride,
    table_stride,
    interval,
    eps,
    CHANNELS: tl.constexpr,
    STATE: tl.constexpr,
    RANK: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    if IS_DEPENDENT:
        gdc_launch_dependents()
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    of_inputs = columns < CHANNELS
    ranks = tl.arange(0, SLICES)[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, None, :]
    places = weight_ptr + columns[None, :, None] * RANK + ranks
    weight = tl.load(places, mask=of_inputs[None, :, None] & (ranks < RANK), other=0.0)
    step_bias = tl.load(weight_bias_ptr + columns, mask=of_inputs, other=0.0).to(tl.float32)
    skip = tl.load(skips_ptr + columns, mask=of_inputs, other=0.0)
    keys = tl.arange(0, BLOCK_N)
    of_keys = keys < STATE
    of_states = keys[:, None] * CHANNELS + columns[None, :]
    inside = of_keys[:, None] & of_inputs[None, :]
    rates = -tl.exp(tl.load(logs_ptr + of_states, mask=inside, other=0.0))

    request = tl.arange(0, REQUESTS)
    own = own_states(
        tl.minimum(request, num_requests - 1)[:, None], states_ptr, starts_ptr, context_ptr,
        table_ptr, state_stride, table_stride, interval,
    )  # fmt: skip
    count = tl.where(request < num_requests, tl.reshape(own.count, (REQUESTS,)), 0)
    of = load_channels(
        taps_ptr, bias_ptr, own, columns[None, :],
        of_inputs[None, :] & (count > 0)[:, None], CHANNELS, TAPS, HAS_BIAS,
    )  # fmt: skip
    cells = ((TAPS - 1) * CHANNELS + of_states)[None, :, :]
    has_state = (count > 0)[:, None, None] & (own.start > 0)[:, :, None] & inside[None, :, :]
    state = tl.load(state_before(own)[:, :, None] + cells, mask=has_state, other=0.0)
    if IS_DEPENDENT:
        gdc_wait()

    dtype: tl.constexpr = x_ptr.dtype.element_ty
    window = of.before
    first = tl.reshape(own.first, (REQUESTS,))
    for token in range(tl.max(count, axis=0)):
        # A request without such a token computes another one again.
        is_token = token < count
        last = tl.maximum(tl.minimum(token, count - 1), 0)
        index = tl.where(count > 0, first + last, 0).to(tl.int64)
        row = projected_ptr + index * projected_stride
        low = _load_rank(row, ranks, rank_norm_ptr, eps, HAS_NORMS, HAS_WEIGHTS, RANK)
        key = _load_keys(row + RANK, keys, key_norm_ptr, eps, HAS_NORMS, HAS_WEIGHTS, STATE)
        query = _load_keys(
            row + RANK + STATE, keys, query_norm_ptr, eps, HAS_NORMS, HAS_WEIGHTS, STATE
        )
        row = (x_ptr + index * x_stride)[:, None]
        given, window = convolve_next(load_inputs(row, of), window, of, dtype)
        gate = tl.load(row + CHANNELS + columns[None, :], mask=of.inside, other=0.0).to(tl.float32)
        times = tl.sum(
            tl.dot(weight, tl.permute(low, (0, 2, 1)), input_precision="ieee"), axis=0
        )  # fmt: skip
        time = softplus((tl.trans(times) + step_bias[None, :]).to(dtype).to(tl.float32))
        state, read = next_state(
            state, given[:, None, :], key[:, :, None], query[:, :, None], time[:, None, :],
            rates[None, :, :], 1,
        )  # fmt: skip
        out = gated_output(read, given, skip[None, :], gate)
        is_stored = of.inside & is_token[:, None]
        target = out_ptr + index[:, None] * out_stride + columns[None, :]
        tl.store(target, out.to(dtype), mask=is_stored)
        is_end = is_token[:, None] & is_kept(own, token)
        behind = state_behind(own, last[:, None])
        store_window(
            behind, window, Channels(of.columns, of.inside & is_end, of.taps, of.before),
            CHANNELS, TAPS,
        )  # fmt: skip
        tl.store(behind[:, :, None] + cells, state, mask=is_end[:, :, None] & inside[None, :, :])


def takes(rank: int, state_size: int) -> bool:
    """Returns whether weights and states of such a Mamba fit into registers."""
    return _channels(rank, state_size) >= FEWEST_CHANNELS


def _padded_rank(rank: int) -> int:
    return max(next_power_of_two(rank), SHORTEST_RANK)


def _channels(rank: int, state_size: int) -> int:
    """Returns the channels of a program."""
    by_states = MOST_CELLS // next_power_of_two(state_size)
    return min(CHANNELS, WEIGHTS // _padded_rank(rank), by_states)


def scan_inputs(
    out: Tensor,
    x: Tensor,
    projected: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    weight_bias: Tensor,
    norms: Sequence[Tensor] | None,
    eps: float | None,
    logs: Tensor,
    skips: Tensor,
    states: Tensor,
    requests: Requests,
    is_dependent: bool = False,
) -> None:
    """Computes `convolution.convolve`, `mamba.normalise`, the product with the projection to time
    steps, and `mamba.selective_scan`.

    Args:
        out: [tokens, channels], x's dtype, each row contiguous.
        x: [tokens, 2 * channels], inputs and gates, each row contiguous: float32, float16 or
            bfloat16.
        projected: [tokens, rank + 2 * state_size], what `project_inputs` returns, each row
            contiguous.
        taps, bias: see `project_inputs`.
        weight, weight_bias: [channels, rank] and [channels], contiguous, x's dtype.
        norms: the weights of the norms of rank, B and C, contiguous, x's dtype; None: all are 1.
        eps: added to the mean square; None: there are no norms.
        logs: [state_size, channels] float32, contiguous.
        skips: [channels] float32.
        states: [blocks, (taps - 1 + state_size) * channels] float32, the state of the convolution
            and that of the scan, with any stride between blocks.
        requests: the requests, at most MAX_ROWS.
        is_dependent: see `project_inputs`.

    One launch a layer, a program for up to 32 channels. For Jamba-1.7-Mini (8,192 channels, rank
    256, states of 16) 256 programs read 4.2 MB of weights, 0.5 MB of logarithms and 0.6 MB of
    states before they wait, 1.3 us at 4.26 TB/s; then the rows arrive in 0.6 us, and norms, product
    and states take 0.8 us: about 2.5 us. The states of eight requests are 4 MB more, and as much
    written: about 4 us. Norms, product and scan were launches of 1, 3 and 2 us.
    """
    state_size, channels = logs.shape
    rank = weight.shape[1]
    num_requests = len(requests.context_lens)
    check_inputs(x, taps, channels, num_requests)
    assert takes(rank, state_size), "they fit into registers"
    assert x.shape[1] == 2 * channels, "x: inputs and gates"
    assert out.shape == (len(x), channels), "out: a row for each token"
    assert projected.shape == (len(x), rank + 2 * state_size), "projected: rank, B and C"
    assert out.stride(1) == projected.stride(1) == 1, "rows must be contiguous"
    assert weight.is_contiguous(), "the projection must be contiguous"
    if num_requests == 0:
        return
    block = _channels(rank, state_size)
    _scan_inputs[(triton.cdiv(channels, block),)](
        out, x, projected, taps, x if bias is None else bias, weight, weight_bias,
        *((x, x, x) if norms is None else norms), logs, skips, states,
        requests.query_starts, requests.context_lens, requests.block_table, num_requests,
        out.stride(0), x.stride(0), projected.stride(0), states.stride(0),
        requests.block_table.stride(0), requests.interval, 0.0 if eps is None else eps,
        CHANNELS=channels, STATE=state_size, RANK=rank, TAPS=len(taps), HAS_BIAS=bias is not None,
        HAS_NORMS=eps is not None, HAS_WEIGHTS=norms is not None, IS_DEPENDENT=is_dependent,
        REQUESTS=MAX_ROWS, BLOCK=block, BLOCK_N=next_power_of_two(state_size), SLICES=NUM_WARPS,
        DEPTH=_padded_rank(rank) // NUM_WARPS, num_warps=NUM_WARPS, maxnreg=REGISTERS,
        **({"launch_pdl": True} if is_dependent else {}),
    )  # fmt: skip
