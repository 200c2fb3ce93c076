"""Kernels that compute each row of activations independently of the other rows.

All activations are float32; weights and tables have the model's dtype. A row's result depends on
that row alone: one thread computes it from beginning to end.
"""

from __future__ import annotations

import math

import numpy as np

from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled, compiled_with
from shmllm_kernels.cpu.memory import float_of_word, floats, itemsize, number, silu, word

PIECES_PER_THREAD = 8


@compiled
def _rows_at_once(num_rows, num_threads):
    pieces = PIECES_PER_THREAD * num_threads
    return (num_rows + pieces - 1) // pieces


@compiled
def _pieces(operands, piece, thread, num_threads):
    num_rows = word(word(operands, 0), 0)
    size = max(_rows_at_once(num_rows, num_threads), 1)
    return (num_rows + size - 1) // size


@compiled
def _range(operands, piece, num_threads):
    """Returns the bounds [begin, end) of a piece's rows."""
    num_rows = word(word(operands, 0), 0)
    size = _rows_at_once(num_rows, num_threads)
    return piece * size, min((piece + 1) * size, num_rows)


@compiled
def _embed(operands, piece, thread, num_threads, kind):
    token_ids, table, out, width = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
    )  # fmt: skip
    begin, end = _range(operands, piece, num_threads)
    for row in range(begin, end):
        token = word(token_ids, row)
        if token >= 0:
            source = table + token * width * itemsize(kind)
            values = floats(out + row * width * 4)
            for i in range(width):
                values[i] = number(source, i, kind)


EMBED = {
    "float32": Kernel(_pieces, _embed, "float32"),
    "float16": Kernel(_pieces, _embed, "float16"),
    "bfloat16": Kernel(_pieces, _embed, "bfloat16"),
}
"""Kernels by the dtype name of the table. ``out[row] = table[token_ids[row]]``; a row whose token
id is negative stays unchanged.

Operands: address of the number of rows; token_ids int64; table [vocabulary, width]; out
[rows, width]; width.
"""


@compiled
def _gather(operands, piece, thread, num_threads):
    indices, source, out, width = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
    )  # fmt: skip
    begin, end = _range(operands, piece, num_threads)
    for row in range(begin, end):
        values = floats(source + word(indices, row) * width * 4)
        target = floats(out + row * width * 4)
        for i in range(width):
            target[i] = values[i]


GATHER = Kernel(_pieces, _gather)
"""``out[row] = source[indices[row]]``.

Operands: address of the number of rows; indices int64; source [any, width]; out [rows, width];
width.
"""


@compiled_with("reassoc", "contract")
def _mean_square(address, count):
    values = floats(address)
    total = np.float32(0.0)
    for i in range(count):
        total += values[i] * values[i]
    return total / np.float32(count)


@compiled
def _add_rms_norm(operands, piece, thread, num_threads, kind):
    addend, residual, weight = word(operands, 1), word(operands, 2), word(operands, 3)
    out, width, eps = word(operands, 4), word(operands, 5), float_of_word(word(operands, 6))
    begin, end = _range(operands, piece, num_threads)
    for row in range(begin, end):
        values = floats(residual + row * width * 4)
        if addend != 0:
            added = floats(addend + row * width * 4)
            for i in range(width):
                values[i] += added[i]
        scale = np.float32(1.0) / np.sqrt(_mean_square(residual + row * width * 4, width) + eps)
        normed = floats(out + row * width * 4)
        for i in range(width):
            normed[i] = values[i] * scale * number(weight, i, kind)


ADD_RMS_NORM = {
    "float32": Kernel(_pieces, _add_rms_norm, "float32"),
    "float16": Kernel(_pieces, _add_rms_norm, "float16"),
    "bfloat16": Kernel(_pieces, _add_rms_norm, "bfloat16"),
}
"""Kernels by the dtype name of the weight. ``residual += x; out = residual / rms(residual) *
weight``, with ``rms = sqrt(mean(residual**2) + eps)`` (Zhang and Sennrich, 2019).

Operands: address of the number of rows; x [rows, width] or 0; residual [rows, width]; weight
[width]; out [rows, width]; width; eps, a number from `word_of_float`.
"""


@compiled
def _silu_and_mul(operands, piece, thread, num_threads):
    source, out, width = word(operands, 1), word(operands, 2), word(operands, 3)
    begin, end = _range(operands, piece, num_threads)
    for row in range(begin, end):
        gate = floats(source + row * width * 8)
        up = floats(source + row * width * 8 + width * 4)
        values = floats(out + row * width * 4)
        for i in range(width):
            values[i] = silu(gate[i], np.float32(1.0)) * up[i]


SILU_AND_MUL = Kernel(_pieces, _silu_and_mul)
"""SwiGLU's product, ``silu(gate) * up``.

Operands: address of the number of rows; gate and up side by side [rows, 2 * width]; out
[rows, width]; width.
"""


@compiled
def _rope_tables(operands, piece, thread, num_threads):
    positions, half = word(operands, 1), word(operands, 3)
    frequencies = floats(word(operands, 2))
    scale = float_of_word(word(operands, 6))
    begin, end = _range(operands, piece, num_threads)
    for row in range(begin, end):
        cos = floats(word(operands, 4) + row * half * 4)
        sin = floats(word(operands, 5) + row * half * 4)
        position = np.float32(word(positions, row))
        for i in range(half):
            angle = position * frequencies[i]
            cos[i] = np.float32(math.cos(angle)) * scale
            sin[i] = np.float32(math.sin(angle)) * scale


ROPE_TABLES = Kernel(_pieces, _rope_tables)
"""Cosines and sines of each row's position times each frequency (Su et al., 2021).

Operands: address of the number of rows; positions int64; frequencies [half] float32; half; cos
[rows, half]; sin [rows, half]; the factor of cosines and sines, a number from `word_of_float`.
"""
