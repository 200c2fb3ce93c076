"""Products of tokens with the weights of their experts, one expert after the other.

`pairs.SORT` lays the pairs of a token and an expert out in blocks, each of one expert. A piece of
work is a block and a chunk of columns: a step reads the weights of those experts that its tokens
chose, once for every ROWS_AT_ONCE rows. The tiles are those of `products`: a pair's result has the
bits that a product of its expert alone would give it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shmllm_kernels.cpu.bounded_activation import shifted_product
from shmllm_kernels.cpu.expert_lora import add_to_block, has_adapters
from shmllm_kernels.cpu.functions import gelu, gelu_tanh, relu_squared, silu
from shmllm_kernels.cpu.group_panels import PANEL_COLUMNS
from shmllm_kernels.cpu.group_products import KINDS as KINDS_IN_GROUPS
from shmllm_kernels.cpu.group_products import product as product_in_groups
from shmllm_kernels.cpu.group_rounding import GROUPINGS
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.lora import DTYPES
from shmllm_kernels.cpu.memory import float_of_word, floats, itemsize, put_number, word
from shmllm_kernels.cpu.pairs import BLOCK_WORDS
from shmllm_kernels.cpu.product_tiles import IN_ORDER, LISTED, TILE_COLUMNS
from shmllm_kernels.cpu.products import (
    COLUMNS_AT_ONCE,
    KINDS,
    ROWS_AT_ONCE,
    Rows,
    Weights,
    product,
    width_in,
)
from shmllm_kernels.cpu.unpacking import row_bytes, scale_bytes

SCRATCH_BYTES = 4 * ROWS_AT_ONCE * 2 * (2 * COLUMNS_AT_ONCE)
"""The scratch memory of each thread: gate and up of a block's rows and of one chunk."""

_ACTIVATIONS = (
    "silu", "silu_bounded", "silu_clamped", "silu_shifted", "gelu_tanh", "gpt_oss", "relu_squared",
    "gelu",
)  # fmt: skip
SILU, SILU_BOUNDED, SILU_CLAMPED, SILU_SHIFTED, GELU_TANH, GPT_OSS, RELU_SQUARED, GELU = (
    _ACTIVATIONS
)
_LIMIT = 7.0  # of gpt-oss


class PairWeights(NamedTuple):
    """The weights of pairs where these multiply what experts read: int64 words.

    ids: the address of [tokens, top_k] int64, the experts of each token.
    weights: the address of [tokens, top_k] float32.
    top_k: the number of experts of each token.
    """

    ids: int
    weights: int
    top_k: int


def _is_in_groups(x_kind: str) -> bool:
    return x_kind in GROUPINGS


def _is_alone(activation: str) -> bool:
    """Returns whether it is one of up, without a gate."""
    return activation in (RELU_SQUARED, GELU)


def _is_bounded(activation: str) -> bool:
    return activation in (SILU_BOUNDED, SILU_CLAMPED, SILU_SHIFTED)


def _has_gate_first(activation: str) -> bool:
    """Returns whether the columns of gate precede those of up."""
    return _is_bounded(activation) or activation in (SILU, GELU_TANH)


def _tile_columns(x_kind: str) -> int:
    return PANEL_COLUMNS if _is_in_groups(x_kind) else TILE_COLUMNS


def _out_kind(x_kind: str) -> str:
    """Returns the dtype name of the activation of gate and up. (A group's numbers are rounded when
    all are known.)"""
    return "float32" if _is_in_groups(x_kind) else x_kind


@compiled
def _chunk_width(num_columns, num_threads, x_kind):
    return width_in(_tile_columns(x_kind), COLUMNS_AT_ONCE, num_columns, num_threads)


@compiled
def _num_chunks(num_columns, num_threads, x_kind):
    return num_columns // _chunk_width(num_columns, num_threads, x_kind)


@compiled
def _pieces(operands, piece, thread, num_threads):
    return word(word(operands, 0), 0) * _num_chunks(word(operands, 7), num_threads, "float32")


@compiled
def _pieces_in_groups(operands, piece, thread, num_threads):
    return word(word(operands, 0), 0) * _num_chunks(word(operands, 7), num_threads, "int8-g32")


@compiled
def _block(operands, piece, num_threads, x_kind):
    """Returns the expert, the first pair and the number of pairs of a piece."""
    index = piece // _num_chunks(word(operands, 7), num_threads, x_kind)
    block = word(operands, 1) + index * (8 * BLOCK_WORDS)
    return word(block, 0), word(block, 1), word(block, 2)


@compiled
def _chunk(operands, piece, num_threads, x_kind):
    """Returns the first column and the number of columns of a piece."""
    num_columns = word(operands, 7)
    num_chunks = _num_chunks(num_columns, num_threads, x_kind)
    chunk, width = piece % num_chunks, _chunk_width(num_columns, num_threads, x_kind)
    is_last = chunk == num_chunks - 1
    return chunk * width, num_columns - chunk * width if is_last else width


@compiled
def _product(rows, num_rows, weights, columns, num_columns, out, out_stride):
    """As `products.product`, by the tiles for these rows."""
    if _is_in_groups(rows.kind):
        product_in_groups(rows, num_rows, weights, columns, num_columns, out, out_stride)
    else:
        product(rows, num_rows, weights, columns, num_columns, out, out_stride)


@compiled
def _of_expert(operands, expert, num_columns, kind, bias_kind):
    """Returns one expert's weights, [num_columns, k]."""
    address, k, scale, bias = (
        word(operands, 6), word(operands, 8), word(operands, 9), word(operands, 10),
    )  # fmt: skip
    first = expert * num_columns
    bias = bias + first * itemsize(bias_kind) if bias != 0 else 0
    return Weights(
        address + first * row_bytes(k, kind), k, scale + first * scale_bytes(k, kind), bias, kind,
        bias_kind,
    )  # fmt: skip


@compiled
def _of_gate(x, activation):
    return gelu_tanh(x) if activation == GELU_TANH else silu(x, np.float32(1.0))


@compiled
def _bounded_product(gate, up, bound, activation):
    if activation == SILU_SHIFTED:
        return shifted_product(gate, up, bound)
    one, factor = np.float32(1.0), max(min(up, bound), -bound)
    if activation == SILU_CLAMPED:
        return silu(min(gate, bound), one) * factor
    return min(silu(gate, one), bound) * factor


@compiled
def _alone(x, activation):
    return gelu(x) if activation == GELU else relu_squared(x)


@compiled
def _activate(scratch, width, out, bound, activation, x_kind):
    """Writes one row's activation. scratch: gate and up of `width` columns, or up. bound: that of
    the bounded ones."""
    gate = floats(scratch)
    if _is_alone(activation):
        for i in range(width):
            put_number(out, i, _alone(gate[i], activation), x_kind)
    elif _is_bounded(activation):
        factors = floats(scratch + 4 * width)
        for i in range(width):
            value = _bounded_product(gate[i], factors[i], bound, activation)
            put_number(out, i, value, x_kind)
    elif activation != GPT_OSS:
        up = floats(scratch + 4 * width)
        for i in range(width):
            put_number(out, i, _of_gate(gate[i], activation) * up[i], x_kind)
    else:
        for i in range(width):
            value = shifted_product(gate[2 * i], gate[2 * i + 1], np.float32(_LIMIT))
            put_number(out, i, value, x_kind)


@compiled
def _products_of_block(operands, piece, thread, num_threads, x_kind, kind, bias_kind, activation):
    """Writes gate and up of a block and a chunk of columns to the scratch memory."""
    expert, first, count = _block(operands, piece, num_threads, x_kind)
    column, width = _chunk(operands, piece, num_threads, x_kind)
    inner = word(operands, 7)
    rows = Rows(
        word(operands, 2), word(operands, 3), word(operands, 11) + 8 * first, x_kind, LISTED
    )
    num_columns = inner if _is_alone(activation) else 2 * inner
    weights = _of_expert(operands, expert, num_columns, kind, bias_kind)
    scratch, stride = word(operands, 12) + thread * SCRATCH_BYTES, 8 * width
    if _is_alone(activation):
        _product(rows, count, weights, column, width, scratch - 4 * column, stride)
    elif activation != GPT_OSS:
        up = inner + column
        _product(rows, count, weights, column, width, scratch - 4 * column, stride)
        _product(rows, count, weights, up, width, scratch + 4 * width - 4 * up, stride)
    else:
        _product(rows, count, weights, 2 * column, 2 * width, scratch - 8 * column, stride)


@compiled
def _weigh_gate(weights, token, expert, gate, width):
    """Multiplies the gate of a pair by its weight; `weights` is the address of `PairWeights`."""
    values, top_k = floats(gate), word(weights, 2)
    pair = token * top_k
    while word(word(weights, 0), pair) != expert:
        pair += 1
    factor = floats(word(weights, 1))[pair]
    for i in range(width):
        values[i] *= factor


@compiled
def _activate_block(
    operands, piece, thread, num_threads, out, out_stride, x_kind, out_kind, activation
):  # fmt: skip
    """Writes the activation of what lies in the scratch memory."""
    expert, first, count = _block(operands, piece, num_threads, x_kind)
    column, width = _chunk(operands, piece, num_threads, x_kind)
    scratch, stride = word(operands, 12) + thread * SCRATCH_BYTES, 8 * width
    target = out + first * out_stride + itemsize(out_kind) * column
    for row in range(count):
        own = scratch + row * stride
        if word(operands, 13) != 0:
            token = word(word(operands, 11), first + row)
            _weigh_gate(word(operands, 13), token, expert, own, width)
        bound = float_of_word(word(operands, 17))
        _activate(own, width, target + row * out_stride, bound, activation, out_kind)


@compiled
def _gate_and_up(operands, piece, thread, num_threads, x_kind, kind, bias_kind, activation):
    _products_of_block(operands, piece, thread, num_threads, x_kind, kind, bias_kind, activation)
    out, out_stride = word(operands, 4), word(operands, 5)
    _activate_block(
        operands, piece, thread, num_threads, out, out_stride, x_kind, _out_kind(x_kind), activation
    )  # fmt: skip


@compiled
def _adapt_block(operands, piece, thread, num_threads, x_kind, activation, lora_kind):
    """Adds what adapters add to gate and up in the scratch memory."""
    adapters = word(operands, 14)
    expert, first, count = _block(operands, piece, num_threads, x_kind)
    column, width = _chunk(operands, piece, num_threads, x_kind)
    scratch, stride = word(operands, 12) + thread * SCRATCH_BYTES, 8 * width
    begin = 2 * column if activation == GPT_OSS else column
    end = begin + 2 * width if activation == GPT_OSS else begin + width
    add_to_block(adapters, expert, first, count, begin, end, scratch - 4 * begin, stride, lora_kind)
    if _has_gate_first(activation):
        up = word(operands, 7) + column
        add_to_block(
            adapters, expert, first, count, up, up + width, scratch + 4 * width - 4 * up, stride,
            lora_kind,
        )  # fmt: skip


@compiled
def _round_block(operands, piece, num_threads, x_kind):
    """Rounds the activation of a block and a chunk of columns."""
    _, first, count = _block(operands, piece, num_threads, x_kind)
    column, width = _chunk(operands, piece, num_threads, x_kind)
    for row in range(first, first + count):
        exact = floats(word(operands, 15) + row * word(operands, 16))
        out = word(operands, 4) + row * word(operands, 5)
        for i in range(column, column + width):
            put_number(out, i, exact[i], x_kind)


@compiled
def _adapted_gate_and_up(
    operands, piece, thread, num_threads, x_kind, kind, bias_kind, activation, lora_kind
):  # fmt: skip
    _products_of_block(operands, piece, thread, num_threads, x_kind, kind, bias_kind, activation)
    if has_adapters(word(operands, 14)):
        _adapt_block(operands, piece, thread, num_threads, x_kind, activation, lora_kind)
    exact, exact_stride = word(operands, 15), word(operands, 16)
    _activate_block(
        operands, piece, thread, num_threads, exact, exact_stride, x_kind, "float32", activation
    )  # fmt: skip
    if _out_kind(x_kind) != "float32":
        _round_block(operands, piece, num_threads, x_kind)


@compiled
def _down(operands, piece, thread, num_threads, x_kind, kind, bias_kind):
    expert, first, count = _block(operands, piece, num_threads, x_kind)
    column, width = _chunk(operands, piece, num_threads, x_kind)
    x_stride, out_stride = word(operands, 3), word(operands, 5)
    rows = Rows(word(operands, 2) + first * x_stride, x_stride, 0, x_kind, IN_ORDER)
    weights = _of_expert(operands, expert, word(operands, 7), kind, bias_kind)
    out = word(operands, 4) + first * out_stride
    _product(rows, count, weights, column, width, out, out_stride)


@compiled
def _adapted_down(operands, piece, thread, num_threads, x_kind, kind, bias_kind, lora_kind):
    _down(operands, piece, thread, num_threads, x_kind, kind, bias_kind)
    adapters, out_stride = word(operands, 11), word(operands, 5)
    if has_adapters(adapters):
        expert, first, count = _block(operands, piece, num_threads, x_kind)
        column, width = _chunk(operands, piece, num_threads, x_kind)
        out = word(operands, 4) + first * out_stride
        add_to_block(
            adapters, expert, first, count, column, column + width, out, out_stride, lora_kind
        )


_KINDS = [kinds for kinds in (*KINDS, *KINDS_IN_GROUPS) if kinds[0] != "int8"]
"""(No thread knows the largest number of a row of int8.)"""
_PIECES = {kinds[0]: _pieces_in_groups if kinds in KINDS_IN_GROUPS else _pieces for kinds in _KINDS}

GATE_AND_UP = {
    (*kinds, activation): Kernel(_PIECES[kinds[0]], _gate_and_up, *kinds, activation)
    for kinds in _KINDS
    for activation in _ACTIVATIONS
}
"""Kernels by the dtype names of x and out, weights and bias, and the activation of gate and up; out
is float32 if x has a name in `group_rounding.GROUPINGS`.

SILU: ``silu(gate) * up``, where the columns of gate precede those of up; GELU_TANH likewise.
SILU_BOUNDED: ``min(silu(gate), bound) * min(max(up, -bound), bound)``, in this order, too;
SILU_CLAMPED: ``silu(min(gate, bound)) * min(max(up, -bound), bound)``.
SILU_SHIFTED: ``(up + 1) * gate * sigmoid(1.702 * gate)`` with gate at most the bound and up from
-bound to bound; GPT_OSS likewise with 7, where columns of gate and up alternate. RELU_SQUARED:
``max(up, 0)**2``, without a gate: weights and bias have inner columns; GELU (with the error
function) likewise.

Operands (addresses; strides in bytes; all but x, out, weights and bias float32 or int64):

    0  the address of the number of blocks, 1  blocks: see `pairs.SORT`
    2  x [tokens, k], 3  its stride
    4  out [pairs, inner], the activation, in the order of the sorted pairs, 5  its stride
    6  weights [experts, 2 * inner, k] contiguous, 7  inner, 8  k
    9  scales of each expert or 0, see `products.Weights`, 10  bias [experts, 2 * inner] or 0
    11 tokens: int64, the row of x of each sorted pair
    12 scratch [threads, SCRATCH_BYTES]
    13 `PairWeights`, by which gates are multiplied before SILU or GELU_TANH, or 0
    17 bound, a number from `word_of_float`, of SILU_BOUNDED and SILU_CLAMPED alone
"""

DOWN = {kinds: Kernel(_PIECES[kinds[0]], _down, *kinds) for kinds in _KINDS}
"""Kernels by the dtype names of x, weights and bias. They have the operands 0 to 10 of GATE_AND_UP,
with x [pairs, k] and out [pairs, columns], float32, both in the order of the sorted pairs, weights
[experts, columns, k], columns in place of inner, and bias [experts, columns].
"""

ADAPTED_GATE_AND_UP = {
    (*kinds, activation, lora_kind): Kernel(
        _PIECES[kinds[0]], _adapted_gate_and_up, *kinds, activation, lora_kind
    )
    for *kinds, activation in GATE_AND_UP
    for lora_kind in DTYPES
}
"""Kernels by the keys of GATE_AND_UP and the dtype name of adapters' matrices, which add what these
add to gate and up. Operands: those of GATE_AND_UP, then

    14 `expert_lora.ExpertAdapters`
    15 exact [pairs, inner] float32, the activation before it is rounded; out if that is float32
    16 its stride
"""

ADAPTED_DOWN = {
    (*kinds, lora_kind): Kernel(_PIECES[kinds[0]], _adapted_down, *kinds, lora_kind)
    for kinds in DOWN
    for lora_kind in DTYPES
}
"""Kernels by the keys of DOWN and the dtype name of adapters' matrices, likewise. Operands: those
of DOWN, then 11 `expert_lora.ExpertAdapters`.
"""
