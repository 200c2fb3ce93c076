"""Kernels of several residual streams that layers read the weighted sum of (hyper-connections; Zhu
et al., 2024).

All numbers are float32. The streams of a row lie side by side, [rows, streams * width]. A row's
result depends on that row alone: one thread computes it from beginning to end.
"""

from __future__ import annotations

import numpy as np

from shmllm_kernels.cpu.functions import sigmoid
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import float_of_word, floats, word
from shmllm_kernels.cpu.norms import mean_square
from shmllm_kernels.cpu.rows import add_times, count_pieces, rows_of_piece


@compiled
def _set_times(x, factor, out, count):
    values, target = floats(x), floats(out)
    for i in range(count):
        target[i] = factor * values[i]


@compiled
def _open(gates, num_streams, num_gates, factor, scale, bias, magnitude, eps):
    """Replaces the logits of a row by gates."""
    values, scales, biases = floats(gates), floats(scale), floats(bias)
    for i in range(num_gates):
        kind = i // num_streams
        gate = sigmoid(values[i] * factor * scales[kind] + biases[i])
        values[i] = gate * (magnitude if kind == 1 else np.float32(1.0)) + eps


@compiled
def _fold(operands, piece, thread, num_threads):
    streams, count, width = word(operands, 1), word(operands, 2), word(operands, 3)
    gates, stride, num_gates = word(operands, 4), word(operands, 5), word(operands, 6)
    scale, bias, out = word(operands, 7), word(operands, 8), word(operands, 9)
    norm_eps, magnitude, eps = (
        float_of_word(word(operands, 10)), float_of_word(word(operands, 11)),
        float_of_word(word(operands, 12)),
    )  # fmt: skip
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        source, target, own = (
            streams + row * count * width * 4, out + row * width * 4, gates + row * stride,
        )  # fmt: skip
        factor = np.float32(1.0) / np.sqrt(mean_square(source, count * width) + norm_eps)
        _open(own, count, num_gates, factor, scale, bias, magnitude, eps)
        opened = floats(own)
        _set_times(source, opened[0], target, width)
        for i in range(1, count):
            add_times(source + i * width * 4, opened[i], target, width)


FOLD = Kernel(count_pieces, _fold)
"""With ``r = sqrt(mean(streams**2) + norm_eps)`` of all streams of a row, replaces logits by gates,
``sigmoid(scale * logit / r + bias) + eps``, in place; the factor ``magnitude`` precedes the
sigmoids of those behind the first ``streams``. Then ``out = sum(gates[i] * streams[i])``.

Operands: address of the number of rows; streams [rows, streams * width]; their number; width;
gates [rows, num_gates]; the bytes from one row of these to the next; num_gates, the number of
streams or twice as many; scale [num_gates / streams]; bias [num_gates]; out [rows, width];
norm_eps, magnitude and eps, numbers from `word_of_float`.
"""


@compiled
def _spread(operands, piece, thread, num_threads):
    streams, count, width = word(operands, 1), word(operands, 2), word(operands, 3)
    gates, stride, x = word(operands, 4), word(operands, 5), word(operands, 6)
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        opened = floats(gates + row * stride)
        for i in range(count):
            place = streams + (row * count + i) * width * 4
            add_times(x + row * width * 4, opened[count + i], place, width)


SPREAD = Kernel(count_pieces, _spread)
"""``streams[i] += gates[streams + i] * x``, in place.

Operands: those of FOLD up to the bytes from one row of gates to the next; x [rows, width].
"""
