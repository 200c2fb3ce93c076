"""Kernels of several residual streams that layers read the weighted sum of (hyper-connections; Zhu
et al., 2024), and mix (manifold-constrained hyper-connections; Xie et al., 2026).

All numbers are float32. The streams of a row lie side by side, [rows, streams * width]. A row's
result depends on that row alone: one thread computes it from beginning to end.
"""

from __future__ import annotations

import math

import numpy as np

from shmllm_kernels.cpu.functions import exp, sigmoid
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import float_of_word, floats, on_stack, word
from shmllm_kernels.cpu.norms import mean_square
from shmllm_kernels.cpu.rows import add_times, count_pieces, rows_of_piece

MOST_STREAMS = 8
"""The largest number of streams that are mixed."""

_COLUMNS = 64
"""How many columns of all streams are mixed at a time."""


@compiled
def _set_times(x, factor, out, count):
    values, target = floats(x), floats(out)
    for i in range(count):
        target[i] = factor * values[i]


@compiled
def _open(gates, num_streams, num_gates, factor, scale, bias, magnitude, eps, eps_of_added):
    """Replaces the logits of a row by gates."""
    values, scales, biases = floats(gates), floats(scale), floats(bias)
    for i in range(num_gates):
        kind = i // num_streams
        gate = sigmoid(values[i] * factor * scales[kind] + biases[i])
        values[i] = gate * magnitude + eps_of_added if kind == 1 else gate + eps


@compiled
def _normalise(matrix, count, stride, step, eps):
    """Divides lines of a matrix by their sums. stride: between lines; step: within a line."""
    values = floats(matrix)
    for line in range(count):
        total = np.float32(0.0)
        for i in range(count):
            total += values[line * stride + i * step]
        for i in range(count):
            values[line * stride + i * step] /= total + eps


@compiled
def _balance(matrix, count, factor, scale, bias, eps, iterations):
    """Replaces the logits of a mixture by the mixture: `reference.connections.mixture_of`."""
    values, biases = floats(matrix), floats(bias)
    for i in range(count):
        largest = np.float32(-math.inf)
        for j in range(count):
            at = i * count + j
            values[at] = values[at] * factor * scale + biases[at]
            largest = max(largest, values[at])
        for j in range(count):
            values[i * count + j] = exp(values[i * count + j] - largest)
    _normalise(matrix, count, count, 1, np.float32(0.0))
    for i in range(count * count):
        values[i] += eps
    _normalise(matrix, count, 1, count, eps)
    for _ in range(iterations - 1):
        _normalise(matrix, count, count, 1, eps)
        _normalise(matrix, count, 1, count, eps)


@compiled
def _fold(operands, piece, thread, num_threads):
    streams, count, width = word(operands, 1), word(operands, 2), word(operands, 3)
    gates, stride, num_gates = word(operands, 4), word(operands, 5), word(operands, 6)
    scale, bias, out = word(operands, 7), word(operands, 8), word(operands, 9)
    norm_eps, magnitude, eps = (
        float_of_word(word(operands, 10)), float_of_word(word(operands, 11)),
        float_of_word(word(operands, 12)),
    )  # fmt: skip
    iterations, num_opened = word(operands, 13), min(num_gates, 2 * count)
    eps_of_added = eps if iterations == 0 else np.float32(0.0)
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        source, target, own = (
            streams + row * count * width * 4, out + row * width * 4, gates + row * stride,
        )  # fmt: skip
        factor = np.float32(1.0) / np.sqrt(mean_square(source, count * width) + norm_eps)
        _open(own, count, num_opened, factor, scale, bias, magnitude, eps, eps_of_added)
        if num_gates > num_opened:
            behind = 4 * num_opened
            of_mixture = floats(scale)[2]
            _balance(own + behind, count, factor, of_mixture, bias + behind, eps, iterations)
        opened = floats(own)
        _set_times(source, opened[0], target, width)
        for i in range(1, count):
            add_times(source + i * width * 4, opened[i], target, width)


FOLD = Kernel(count_pieces, _fold)
"""With ``r = sqrt(mean(streams**2) + norm_eps)`` of all streams of a row, replaces logits by gates,
``sigmoid(scale * logit / r + bias) + eps``, in place; the factor ``magnitude`` precedes the
sigmoids of those behind the first ``streams``. Then ``out = sum(gates[i] * streams[i])``. If there
are logits of a mixture behind both, they become that mixture, and of the gates only the first have
``eps``.

Operands: address of the number of rows; streams [rows, streams * width]; their number; width;
gates [rows, num_gates]; the bytes from one row of these to the next; num_gates, the number of
streams, twice as many, or these and the square of that number; scale [1, 2 or 3]; bias [num_gates];
out [rows, width]; norm_eps, magnitude and eps, numbers from `word_of_float`; how often the mixture
is normalised, 0 if there is none.
"""


@compiled
def _mix(streams, count, width, x, gates):
    """Replaces the streams of a row by a mixture of them, and adds to each."""
    kept, opened = on_stack(4 * MOST_STREAMS * _COLUMNS), floats(gates)
    for column in range(0, width, _COLUMNS):
        size = min(width - column, _COLUMNS)
        for i in range(count):
            place = streams + (i * width + column) * 4
            _set_times(place, np.float32(1.0), kept + i * 4 * _COLUMNS, size)
        for i in range(count):
            place = streams + (i * width + column) * 4
            _set_times(x + column * 4, opened[count + i], place, size)
            for j in range(count):
                weight = opened[2 * count + j * count + i]
                add_times(kept + j * 4 * _COLUMNS, weight, place, size)


@compiled
def _spread(operands, piece, thread, num_threads):
    streams, count, width = word(operands, 1), word(operands, 2), word(operands, 3)
    gates, stride, x = word(operands, 4), word(operands, 5), word(operands, 6)
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        own, opened = streams + row * count * width * 4, floats(gates + row * stride)
        if word(operands, 7) != 0:
            _mix(own, count, width, x + row * width * 4, gates + row * stride)
        else:
            for i in range(count):
                add_times(x + row * width * 4, opened[count + i], own + i * width * 4, width)


SPREAD = Kernel(count_pieces, _spread)
"""``streams[i] += gates[streams + i] * x``, in place; with a mixture ``streams[i] = gates[streams +
i] * x + sum(mixture[j, i] * streams[j])``.

Operands: those of FOLD up to the bytes from one row of gates to the next; x [rows, width]; whether
there is a mixture, then of at most MOST_STREAMS, behind the gates of a row.
"""
