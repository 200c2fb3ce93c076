"""Kernels of a gated delta net (Yang, Kautz and Hatamizadeh, 2024), behind its convolution.

Each value head has a state S [key_dim, value_dim] float32. A token with query q, key k, value v,
decay a and rate b changes it to ``S = a S + k (b (v - a S'k))'`` and its output is ``S'q``.
One thread computes a column of S for all tokens of a request, one after the other, and adds up in
the order of the rows: the result does not depend on the steps that the tokens were divided into.

A token's row of x is, side by side: queries and keys [key_heads, key_dim] each, values and the
output's gates [value_heads, value_dim] each, a rate and a decay for each value head.
"""

from __future__ import annotations

import numpy as np

from shmllm_kernels.cpu.functions import exp, sigmoid, silu, softplus
from shmllm_kernels.cpu.heads import sum_of_squares
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import float_of_word, floats, number, word
from shmllm_kernels.cpu.norms import KINDS
from shmllm_kernels.cpu.rows import count_pieces, rows_of_piece
from shmllm_kernels.cpu.simd import LANES, Emitter, Loop
from shmllm_kernels.cpu.states import (
    clear,
    columns_at_once,
    end_of_stretch,
    num_requests,
    state_at,
    tokens_of,
)

HEAD_MULTIPLE = 16
"""What the widths of heads are multiples of: the lanes of the widest vectors."""
NORM_EPS = 1e-6
ROWS_AT_ONCE = 4
"""The rows of S that are added up separately, so that no addition waits for the one before."""


@compiled
def _scale_to_unit(row, width, factor):
    values = floats(row)
    scale = factor / np.sqrt(sum_of_squares(row, width) + np.float32(NORM_EPS))
    for i in range(width):
        values[i] = values[i] * scale


@compiled
def _prepare(operands, piece, thread, num_threads, kind):
    x, stride, key_heads, key_dim, value_heads, value_dim = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
        word(operands, 5), word(operands, 6),
    )  # fmt: skip
    logs, biases = floats(word(operands, 7)), word(operands, 8)
    keys, values = key_heads * key_dim, value_heads * value_dim
    query_scale = np.float32(1.0) / np.sqrt(np.float32(key_dim))
    begin, end = rows_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        row = x + token * stride
        numbers = floats(row)
        for i in range(2 * keys + values):
            numbers[i] = silu(numbers[i], np.float32(1.0))
        for head in range(key_heads):
            _scale_to_unit(row + 4 * head * key_dim, key_dim, query_scale)
            _scale_to_unit(row + 4 * (keys + head * key_dim), key_dim, np.float32(1.0))
        rates = floats(row + 4 * (2 * keys + 2 * values))
        decays = floats(row + 4 * (2 * keys + 2 * values + value_heads))
        for head in range(value_heads):
            rates[head] = sigmoid(rates[head])
            time = softplus(decays[head] + number(biases, head, kind))
            decays[head] = exp(-(exp(min(logs[head], np.float32(80.0))) * time))


PREPARE = {kind: Kernel(count_pieces, _prepare, kind) for kind in KINDS}
"""Kernels by the dtype name of the biases. In place: queries, keys and values become ``silu(x)``;
each query and key is divided by its length, and queries by sqrt(key_dim); a rate becomes
``sigmoid(x)``, and a decay ``exp(-exp(log) * softplus(x + bias))``.

Operands: address of the number of rows; x, its stride in bytes; key_heads; key_dim; value_heads;
value_dim; logs float32 [value_heads]; biases [value_heads].
"""


@emitted
def _update(builder, source, target, depth, query, key, value, out, decay, rate, vectors):
    """Computes one token for some columns, which are `vectors` vectors.

    Args: source, target: addresses of these columns of S before and after; may be equal. depth:
    key_dim. query, key: addresses. value, out: addresses of these columns. decay, rate: float32.
    It prefetches the next columns, which follow in memory.
    """
    e, vectors = Emitter(builder), vectors.constant
    size = 4 * e.lanes
    following = builder.add(source, builder.mul(depth, e.const(size * vectors)))

    def rows(loop):
        """The row's offset in a query or key, and that of its columns, of each row at once."""
        for row in range(ROWS_AT_ONCE):
            index = builder.add(loop.index, e.const(row))
            columns = builder.mul(index, e.const(size * vectors))
            yield (
                builder.mul(index, e.const(4)),
                [builder.add(columns, e.const(size * vector)) for vector in range(vectors)],
            )

    def scalar(address, offset):
        return e.broadcast(e.load_scalar(e.at(address, offset)))

    loop = Loop(e, e.const(0), depth, ROWS_AT_ONCE)
    loop.begin([e.zeros()] * (ROWS_AT_ONCE * (2 * vectors + 1)))
    old, totals = iter(loop.values), []
    for offset, columns in rows(loop):
        of_query, of_key = scalar(query, offset), scalar(key, offset)
        for column in columns:
            state = e.load(e.at(source, column))
            totals += [e.fma(state, of_key, next(old)), e.fma(state, of_query, next(old))]
        totals.append(e.fma(of_query, of_key, next(old)))
    loop.end(totals)
    sums = _added(builder, totals)
    factor, strength = e.broadcast(decay), e.broadcast(rate)
    changes = []
    for vector in range(vectors):
        of_key, of_query = (builder.fmul(factor, sums[2 * vector + n]) for n in range(2))
        given = e.load(e.at(value, size * vector))
        changes.append(builder.fmul(builder.fsub(given, of_key), strength))
        e.store(e.fma(sums[-1], changes[-1], of_query), e.at(out, size * vector))
    loop = Loop(e, e.const(0), depth, ROWS_AT_ONCE)
    loop.begin([])
    for offset, columns in rows(loop):
        of_key = scalar(key, offset)
        for column, change in zip(columns, changes, strict=True):
            kept = builder.fmul(factor, e.load(e.at(source, column)))
            e.prefetch(e.at(following, column))
            e.store(e.fma(of_key, change, kept), e.at(target, column))
    loop.end([])


def _added(builder, totals):
    """Adds up what the rows at once have, by halves."""
    rows = ROWS_AT_ONCE
    while rows > 1:
        rows, half = rows // 2, len(totals) // 2
        totals = [builder.fadd(a, b) for a, b in zip(totals[:half], totals[half:], strict=True)]
    return totals


@compiled
def _pieces(operands, piece, thread, num_threads):
    return num_requests(operands) * word(operands, 14)


@compiled
def _run(operands, piece, thread, num_threads, vectors):
    value_heads, value_dim = word(operands, 14), word(operands, 15)
    head, tokens = piece % value_heads, tokens_of(operands, piece // value_heads)
    for column in range(0, value_dim, vectors * LANES):
        _compute_columns(operands, tokens, head, column, vectors)


@compiled
def _compute_columns(operands, tokens, head, first, vectors):
    """Computes all tokens of a request for some columns of a head."""
    x, stride, key_heads, key_dim, value_heads, value_dim = (
        word(operands, 10), word(operands, 11), word(operands, 12), word(operands, 13),
        word(operands, 14), word(operands, 15),
    )  # fmt: skip
    keys, values, column = key_heads * key_dim, value_heads * value_dim, head * value_dim + first
    own_key = head // word(operands, 19) % key_heads * key_dim
    offset, position = word(operands, 18) + 4 * key_dim * column, tokens.start
    if tokens.start == 0:
        source = state_at(operands, tokens, 0) + offset
        clear(source, 4 * key_dim * (vectors * LANES))
    else:
        source = state_at(operands, tokens, tokens.start - 1) + offset
    while position < tokens.end:
        end = end_of_stretch(operands, tokens, position)
        target = state_at(operands, tokens, position) + offset
        for at in range(position, end):
            token = tokens.row + at - tokens.start
            place = x + token * stride
            gates = floats(place + 4 * (2 * keys + 2 * values))
            out = word(operands, 16) + token * word(operands, 17) + 4 * column
            _update(
                source, target, key_dim, place + 4 * own_key, place + 4 * (keys + own_key),
                place + 4 * (2 * keys + column), out, gates[value_heads + head], gates[head],
                vectors,
            )  # fmt: skip
            source = target
        position = end


_DELTA_RULE = {vectors: Kernel(_pieces, _run, vectors) for vectors in (1, 2)}


def delta_rule(value_dim: int) -> Kernel:
    """Returns the kernel that computes the outputs and the states behind them.

    Operands: those of `states`, and

        10 x: float32 rows, as PREPARE left them
        11 the stride of x in bytes (a number)
        12 key_heads, 13 key_dim, 14 value_heads, 15 value_dim (numbers)
        16 out: float32 rows [value_heads, value_dim]
        17 the stride of out in bytes (a number)
        18 the offset of the states S in a block (a number): for each head, for each few columns,
           [key_dim, columns]; rows of whole heads would fall into an eighth of the L1 cache's sets
        19 the number of value heads that follow each other and share a key head (a number)
    """
    return _DELTA_RULE[columns_at_once(value_dim) // LANES]


@compiled
def _gated_norm(operands, piece, thread, num_threads, kind):
    x, stride, gate, gate_stride, num_heads, width, weight = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
        word(operands, 5), word(operands, 6), word(operands, 7),
    )  # fmt: skip
    eps = float_of_word(word(operands, 8))
    begin, end = rows_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        for head in range(num_heads):
            row = x + token * stride + 4 * head * width
            values, gates = floats(row), floats(gate + token * gate_stride + 4 * head * width)
            mean = sum_of_squares(row, width) / np.float32(width)
            scale = np.float32(1.0) / np.sqrt(mean + eps)
            for i in range(width):
                values[i] = (
                    values[i] * scale * number(weight, i, kind) * silu(gates[i], np.float32(1.0))
                )


GATED_NORM = {kind: Kernel(count_pieces, _gated_norm, kind) for kind in KINDS}
"""Kernels by the dtype name of the weight. In place, for each head: ``x = rms_norm(x) * weight *
silu(gate)``.

Operands: address of the number of rows; x, its stride in bytes; gate, its stride in bytes; heads;
their width; weight [width]; eps, a number from `word_of_float`.
"""
