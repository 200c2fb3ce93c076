"""Kernels that multiply rows by factors: the gates of attention, and what makes queries grow with
their position. As in `rows`, one thread computes a row from beginning to end."""

from __future__ import annotations

import math

import numpy as np

from shmllm_kernels.cpu.functions import exp, sigmoid, softplus
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import float_of_word, floats, word
from shmllm_kernels.cpu.rows import count_pieces, rows_of_piece


@compiled
def _opened(gate, name):
    return sigmoid(gate) if name == "sigmoid" else softplus(gate)


@compiled
def _gate(operands, piece, thread, num_threads, name):
    x, width, gate, stride, columns = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
        word(operands, 5),
    )  # fmt: skip
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        values, gates = floats(x + row * width * 4), floats(gate + row * stride)
        if columns == 1:
            for i in range(width):
                values[i] *= _opened(gates[i], name)
        else:
            for head in range(width // columns):
                share = _opened(gates[head], name)
                for i in range(head * columns, (head + 1) * columns):
                    values[i] *= share


GATE = {name: Kernel(count_pieces, _gate, name) for name in ("sigmoid", "softplus")}
"""Kernels by the function of gates: ``x *= f(gate)``, in place.

Operands: address of the number of rows; x [rows, width]; width; gates [rows, width / columns],
their stride in bytes; columns: the number of columns of x that each gate serves.
"""


@compiled
def _grow(operands, piece, thread, num_threads):
    x, stride, width, positions = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
    )  # fmt: skip
    rate, length, offset = (
        float_of_word(word(operands, 5)), word(operands, 6), word(operands, 7),
    )  # fmt: skip
    power = float_of_word(word(operands, 8))
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        place, values = word(positions, row) + offset, floats(x + row * stride)
        base = np.float32(1.0) + np.float32(place) / np.float32(length)
        factor = np.float32(1.0) + rate * math.log(np.float32(place // length + 1))
        factor *= exp(power * math.log(base))
        for i in range(width):
            values[i] *= factor


GROW = Kernel(count_pieces, _grow)
"""``x *= (1 + rate * log(1 + floor(place))) * (1 + place) ** power``, in place, with ``place =
(position + offset) / length``.

Operands: address of the number of rows; x, its stride in bytes, and the width of its rows;
positions int64 [rows]; rate, a number from `word_of_float`; length; offset; power, likewise.
"""
