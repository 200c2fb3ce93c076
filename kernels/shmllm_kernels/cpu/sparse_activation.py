"""The activation of an MLP whose gates are zero below a cut, which each row has of its own.

All activations are float32. A row's result depends on that row alone: one thread computes it from
beginning to end.
"""

from __future__ import annotations

import numpy as np

from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import float_of_word, floats, word
from shmllm_kernels.cpu.norms import mean_of, variance_of
from shmllm_kernels.cpu.rows import ACTIVATIONS, activation, count_pieces, rows_of_piece


@compiled
def _activate_sparse(operands, piece, thread, num_threads, name):
    source, out, width = word(operands, 1), word(operands, 2), word(operands, 3)
    deviations = float_of_word(word(operands, 4))
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        place = source + row * width * 8
        mean = mean_of(place, width)
        cut = mean + deviations * np.sqrt(variance_of(place, width, mean))
        gate, up, values = floats(place), floats(place + width * 4), floats(out + row * width * 4)
        for i in range(width):
            values[i] = activation(max(gate[i] - cut, np.float32(0.0)), name) * up[i]


ACTIVATE_SPARSE = {name: Kernel(count_pieces, _activate_sparse, name) for name in ACTIVATIONS}
"""Kernels by the activation's name. ``out = f(max(gate - cut, 0)) * up``, where a row's cut lies
so many standard deviations of its gates above their mean.

Operands: address of the number of rows; x [rows, 2 * width], gates and ups side by side; out
[rows, width]; width; the number of deviations, a number from `word_of_float`.
"""
