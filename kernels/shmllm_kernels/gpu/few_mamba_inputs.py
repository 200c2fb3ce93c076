"""The first of two launches of Mamba 1 in a step of few tokens: convolution and projection.

`reference.convolution` has the formula of the convolution. A program convolves some channels of all
tokens and multiplies them with some rows of the projection. The one that ends last among those of
the same rows adds the parts of all channels up. So the weights are read once, which tensor cores
multiply, as in `few_rows_kernel`: the bits of a token do not depend on the others.

A dependent launch (from compute capability 9.0 on) loads weights and states before it waits for the
launch before. `few_mamba_scan`, the launch behind, changes the states.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shmllm_kernels.gpu.convolution import MOST_TAPS, Window, convolved, load_taps
from shmllm_kernels.gpu.decode_parts import is_last_part
from shmllm_kernels.gpu.few_rows import MAX_ROWS
from shmllm_kernels.gpu.kept_rows import WEIGHTS_PER_WARP
from shmllm_kernels.gpu.states import Requests, own_states, state_before

NUM_WARPS = 4
"""Each multiplies a slice of the channels."""
ROWS = 32
"""The rows of the projection that a program has in registers."""
COLUMNS = NUM_WARPS * WEIGHTS_PER_WARP // ROWS
"""The channels of these."""
PARTS_AT_ONCE = 16
"""How many parts are added at a time."""


@triton.jit
def _kept_inputs(
    state, columns, inside, offset, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    DISTANCE: tl.constexpr,
):  # fmt: skip
    """Returns the inputs so far before tokens as the states before the step have them, float32; 0
    where the step has them, and behind the taps.

    Args:
        state: pointers to the states.
        columns, inside: the channels.
        offset: the number of a token among those of its request in the step.
    """
    is_before = inside & (offset < DISTANCE) & (DISTANCE < TAPS)
    places = state + (TAPS - 1 - DISTANCE + offset) * CHANNELS + columns
    return tl.load(places, mask=is_before, other=0.0)


@triton.jit
def _inputs_of_step(
    places, inside, offset, x_stride, TAPS: tl.constexpr, DISTANCE: tl.constexpr
):  # fmt: skip
    """Returns the inputs so far before tokens that are in the step, float32, and otherwise 0."""
    is_there = inside & (offset >= DISTANCE) & (DISTANCE < TAPS)
    return tl.load(places - DISTANCE * x_stride, mask=is_there, other=0.0).to(tl.float32)


@triton.jit
def _add_parts(
    projected_ptr, parts_ptr, tokens, is_token, rows, is_row, stride, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Stores the sums of the parts of some rows, in the order of the parts."""
    inside = is_token[:, None] & is_row[None, :]
    total = tl.zeros((tokens.shape[0], rows.shape[0]), tl.float32)
    for begin in tl.static_range(0, PARTS, AT_ONCE):
        part = begin + tl.arange(0, AT_ONCE)[:, None, None]
        places = parts_ptr + (tokens[None, :, None] * PARTS + part) * WIDTH + rows[None, None, :]
        found = tl.load(places, mask=inside[None, :, :] & (part < PARTS), other=0.0)
        total += tl.sum(found, axis=0)
    target = projected_ptr + tokens[:, None] * stride + rows[None, :]
    tl.store(target, total.to(projected_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_requests"])
def _project_inputs(
    projected_ptr,
    parts_ptr,
    x_ptr,
    taps_ptr,
    bias_ptr,
    weight_ptr,
    states_ptr,
    counters_ptr,
    starts_ptr,
    context_ptr,
    table_ptr,
    num_requests,
    projected_stride,
    x_stride,
    state_stride,
    table_stride,
    interval,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    PARTS: tl.constexpr = (CHANNELS + SLICES * DEPTH - 1) // (SLICES * DEPTH)
    block, part = tl.program_id(0), tl.program_id(1)
    if IS_DEPENDENT:
        gdc_launch_dependents()
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    slices = part * SLICES + tl.arange(0, SLICES)[:, None, None]
    columns = slices * DEPTH + tl.arange(0, DEPTH)[None, None, :]
    is_row, inside = rows < WIDTH, columns < CHANNELS
    places = weight_ptr + rows[None, :, None] * CHANNELS + columns
    weight = tl.load(places, mask=is_row[None, :, None] & inside, other=0.0)
    taps = load_taps(taps_ptr, bias_ptr, columns, inside, CHANNELS, TAPS, HAS_BIAS)

    tokens, requests = tl.arange(0, TOKENS), tl.arange(0, TOKENS)
    num_tokens = tl.load(starts_ptr + num_requests)
    ends = tl.load(starts_ptr + 1 + requests, mask=requests < num_requests, other=TOKENS)
    token = tl.maximum(tl.minimum(tokens, num_tokens - 1), 0)
    owner = tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), axis=1)
    owner = tl.minimum(owner, num_requests - 1)
    own = own_states(
        owner, states_ptr, starts_ptr, context_ptr, table_ptr, state_stride, table_stride, interval
    )
    offset = (token - own.first)[None, :, None]
    state = state_before(own)[None, :, None]
    has_state = inside & (own.start > 0)[None, :, None]
    a = _kept_inputs(state, columns, has_state, offset, CHANNELS, TAPS, 3)
    b = _kept_inputs(state, columns, has_state, offset, CHANNELS, TAPS, 2)
    c = _kept_inputs(state, columns, has_state, offset, CHANNELS, TAPS, 1)
    if IS_DEPENDENT:
        gdc_wait()

    dtype: tl.constexpr = x_ptr.dtype.element_ty
    is_token = tokens < num_tokens
    inside = inside & is_token[None, :, None]
    places = x_ptr + token[None, :, None] * x_stride + columns
    a += _inputs_of_step(places, inside, offset, x_stride, TAPS, 3)
    b += _inputs_of_step(places, inside, offset, x_stride, TAPS, 2)
    c += _inputs_of_step(places, inside, offset, x_stride, TAPS, 1)
    newest = _inputs_of_step(places, inside, offset, x_stride, TAPS, 0)
    given = convolved(newest, Window(a, b, c), taps, dtype).to(dtype)
    product = tl.dot(weight, tl.permute(given, (0, 2, 1)), input_precision="ieee")
    target = parts_ptr + (tokens[None, :] * PARTS + part) * WIDTH + rows[:, None]
    tl.store(target, tl.sum(product, axis=0), mask=is_row[:, None] & is_token[None, :])
    if is_last_part(counters_ptr + block, PARTS):
        _add_parts(
            projected_ptr, parts_ptr, tokens, is_token, rows, is_row, projected_stride, PARTS,
            WIDTH, AT_ONCE,
        )  # fmt: skip


def num_row_blocks(width: int) -> int:
    """Returns how many counters the launch needs.

    Args:
        width: that of the projection.
    """
    return -(-width // ROWS)


def num_parts(channels: int) -> int:
    """Returns how many parts of sums the launch writes for each token and row."""
    return -(-channels // COLUMNS)


def project_inputs(
    projected: Tensor,
    parts: Tensor,
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    states: Tensor,
    counters: Tensor,
    requests: Requests,
    is_dependent: bool = False,
) -> None:
    """Computes ``convolve(x) @ weight.T``, where `reference.convolution.convolve` has the formula.
    It changes neither ``x`` nor states.

    Args:
        projected: [tokens, width], x's dtype, each row contiguous.
        parts: [tokens, num_parts(channels), width] float32, contiguous, scratch memory.
        x: [tokens, at least channels], the inputs of at most MAX_ROWS tokens, each row contiguous:
            float32, float16 or bfloat16.
        taps, bias: [taps, channels] and [channels], contiguous, x's dtype, those of the
            convolution; the bias may be None.
        weight: [width, channels], contiguous, x's dtype.
        states: [blocks, at least (taps - 1) * channels] float32, which begin with those of the
            convolution, with any stride between blocks.
        counters: at least num_row_blocks(width) int32, 0 before and after the launch.
        requests: the requests, at most MAX_ROWS.
        is_dependent: whether the launch may begin before the launch before it has ended. The GPU
            must have compute capability 9.0, and weights and states must be complete by then.

    One launch a layer, a program for ROWS rows and COLUMNS channels. For Jamba-1.7-Mini
    (8,192 channels, width 288) 288 programs read 4.7 MB of weights, and taps and states of 0.2 MB,
    which nine of them read: 1.2 us at 4.26 TB/s for one request, before the wait. Then the inputs
    arrive in 0.6 us, the sums take 0.2 us, the counter 0.6 us and the parts 0.6 us: about 2.5 us.
    The states of eight requests are 7 MB more from the L2 cache: about 4 us. Convolution and
    product were launches of 2 and 3 us.
    """
    width, channels = weight.shape
    num_requests = len(requests.context_lens)
    check_inputs(x, taps, channels, num_requests)
    assert weight.is_contiguous(), "the projection must be contiguous"
    assert projected.shape == (len(x), width), "projected: a row for each token"
    assert projected.stride(1) == 1, "rows must be contiguous"
    assert parts.shape == (len(x), num_parts(channels), width), "parts: those of each token"
    assert parts.is_contiguous(), "parts must be contiguous"
    assert len(counters) >= num_row_blocks(width), "counters: one for each block of rows"
    if num_requests == 0:
        return
    _project_inputs[num_row_blocks(width), num_parts(channels)](
        projected, parts, x, taps, x if bias is None else bias, weight, states, counters,
        requests.query_starts, requests.context_lens, requests.block_table, num_requests,
        projected.stride(0), x.stride(0), states.stride(0), requests.block_table.stride(0),
        requests.interval,
        CHANNELS=channels, WIDTH=width, TAPS=len(taps), HAS_BIAS=bias is not None,
        IS_DEPENDENT=is_dependent, TOKENS=MAX_ROWS, BLOCK_N=ROWS, SLICES=NUM_WARPS,
        DEPTH=COLUMNS // NUM_WARPS, AT_ONCE=PARTS_AT_ONCE, num_warps=NUM_WARPS,
        **({"launch_pdl": True} if is_dependent else {}),
    )  # fmt: skip


def check_inputs(x: Tensor, taps: Tensor, channels: int, num_requests: int) -> None:
    """Asserts that both launches of a step can read such inputs."""
    assert 2 <= len(taps) <= MOST_TAPS
    assert taps.shape[1] == channels, "taps: those of all channels"
    assert x.shape[1] >= channels, "x: all channels"
    assert x.stride(1) == 1, "rows must be contiguous"
    assert max(len(x), num_requests) <= MAX_ROWS, f"at most {MAX_ROWS} tokens and requests"
