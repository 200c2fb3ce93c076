"""The kernel of all layers of a dense decoder, which `decoder` launches.

Its programs compute a layer in five phases: queries, keys and values with their norm; attention
with rotation, cache write and join; the output projection with its sum; gate and up with norm and
activation; down with its sum. Behind each phase all programs meet, since the next one reads what
all have written. What a program does before it waits does not depend on the others: it loads its
first weights, or its first keys and values, and asks the L2 cache for the weights behind these.

So memory is busy while programs meet, and while they attend, which takes six meetings' time and
reads little: then the cache gets the output projection and the beginning of gate and up.

Norms behind blocks (Gemma, GLM-4) are added by the product that reads the stream next: all programs
compute the sum, and the first one stores it to the stream's other place, since the others may still
read the present one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from shmllm_kernels.gpu.decode_attention_kernel import attend_part, part_of
from shmllm_kernels.gpu.decode_operands import LayerHeads
from shmllm_kernels.gpu.decoder_product import Target, ask_cache, multiply_columns, own_columns
from shmllm_kernels.gpu.few_rows_kernel import NormedRows, NormedSum
from shmllm_kernels.gpu.grid_meeting import Meeting, arrive, await_arrivals, leave


class Streams(NamedTuple):
    """The rows of a step's tokens, each contiguous, one behind the other: pointers.

    Attributes:
        residual: the residual stream.
        heads: query, key and value heads.
        attended: the outputs of all query heads.
        activated: the outputs of the activation.
        spare: the other place of the residual stream, if blocks have norms behind them.
        products: MAX_ROWS rows of zeros, and behind them the outputs of blocks that have.
    """

    residual: Any
    heads: Any
    attended: Any
    activated: Any
    spare: Any
    products: Any


class Sizes(NamedTuple):
    """The numbers of tokens, of requests and of layers, and the widths of `Streams`."""

    tokens: Any
    requests: Any
    layers: Any
    residual: Any
    heads: Any
    attended: Any
    activated: Any


class Norm(NamedTuple):
    """What norms of the residual stream, and those behind blocks, add to the mean square, and to
    their weights."""

    eps: Any
    offset: Any


class Layer(NamedTuple):
    """The weights of a layer, and its heads and window: a row of the table of layers.

    A row has the addresses of the weights in this order, then those of `LayerHeads` from the keys
    to the weights of heads' norms, and the window. The norms behind blocks may be missing.
    """

    mixer_norm: Any
    qkv: Any
    qkv_bias: Any
    output: Any
    output_bias: Any
    mlp_norm: Any
    gate_up: Any
    gate_up_bias: Any
    down: Any
    down_bias: Any
    mixer_post: Any
    mlp_post: Any
    heads: Any
    window: Any


NUM_COLUMNS = tl.constexpr(21)
"""The columns of the table of layers."""


@triton.jit
def _pointer(row, column, like):
    """Returns an address of the table as a pointer to numbers of the same kind as another one."""
    return tl.multiple_of(tl.load(row + column).to(like.dtype), 16)


@triton.jit
def _layer(table, index, streams, like, VALUES_AT: tl.constexpr):
    """Returns a layer of the table. VALUES_AT: where value heads begin in a row of heads."""
    row, x = table + index * NUM_COLUMNS, streams.residual
    heads = LayerHeads(
        streams.attended, streams.heads, streams.heads + VALUES_AT,
        _pointer(row, 12, like.key_cache),
        _pointer(row, 13, like.value_cache), tl.load(row + 14).to(like.table.dtype),
        tl.load(row + 15).to(like.slots.dtype), _pointer(row, 16, like.cos),
        _pointer(row, 17, like.sin), _pointer(row, 18, like.query_weight),
        _pointer(row, 19, like.key_weight), x,
    )  # fmt: skip
    return Layer(
        _pointer(row, 0, x), _pointer(row, 1, x), _pointer(row, 2, x), _pointer(row, 3, x),
        _pointer(row, 4, x), _pointer(row, 5, x), _pointer(row, 6, x), _pointer(row, 7, x),
        _pointer(row, 8, x), _pointer(row, 9, x), _pointer(row, 10, x), _pointer(row, 11, x),
        heads, tl.load(row + 20).to(tl.int32),
    )  # fmt: skip


@triton.jit
def _attend(
    heads, window, requests, step, strides, numbers, memory, meeting,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, ROTARY_HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, NORM: tl.constexpr, ROUNDS_ONCE: tl.constexpr,
    NUM_SPLITS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    MAX_TOKENS: tl.constexpr, NEW_KEYS: tl.constexpr, FEWEST_KEYS: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Attends to this program's parts of the contexts of all requests."""
    first, all_parts = tl.program_id(0), requests * (NUM_KV_HEADS * NUM_SPLITS)
    for further in range(0, all_parts - first, tl.num_programs(0)):
        head, split = (first + further) // NUM_SPLITS, (first + further) % NUM_SPLITS
        part = part_of(
            step, head // NUM_KV_HEADS, head % NUM_KV_HEADS, split, window,
            HAS_WINDOW, NUM_SPLITS, FEWEST_KEYS, TILE, MAX_TOKENS, True,
        )  # fmt: skip
        if not part.is_idle:
            attend_part(
                part, heads, strides, numbers, window, memory, None, None, None, meeting,
                HAS_WINDOW, HAS_CAP, False, ROTARY_HALF, IS_INTERLEAVED, NORM, ROUNDS_ONCE, False,
                False, 0,
                False, NUM_SPLITS, NUM_KV_HEADS, HEADS_PER_KV, BLOCK_SIZE, BLOCK_M, TILE, DIM,
                DIM_PADDED, VALUE_DIM, VALUE_PADDED, MAX_TOKENS, NEW_KEYS, HEADS_AT_ONCE, True,
                True, False, True,
            )  # fmt: skip
    await_arrivals(meeting)  # a program may have had no part


@triton.jit
def decode_layers(
    table,
    counters,
    streams,
    sizes,
    norm,
    scale,
    step,
    like,
    strides,
    numbers,
    memory,
    IS_FIRST: tl.constexpr,
    HAS_QKV_BIAS: tl.constexpr,
    HAS_OUTPUT_BIAS: tl.constexpr,
    HAS_MLP_BIAS: tl.constexpr,
    HAS_POSTS: tl.constexpr,
    HAS_POST_OFFSET: tl.constexpr,
    NAME: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    NEW_KEYS: tl.constexpr,
    FEWEST_KEYS: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
):
    programs, x = tl.num_programs(0), streams.residual
    arrivals = programs * 0
    between, blocks = x, Target(x, sizes.residual, scale)
    product = streams.products + ROWS * sizes.residual
    if HAS_POSTS:
        between, blocks = streams.spare, Target(product, sizes.residual, scale)
    for index in range(sizes.layers):
        layer = _layer(table, index, streams, like, NUM_KV_HEADS * (HEADS_PER_KV + 1) * DIM)
        qkv = own_columns(layer.qkv, layer.qkv_bias, sizes.heads, sizes.residual)
        output = own_columns(layer.output, layer.output_bias, sizes.residual, sizes.attended)
        gate_up = own_columns(layer.gate_up, layer.gate_up_bias, sizes.activated, sizes.residual)
        down = own_columns(layer.down, layer.down_bias, sizes.residual, sizes.activated)
        added = None
        if HAS_POSTS:
            # Of the layer before, and zeros before the first one.
            row = table + tl.maximum(index - 1, 0) * NUM_COLUMNS
            added = NormedSum(
                streams.products + tl.where(index == 0, 0, ROWS) * sizes.residual,
                _pointer(row, 11, x), between, sizes.residual, sizes.residual, norm.eps,
                norm.offset, scale,
            )  # fmt: skip
        rows = NormedRows(
            x, layer.mixer_norm, x, sizes.tokens, sizes.residual, sizes.residual, norm.eps,
            norm.offset, added, None,
        )  # fmt: skip
        multiply_columns(
            Target(streams.heads, sizes.heads, scale), rows, qkv, output,
            Meeting(counters, arrivals), "rms", IS_FIRST, HAS_QKV_BIAS, False, None, False,
            IS_WHOLE, HAS_POST_OFFSET, AHEAD, BLOCK_N, ROWS, SLICES, DEPTH,
        )  # fmt: skip
        arrive(counters)
        arrivals += programs
        if AHEAD:
            ask_cache(gate_up, IS_GATED, AHEAD, BLOCK_N, SLICES, DEPTH)
        _attend(
            layer.heads, layer.window, sizes.requests, step, strides, numbers, memory,
            Meeting(counters, arrivals), HAS_WINDOW, HAS_CAP, ROTARY_HALF, IS_INTERLEAVED,
            NORM, ROUNDS_ONCE, NUM_SPLITS, NUM_KV_HEADS, HEADS_PER_KV, BLOCK_SIZE, BLOCK_M,
            TILE, DIM, DIM_PADDED, VALUE_DIM, VALUE_PADDED, MAX_TOKENS, NEW_KEYS, FEWEST_KEYS,
            HEADS_AT_ONCE,
        )  # fmt: skip
        arrive(counters)
        arrivals += programs
        rows = NormedRows(
            streams.attended, x, x, sizes.tokens, sizes.attended, sizes.attended, 0.0, 0.0,
            None, None,
        )  # fmt: skip
        multiply_columns(
            blocks, rows, output, None, Meeting(counters, arrivals),
            None, False, HAS_OUTPUT_BIAS, not HAS_POSTS, None, False,
            IS_WHOLE, False, AHEAD, BLOCK_N, ROWS, SLICES, DEPTH,
        )  # fmt: skip
        arrive(counters)
        arrivals += programs
        added = None
        if HAS_POSTS:
            added = NormedSum(
                product, layer.mixer_post, x, sizes.residual, sizes.residual, norm.eps, norm.offset,
                scale,
            )  # fmt: skip
        rows = NormedRows(
            between, layer.mlp_norm, x, sizes.tokens, sizes.residual, sizes.residual, norm.eps,
            norm.offset, added, None,
        )  # fmt: skip
        multiply_columns(
            Target(streams.activated, sizes.activated, scale), rows, gate_up, down,
            Meeting(counters, arrivals), "rms", IS_FIRST, HAS_MLP_BIAS, False, NAME, IS_GATED,
            IS_WHOLE, HAS_POST_OFFSET, AHEAD, BLOCK_N, ROWS, SLICES, DEPTH,
        )  # fmt: skip
        arrive(counters)
        arrivals += programs
        rows = NormedRows(
            streams.activated, x, x, sizes.tokens, sizes.activated, sizes.activated, 0.0, 0.0,
            None, None,
        )  # fmt: skip
        is_last = index == sizes.layers - 1
        next_qkv = _pointer(table + tl.where(is_last, index, index + 1) * NUM_COLUMNS, 1, x)
        width = tl.where(is_last, 0, sizes.heads)  # behind the last layer nothing follows
        following = own_columns(next_qkv, next_qkv, width, sizes.residual)
        multiply_columns(
            blocks, rows, down, following, Meeting(counters, arrivals),
            None, False, HAS_MLP_BIAS, not HAS_POSTS, None, False,
            IS_WHOLE, False, AHEAD, BLOCK_N, ROWS, SLICES, DEPTH,
        )  # fmt: skip
        arrive(counters)
        arrivals += programs
    leave(counters, programs)
