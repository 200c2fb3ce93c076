"""Kernels of a residual stream that consists of several (AltUp; Baykal et al., 2023).

All activations are float32; weights have the model's dtype. The streams of all rows lie one after
the other, [streams, rows, width]. A row's result depends on that row alone: one thread computes it
from beginning to end.
"""

from __future__ import annotations

import numpy as np

from shmllm_kernels.cpu.functions import tanh
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import float_of_word, floats, number, on_stack, word
from shmllm_kernels.cpu.norms import KINDS, mean_square
from shmllm_kernels.cpu.rows import add_times, count_pieces, rows_of_piece

MOST_STREAMS = 8
COLUMNS = 512
"""The columns of all streams that are computed at once."""

LEAST_MEAN_SQUARE = 1e-5
"""Rows whose mean square is less are multiplied as if it were this."""


@compiled
def _mix(routed, factor, weight, num_sums, num_streams, mixed, kind):
    """Writes ``weight @ tanh(factor * routed)`` to `mixed`."""
    values, sums, active = floats(routed), floats(mixed), floats(on_stack(4 * MOST_STREAMS))
    for i in range(num_streams):
        active[i] = tanh(factor * values[i])
    for i in range(num_sums):
        total = np.float32(0.0)
        for j in range(num_streams):
            total += number(weight, i * num_streams + j, kind) * active[j]
        sums[i] = total


@compiled
def _copy(x, out, count):
    values, target = floats(x), floats(out)
    for i in range(count):
        target[i] = values[i]


@compiled
def _predict(operands, piece, thread, num_threads, kind):
    routed, factor, weight, streams = (
        word(operands, 1), float_of_word(word(operands, 2)), word(operands, 3), word(operands, 4),
    )  # fmt: skip
    stride, count, width, active, out = (
        word(operands, 5), word(operands, 6), word(operands, 7), word(operands, 8),
        word(operands, 9),
    )  # fmt: skip
    mixed, before = on_stack(4 * MOST_STREAMS * MOST_STREAMS), on_stack(4 * MOST_STREAMS * COLUMNS)
    factors = floats(mixed)
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        _mix(routed + row * count * 4, factor, weight, count * count, count, mixed, kind)
        for first in range(0, width, COLUMNS):
            size, place = min(width - first, COLUMNS), streams + (row * width + first) * 4
            for j in range(count):
                _copy(place + j * stride, before + j * COLUMNS * 4, size)
            for i in range(count):
                for j in range(count):
                    other = before + j * COLUMNS * 4
                    add_times(other, factors[i * count + j], place + i * stride, size)
            _copy(place + active * stride, out + (row * width + first) * 4, size)


PREDICT = {kind: Kernel(count_pieces, _predict, kind) for kind in KINDS}
"""Kernels by the dtype name of the weight. With ``c = weight @ tanh(factor * routed)``, [streams,
streams], ``streams[i] += sum(c[i, j] * streams[j])``, in place, and ``out = streams[active]``.

Operands: address of the number of rows; routed [rows, streams]; factor, a number from
`word_of_float`; weight [streams * streams, streams]; streams, the bytes from one to the next, their
number, at most MOST_STREAMS; width; active; out [rows, width].
"""


@compiled
def _correct(operands, piece, thread, num_threads, kind):
    routed, factor, weight, streams = (
        word(operands, 1), float_of_word(word(operands, 2)), word(operands, 3), word(operands, 4),
    )  # fmt: skip
    stride, count, width, active = (
        word(operands, 5), word(operands, 6), word(operands, 7), word(operands, 8),
    )  # fmt: skip
    x, scale, mixed = word(operands, 9), word(operands, 10), on_stack(4 * MOST_STREAMS)
    innovation, factors = on_stack(4 * COLUMNS), floats(mixed)
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        _mix(routed + row * count * 4, factor, weight, count, count, mixed, kind)
        for first in range(0, width, COLUMNS):
            size, offset = min(width - first, COLUMNS), (row * width + first) * 4
            _copy(x + offset, innovation, size)
            corrected = streams + active * stride + offset
            add_times(corrected, np.float32(-1.0), innovation, size)
            for i in range(count):
                place = streams + i * stride + offset
                add_times(innovation, factors[i] + np.float32(1.0), place, size)
            values, source = floats(x + offset), floats(corrected)
            if scale == 0:
                _copy(corrected, x + offset, size)
            else:
                for i in range(size):
                    values[i] = source[i] * number(scale, first + i, kind)


CORRECT = {kind: Kernel(count_pieces, _correct, kind) for kind in KINDS}
"""Kernels by the dtype name of the weights. With ``c = weight @ tanh(factor * routed) + 1``,
[streams], ``streams[i] += c[i] * (x - streams[active])``, and then ``x = scale * streams[active]``,
both in place.

Operands: those of PREDICT, with weight [streams, streams] and with x [rows, width] in the place of
out; scale [width], or 0 for a scale of 1.
"""


@compiled
def _match(operands, piece, thread, num_threads):
    x, like, out, width = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
    )  # fmt: skip
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        offset = row * width * 4
        own = max(mean_square(x + offset, width), np.float32(LEAST_MEAN_SQUARE))
        factor = np.sqrt(mean_square(like + offset, width)) / np.sqrt(own)
        values, target = floats(x + offset), floats(out + offset)
        for i in range(width):
            target[i] = values[i] * factor


MATCH_MAGNITUDE = Kernel(count_pieces, _match)
"""``out = x * rms(like) / rms(x)``, with roots of the mean squares of rows, that of x at least
LEAST_MEAN_SQUARE.

Operands: address of the number of rows; x [rows, width]; like, likewise; out, likewise; width.
"""
