"""Kernels of Mamba (Gu and Dao, 2023), behind its convolution.

Each channel has a state h [state_size] float32. A token with input x, keys B and C and time step d
changes it to ``h = exp(-exp(log) d) h + B d x``, and its output is ``C'h + D x``. One thread
computes a channel for all tokens of a request, one after the other, and adds up in the order of h:
the result does not depend on the steps that the tokens were divided into.

States, and what channels have of logs, lie as [state_size, LANES] for each LANES channels.
"""

from __future__ import annotations

import numpy as np

from shmllm_kernels.cpu.attention_state import LOG2_E
from shmllm_kernels.cpu.functions import exp, silu, softplus
from shmllm_kernels.cpu.heads import sum_of_squares
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import float_of_word, floats, number, on_stack, word
from shmllm_kernels.cpu.norms import KINDS
from shmllm_kernels.cpu.rows import count_pieces, rows_of_piece
from shmllm_kernels.cpu.simd import LANES, Emitter, Loop
from shmllm_kernels.cpu.softmax import power_of_two
from shmllm_kernels.cpu.states import clear, end_of_stretch, num_requests, state_at, tokens_of

CHANNEL_MULTIPLE = 16
"""What the number of channels is a multiple of: the lanes of the widest vectors."""
CHANNELS_AT_ONCE = 64
"""The channels in a piece of work."""
MOST_STATE = 128
"""The largest state_size."""


@compiled
def _activate(operands, piece, thread, num_threads):
    source, stride, out, width = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
    )  # fmt: skip
    begin, end = rows_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        values, given = floats(out + token * width * 4), floats(source + token * stride)
        for i in range(width):
            values[i] = silu(given[i], np.float32(1.0))


ACTIVATE = Kernel(count_pieces, _activate)
"""``out = silu(x)``.

Operands: address of the number of rows; x, its stride in bytes; out [rows, width]; width.
"""


@compiled
def _normalise(source, out, width, weight, eps, kind):
    given, values = floats(source), floats(out)
    scale = np.float32(1.0) / np.sqrt(sum_of_squares(source, width) / np.float32(width) + eps)
    if weight != 0:
        for i in range(width):
            values[i] = given[i] * scale * number(weight, i, kind)
    else:
        for i in range(width):
            values[i] = given[i] * scale


@compiled
def _divide(operands, piece, thread, num_threads, kind):
    x, rank, state_size, steps = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
    )  # fmt: skip
    eps, is_normed = float_of_word(word(operands, 8)), word(operands, 9)
    begin, end = rows_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        row, out = x + token * (rank + 2 * state_size) * 4, steps + token * rank * 4
        if is_normed != 0:
            keys, queries = row + 4 * rank, row + 4 * (rank + state_size)
            _normalise(row, out, rank, word(operands, 5), eps, kind)
            _normalise(keys, keys, state_size, word(operands, 6), eps, kind)
            _normalise(queries, queries, state_size, word(operands, 7), eps, kind)
        else:
            given, values = floats(row), floats(out)
            for i in range(rank):
                values[i] = given[i]


DIVIDE = {kind: Kernel(count_pieces, _divide, kind) for kind in KINDS}
"""Kernels by the dtype name of the weights. ``steps = x[:rank]``, for each row. With norms,
``steps = rms_norm(x[:rank]) * weight``, and B and C behind it are normalised in place.

Operands: address of the number of rows; x [rows, rank + 2 * state_size]; rank; state_size; steps
[rows, rank]; weights of the norms of steps, B and C, or 0; eps, a number from `word_of_float`; 1:
there are norms, or 0.
"""


@compiled
def _time(operands, piece, thread, num_threads):
    x, width = word(operands, 1), word(operands, 2)
    begin, end = rows_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        values = floats(x + token * width * 4)
        for i in range(width):
            values[i] = softplus(values[i])


TIME = Kernel(count_pieces, _time)
"""``x = softplus(x)``, in place.

Operands: address of the number of rows; x [rows, width]; width.
"""


@emitted
def _update(builder, source, target, rates, depth, x, keys, queries, skips, out):
    """Computes a token for LANES channels.

    Args: source, target: addresses of their states before and after; may be equal. rates: address
    of their ``-exp(log) * log2(e)``. depth: state_size. x: address of their inputs. keys, queries:
    addresses of B and C. skips: address of their D. out: address of their time steps, which their
    outputs replace.
    """
    e = Emitter(builder)
    given, time = e.load(x), e.load(out)
    inputs = builder.fmul(given, time)
    loop = Loop(e, e.const(0), depth, 1)
    loop.begin([builder.fmul(given, e.load(skips))])
    row, place = (builder.mul(loop.index, e.const(size)) for size in (4 * e.lanes, 4))
    factor = power_of_two(e, builder.fmul(e.load(e.at(rates, row)), time))
    key, query = (e.broadcast(e.load_scalar(e.at(each, place))) for each in (keys, queries))
    state = e.fma(e.load(e.at(source, row)), factor, builder.fmul(inputs, key))
    e.store(state, e.at(target, row))
    total = e.fma(state, query, loop.values[0])
    loop.end([total])
    e.store(total, out)


@compiled
def _groups(operands):
    return (word(operands, 11) + CHANNELS_AT_ONCE - 1) // CHANNELS_AT_ONCE


@compiled
def _pieces(operands, piece, thread, num_threads):
    return num_requests(operands) * _groups(operands)


@compiled
def _read_rates(operands, first, last, rates):
    """Writes what `_update` reads of the logs of the channels [first, last)."""
    channels, state_size = word(operands, 11), word(operands, 12)
    for channel in range(first, last, LANES):
        for row in range(state_size):
            logs = floats(word(operands, 16) + 4 * (row * channels + channel))
            out = floats(rates + 4 * ((channel - first) * state_size + row * LANES))
            for lane in range(LANES):
                size = exp(min(logs[lane], np.float32(80.0)))
                out[lane] = np.float32(-LOG2_E) * size


@compiled
def _run(operands, piece, thread, num_threads):
    groups, channels, state_size = _groups(operands), word(operands, 11), word(operands, 12)
    tokens, first = tokens_of(operands, piece // groups), piece % groups * CHANNELS_AT_ONCE
    last = min(first + CHANNELS_AT_ONCE, channels)
    rates = on_stack(4 * CHANNELS_AT_ONCE * MOST_STATE)
    _read_rates(operands, first, last, rates)
    offset, position = word(operands, 19) + 4 * first * state_size, tokens.start
    source = state_at(operands, tokens, max(tokens.start - 1, 0)) + offset
    if tokens.start == 0:
        clear(source, 4 * (last - first) * state_size)
    while position < tokens.end:
        end = end_of_stretch(operands, tokens, position)
        target = state_at(operands, tokens, position) + offset
        for at in range(position, end):
            _compute_token(
                operands, tokens.row + at - tokens.start, first, last, source, target, rates
            )
            source = target
        position = end


@compiled
def _compute_token(operands, token, first, last, source, target, rates):
    """Computes a token for the channels [first, last)."""
    channels, state_size = word(operands, 11), word(operands, 12)
    x, out = word(operands, 10) + token * channels * 4, word(operands, 18) + token * channels * 4
    keys = word(operands, 13) + token * word(operands, 15)
    queries = word(operands, 14) + token * word(operands, 15)
    for channel in range(first, last, LANES):
        own = 4 * (channel - first) * state_size
        _update(
            source + own, target + own, rates + own, state_size, x + 4 * channel, keys, queries,
            word(operands, 17) + 4 * channel, out + 4 * channel,
        )  # fmt: skip


SCAN = Kernel(_pieces, _run)
"""Computes the outputs and the states behind them.

Operands: those of `states`, and

    10 x: float32 [tokens, channels]
    11 channels, a multiple of CHANNEL_MULTIPLE, 12 state_size, at most MOST_STATE (numbers)
    13 keys: the first token's B, 14 queries: its C, float32 [state_size] each
    15 the bytes from one token's to the next one's (a number)
    16 logs: float32 [state_size, channels]
    17 skips: D, float32 [channels]
    18 out: float32 [tokens, channels], time steps, which the outputs replace
    19 the offset of the states h in a block (a number)
"""


@compiled
def _gate(operands, piece, thread, num_threads):
    x, width, gate, stride = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
    )  # fmt: skip
    begin, end = rows_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        values, gates = floats(x + token * width * 4), floats(gate + token * stride)
        for i in range(width):
            values[i] = values[i] * silu(gates[i], np.float32(1.0))


GATE = Kernel(count_pieces, _gate)
"""``x *= silu(gate)``, in place.

Operands: address of the number of rows; x [rows, width]; width; gate, its stride in bytes.
"""
