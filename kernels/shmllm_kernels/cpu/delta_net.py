"""Kernels of a gated delta net (Yang, Kautz and Hatamizadeh, 2024), behind its convolution.

Each value head has a state S [key_dim, value_dim] float32. A token with query q, key k, value v,
decay a and rate b changes it to ``S = a S + k (b (v - a S'k))'`` and its output is ``S'q``.
One thread computes a column of S for all tokens of a request, one after the other, and adds up in
the order of the rows: the result does not depend on the steps that the tokens were divided into.
A decay is a number, or one for each channel of the key, each row of S (Kimi Team, 2025).

A token's row of x has, side by side: queries and keys [key_heads, key_dim] each, and values
[value_heads, value_dim]; and behind these a rate for each value head.
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
def _prepare(operands, piece, thread, num_threads, kind, by_row):
    x, stride, key_heads, key_dim, value_heads, value_dim = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
        word(operands, 5), word(operands, 6),
    )  # fmt: skip
    logs, biases = floats(word(operands, 7)), word(operands, 8)
    keys, values = key_heads * key_dim, value_heads * value_dim
    query_scale = np.float32(1.0) / np.sqrt(np.float32(key_dim))
    most, least = float_of_word(word(operands, 12)), float_of_word(word(operands, 13))
    begin, end = rows_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        row = x + token * stride
        numbers = floats(row)
        for i in range(2 * keys + values):
            numbers[i] = silu(numbers[i], np.float32(1.0))
        for head in range(key_heads):
            _scale_to_unit(row + 4 * head * key_dim, key_dim, query_scale)
            _scale_to_unit(row + 4 * (keys + head * key_dim), key_dim, np.float32(1.0))
        rates = floats(word(operands, 9) + token * stride)
        decays = floats(word(operands, 10) + token * word(operands, 11))
        for head in range(value_heads):
            rates[head] = most * sigmoid(rates[head])
            growth = exp(min(logs[head], np.float32(80.0)))
            if by_row:
                for i in range(head * key_dim, (head + 1) * key_dim):
                    time = decays[i] + number(biases, i, kind)
                    if least < np.float32(0.0):
                        decays[i] = exp(least * sigmoid(growth * time))
                    else:
                        decays[i] = exp(-(growth * softplus(time)))
            else:
                time = softplus(decays[head] + number(biases, head, kind))
                decays[head] = exp(-(growth * time))


PREPARE = {
    (kind, by_row): Kernel(count_pieces, _prepare, kind, int(by_row))
    for kind in KINDS
    for by_row in (False, True)
}
"""Kernels by the dtype name of the biases, and by whether each row of S has a decay. In place:
queries, keys and values become ``silu(x)``; each query and key is divided by its length, and
queries by sqrt(key_dim); a rate becomes ``most * sigmoid(x)``, and a decay ``exp(-exp(log) *
softplus(x + bias))``, or, by rows and if least is below 0, ``exp(least * sigmoid(exp(log) * (x +
bias)))``.

Operands: address of the number of rows; x, its stride in bytes; key_heads; key_dim; value_heads;
value_dim; logs float32 [value_heads]; biases; rates, with the stride of x; decays, as many as
biases, their stride in bytes; most and least, numbers from `word_of_float`.
"""


@emitted
def _update(builder, source, target, depth, query, key, value, out, decay, rate, vectors, by_row):
    """Computes one token for some columns, which are `vectors` vectors.

    Args: source, target: addresses of these columns of S before and after; may be equal. depth:
    key_dim. query, key: addresses. value, out: addresses of these columns. decay: float32, or, if
    each row of S has its own (`by_row`), their address. rate: float32.
    It prefetches the next columns, which follow in memory.
    """
    e, vectors, by_row = Emitter(builder), vectors.constant, by_row.constant
    whole = None if by_row else e.broadcast(decay)
    strength, totals = e.broadcast(rate), []
    loop = Loop(e, e.const(0), depth, ROWS_AT_ONCE)
    loop.begin([e.zeros()] * (ROWS_AT_ONCE * (2 * vectors + 1)))
    old = iter(loop.values)
    for offset, columns in _rows(e, loop, vectors):
        of_query, of_key = (e.broadcast(e.load_scalar(e.at(at, offset))) for at in (query, key))
        factors = of_key, of_query
        if by_row:
            kept = e.broadcast(e.load_scalar(e.at(decay, offset)))
            factors = builder.fmul(of_key, kept), builder.fmul(of_query, kept)
        for column in columns:
            state = e.load(e.at(source, column))
            totals += [e.fma(state, factor, next(old)) for factor in factors]
        totals.append(e.fma(of_query, of_key, next(old)))
    loop.end(totals)
    sums, changes = _added(builder, totals), []
    for vector in range(vectors):
        read = sums[2 * vector : 2 * vector + 2]
        of_key, of_query = read if by_row else [builder.fmul(whole, each) for each in read]
        given = e.load(e.at(value, 4 * e.lanes * vector))
        changes.append(builder.fmul(builder.fsub(given, of_key), strength))
        e.store(e.fma(sums[-1], changes[-1], of_query), e.at(out, 4 * e.lanes * vector))
    _change_rows(e, source, target, depth, key, decay, whole, changes)


def _rows(e, loop, vectors):
    """The row's offset in a query or key, and that of its columns, of each row at once."""
    size = 4 * e.lanes
    for row in range(ROWS_AT_ONCE):
        index = e.builder.add(loop.index, e.const(row))
        columns = e.builder.mul(index, e.const(size * vectors))
        yield (
            e.builder.mul(index, e.const(4)),
            [e.builder.add(columns, e.const(size * vector)) for vector in range(vectors)],
        )


def _change_rows(e, source, target, depth, key, decay, whole, changes):
    """Writes the rows of S behind a token. whole: the decay of all, or None."""
    following = e.builder.add(source, e.builder.mul(depth, e.const(4 * e.lanes * len(changes))))
    loop = Loop(e, e.const(0), depth, ROWS_AT_ONCE)
    loop.begin([])
    for offset, columns in _rows(e, loop, len(changes)):
        of_key = e.broadcast(e.load_scalar(e.at(key, offset)))
        factor = e.broadcast(e.load_scalar(e.at(decay, offset))) if whole is None else whole
        for column, change in zip(columns, changes, strict=True):
            kept = e.builder.fmul(factor, e.load(e.at(source, column)))
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
def _run(operands, piece, thread, num_threads, vectors, by_row):
    value_heads, value_dim = word(operands, 14), word(operands, 15)
    head, tokens = piece % value_heads, tokens_of(operands, piece // value_heads)
    for column in range(0, value_dim, vectors * LANES):
        _compute_columns(operands, tokens, head, column, vectors, by_row)


@compiled
def _compute_columns(operands, tokens, head, first, vectors, by_row):
    """Computes all tokens of a request for some columns of a head."""
    x, stride, key_heads, key_dim, value_heads, value_dim = (
        word(operands, 10), word(operands, 11), word(operands, 12), word(operands, 13),
        word(operands, 14), word(operands, 15),
    )  # fmt: skip
    keys, values, column = key_heads * key_dim, value_heads * value_dim, head * value_dim + first
    own_key = head // word(operands, 18) % key_heads * key_dim
    offset, position = word(operands, 17) + 4 * key_dim * column, tokens.start
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
            rate = floats(word(operands, 19) + token * stride)[head]
            decays = word(operands, 20) + token * word(operands, 21)
            out = word(operands, 16) + 4 * (token * values + column)
            if by_row:
                _update(
                    source, target, key_dim, place + 4 * own_key, place + 4 * (keys + own_key),
                    place + 4 * (2 * keys + column), out, decays + 4 * head * key_dim, rate,
                    vectors, 1,
                )  # fmt: skip
            else:
                _update(
                    source, target, key_dim, place + 4 * own_key, place + 4 * (keys + own_key),
                    place + 4 * (2 * keys + column), out, floats(decays)[head], rate, vectors, 0,
                )  # fmt: skip
            source = target
        position = end


_DELTA_RULE = {
    (vectors, by_row): Kernel(_pieces, _run, vectors, int(by_row))
    for vectors in (1, 2)
    for by_row in (False, True)
}


def delta_rule(value_dim: int, by_row: bool = False) -> Kernel:
    """Returns the kernel that computes the outputs and the states behind them. If `by_row`, each
    row of S has a decay of its own.

    Operands: those of `states`, and

        10 x: float32 rows, as PREPARE left them
        11 the stride of x in bytes (a number)
        12 key_heads, 13 key_dim, 14 value_heads, 15 value_dim (numbers)
        16 out: float32 rows [value_heads, value_dim], without gaps
        17 the offset of the states S in a block (a number): for each head, for each few columns,
           [key_dim, columns]; rows of whole heads would fall into an eighth of the L1 cache's sets
        18 the number of value heads that follow each other and share a key head (a number)
        19 rates, with the stride of x
        20 decays: those of all heads, or of all heads' rows
        21 the stride of decays in bytes (a number)
    """
    return _DELTA_RULE[columns_at_once(value_dim) // LANES, by_row]


@compiled
def _gated_norm(operands, piece, thread, num_threads, kind, is_sigmoid):
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
                normed = values[i] * scale * number(weight, i, kind)
                if is_sigmoid:
                    values[i] = normed * sigmoid(gates[i])
                else:
                    values[i] = normed * silu(gates[i], np.float32(1.0))


GATED_NORM = {
    (kind, activation): Kernel(count_pieces, _gated_norm, kind, int(activation == "sigmoid"))
    for kind in KINDS
    for activation in ("silu", "sigmoid")
}
"""Kernels by the dtype name of the weight and the activation of gates. In place, for each head:
``x = rms_norm(x) * weight * activation(gate)``.

Operands: address of the number of rows; x, its stride in bytes; gate, its stride in bytes; heads;
their width; weight [width]; eps, a number from `word_of_float`.
"""
