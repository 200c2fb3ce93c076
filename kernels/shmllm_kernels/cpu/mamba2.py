"""Kernels of Mamba 2 (Dao and Gu, 2024), behind its convolution.

Each head has a state H [state_size, head_dim] float32. A token with input x, keys B and C and time
step d changes it to ``H = exp(-exp(log) d) H + B (d x)'``, and its output is ``H'C + D x``. One
thread computes a head for all tokens of a request, one after the other, and adds up in the order
of the rows of H: the result does not depend on the steps that the tokens were divided into.

Several tokens change a row of H while it is in registers, each as it would alone.
"""

from __future__ import annotations

import numpy as np

from shmllm_kernels.cpu.functions import exp, silu, softplus
from shmllm_kernels.cpu.heads import sum_of_squares
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import float_of_word, floats, number, on_stack, word
from shmllm_kernels.cpu.norms import KINDS
from shmllm_kernels.cpu.rows import count_pieces, rows_of_piece
from shmllm_kernels.cpu.simd import LANES, NUM_REGISTERS, Emitter, Loop
from shmllm_kernels.cpu.states import (
    clear,
    columns_at_once,
    end_of_stretch,
    num_requests,
    state_at,
    tokens_of,
)

HEAD_MULTIPLE = 16
"""What the width of a head is a multiple of: the lanes of the widest vectors."""
MOST_TOKENS = 64
"""The most tokens whose decays are computed before the columns of their head."""
TOKENS_AT_ONCE = 4 if NUM_REGISTERS == 32 else 2
"""The tokens that change a row of H while it is in registers."""


@compiled
def _prepare(operands, piece, thread, num_threads):
    x, stride, width, steps, heads, biases = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
        word(operands, 5), floats(word(operands, 6)),
    )  # fmt: skip
    least, most = float_of_word(word(operands, 7)), float_of_word(word(operands, 8))
    begin, end = rows_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        values, times = floats(x + token * stride), floats(steps + token * stride)
        for i in range(width):
            values[i] = silu(values[i], np.float32(1.0))
        for head in range(heads):
            times[head] = min(max(softplus(times[head] + biases[head]), least), most)


PREPARE = Kernel(count_pieces, _prepare)
"""In place: an element of x becomes ``silu(x)``, and a time step ``softplus(step + bias)``,
but at least `least` and at most `most`.

Operands: address of the number of rows; x, the stride of a row in bytes, the width of x; steps, in
the same rows; heads; biases float32 [heads]; least and most, numbers from `word_of_float`.
"""


@emitted
def _update(builder, source, target, depth, x, keys, queries, stride, steps, steps_stride, decays,
            skip, out, out_stride, vectors, tokens):  # fmt: skip
    """Computes `tokens` tokens for some columns, which are `vectors` vectors.

    Args: source, target: addresses of these columns of H before and after; may be equal. depth:
    state_size. x: address of these columns of the first token's input. keys, queries: addresses of
    its B and C. stride: bytes from one token's to the next one's. steps, steps_stride: the same of
    its time step. decays: address of the tokens' decays, side by side. skip: D. out: address of
    these columns.
    """
    e, vectors, tokens = Emitter(builder), vectors.constant, tokens.constant
    size = 4 * e.lanes
    offsets = [builder.mul(stride, e.const(token)) for token in range(tokens)]
    lanes = [size * vector for vector in range(vectors)]

    def scalar(address, offset):
        return e.broadcast(e.load_scalar(e.at(address, offset)))

    factors = [scalar(decays, 4 * token) for token in range(tokens)]
    times = [scalar(steps, builder.mul(steps_stride, e.const(token))) for token in range(tokens)]
    given = [[e.load(e.at(e.at(x, offset), lane)) for lane in lanes] for offset in offsets]
    inputs = [
        [builder.fmul(value, time) for value in values]
        for values, time in zip(given, times, strict=True)
    ]
    loop = Loop(e, e.const(0), depth, 1)
    loop.begin([e.zeros()] * (tokens * vectors))
    old, totals = iter(loop.values), []
    row, place = (
        builder.mul(loop.index, e.const(size * vectors)),
        builder.mul(loop.index, e.const(4)),
    )
    states = [e.load(e.at(e.at(source, row), lane)) for lane in lanes]
    for offset, factor, values in zip(offsets, factors, inputs, strict=True):
        here = e.at(offset, place)
        key, query = scalar(keys, here), scalar(queries, here)
        for vector, value in enumerate(values):
            states[vector] = e.fma(states[vector], factor, builder.fmul(value, key))
            totals.append(e.fma(states[vector], query, next(old)))
    for state, lane in zip(states, lanes, strict=True):
        e.store(state, e.at(e.at(target, row), lane))
    loop.end(totals)
    sums, skips = iter(totals), e.broadcast(skip)
    for token, values in enumerate(given):
        row = e.at(out, builder.mul(out_stride, e.const(token)))
        for value, lane in zip(values, lanes, strict=True):
            e.store(e.fma(value, skips, next(sums)), e.at(row, lane))


@compiled
def _pieces(operands, piece, thread, num_threads):
    return num_requests(operands) * word(operands, 12)


@compiled
def _run(operands, piece, thread, num_threads, vectors, has_own_steps):
    heads, head_dim, state_size = word(operands, 12), word(operands, 13), word(operands, 15)
    head, tokens = piece % heads, tokens_of(operands, piece // heads)
    offset, position = word(operands, 21) + 4 * head * head_dim * state_size, tokens.start
    decays = on_stack(4 * MOST_TOKENS)
    source = state_at(operands, tokens, max(tokens.start - 1, 0)) + offset
    if tokens.start == 0:
        clear(source, 4 * head_dim * state_size)
    while position < tokens.end:
        end = min(end_of_stretch(operands, tokens, position), position + MOST_TOKENS)
        target = state_at(operands, tokens, position) + offset
        first = tokens.row + position - tokens.start
        stride = has_own_steps * word(operands, 11)
        _decay(operands, head, first, end - position, stride, decays)
        for column in range(0, head_dim, vectors * LANES):
            own = 4 * state_size * column
            _compute_columns(
                operands, head, column, first, end - position, source + own, target + own, decays,
                stride, vectors,
            )  # fmt: skip
        source = target
        position = end


@compiled
def _decay(operands, head, first, count, stride, decays):
    """Writes the decays of a head, ``exp(-exp(log) step)``, of `count` tokens, whose steps lie
    `stride` bytes from each other."""
    steps = word(operands, 16) + 4 * head
    rate, factors = exp(min(floats(word(operands, 17))[head], np.float32(80.0))), floats(decays)
    for token in range(count):
        factors[token] = exp(-(rate * floats(steps + (first + token) * stride)[0]))


@compiled
def _compute_columns(operands, head, column, first, count, source, target, decays, steps_stride,
                     vectors):  # fmt: skip
    """Computes `count` tokens from the index `first` on for some columns of a head."""
    x, stride, heads, head_dim, groups, state_size = (
        word(operands, 10), word(operands, 11), word(operands, 12), word(operands, 13),
        word(operands, 14), word(operands, 15),
    )  # fmt: skip
    steps, skip = word(operands, 16) + 4 * head, floats(word(operands, 18))[head]
    keys = x + 4 * (heads * head_dim + head // (heads // groups) * state_size)
    queries, own = keys + 4 * groups * state_size, 4 * (head * head_dim + column)
    token = 0
    while token < count:
        row, out = (first + token) * stride, word(operands, 19) + own
        out += (first + token) * word(operands, 20)
        step = steps + (first + token) * steps_stride
        if token + TOKENS_AT_ONCE <= count:
            _update(
                source, target, state_size, x + own + row, keys + row, queries + row, stride,
                step, steps_stride, decays + 4 * token, skip, out, word(operands, 20), vectors,
                TOKENS_AT_ONCE,
            )  # fmt: skip
            token += TOKENS_AT_ONCE
        else:
            _update(
                source, target, state_size, x + own + row, keys + row, queries + row, stride,
                step, steps_stride, decays + 4 * token, skip, out, word(operands, 20), vectors, 1,
            )  # fmt: skip
            token += 1
        source = target


_SCAN = {
    (vectors, has_own_steps): Kernel(_pieces, _run, vectors, int(has_own_steps))
    for vectors in (1, 2)
    for has_own_steps in (True, False)
}


def scan(head_dim: int, has_own_steps: bool = True) -> Kernel:
    """Returns the kernel that computes the outputs and the states behind them. Each token has time
    steps of its own, or all have the same.

    Operands: those of `states`, and

        10 x: float32 rows, as PREPARE left them: inputs [heads, head_dim], B and C [groups,
           state_size] each
        11 the stride of x in bytes (a number)
        12 heads, 13 head_dim, 14 groups, 15 state_size (numbers)
        16 steps: the time steps [heads], in the same rows, or those of all tokens
        17 logs: float32 [heads]
        18 skips: D, float32 [heads]
        19 out: float32 rows [heads, head_dim]
        20 the stride of out in bytes (a number)
        21 the offset of the states H in a block (a number): for each head, for each few columns,
           [state_size, columns]; see `delta_net`
    """
    return _SCAN[columns_at_once(head_dim) // LANES, has_own_steps]


@compiled
def _gated_norm(operands, piece, thread, num_threads, kind, gates_first):
    x, stride, gate, gate_stride, groups, width, weight = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
        word(operands, 5), word(operands, 6), word(operands, 7),
    )  # fmt: skip
    eps = float_of_word(word(operands, 8))
    begin, end = rows_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        for first in range(0, groups * width, width):
            row = x + token * stride + 4 * first
            values, gates = floats(row), floats(gate + token * gate_stride + 4 * first)
            if gates_first:
                for i in range(width):
                    values[i] = values[i] * silu(gates[i], np.float32(1.0))
            scale = np.float32(1.0) / np.sqrt(sum_of_squares(row, width) / np.float32(width) + eps)
            for i in range(width):
                values[i] = values[i] * scale * number(weight, first + i, kind)
            if gates_first == 0:
                for i in range(width):
                    values[i] = values[i] * silu(gates[i], np.float32(1.0))


GATED_NORM = {
    (kind, gates_first): Kernel(count_pieces, _gated_norm, kind, int(gates_first))
    for kind in KINDS
    for gates_first in (True, False)
}
"""Kernels by the dtype name of the weight, and by whether gates come first. In place: ``x *=
silu(gate)``, and then, for each group of columns, ``x = rms_norm(x) * weight``; or this first.

Operands: address of the number of rows; x, its stride in bytes; gate, its stride in bytes; groups;
their width; weight [groups * width]; eps, a number from `word_of_float`.
"""
