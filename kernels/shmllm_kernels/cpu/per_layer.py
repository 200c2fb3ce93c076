"""Kernels of the inputs that each layer has of its own: per-layer embeddings (Gemma 3n and 4).

All activations are float32; tables and weights have the model's dtype. A row's result depends on
that row alone: one thread computes it from beginning to end.
"""

from __future__ import annotations

import math

import numpy as np

from shmllm_kernels.cpu.heads import sum_of_squares
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import float_of_word, floats, itemsize, number, word
from shmllm_kernels.cpu.norms import KINDS
from shmllm_kernels.cpu.rows import ACTIVATIONS, activation, count_pieces, rows_of_piece

SQRT_HALF = math.sqrt(0.5)


@compiled
def _embed(operands, piece, thread, num_threads, kind):
    x, num_layers, width, weight = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
    )  # fmt: skip
    eps, scale, table_scale = (
        float_of_word(word(operands, 5)), float_of_word(word(operands, 6)),
        float_of_word(word(operands, 9)),
    )  # fmt: skip
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        token = word(word(operands, 7), row)
        has_row = (token >= 0) & (token < word(operands, 11))
        token = token if has_row else word(operands, 10)
        source = word(operands, 8) + token * num_layers * width * itemsize(kind)
        for layer in range(num_layers):
            place = x + 4 * (row * num_layers + layer) * width
            values, first = floats(place), layer * width
            mean = scale * scale * (sum_of_squares(place, width) / np.float32(width))
            factor = scale / np.sqrt(mean + eps)
            for i in range(width):
                projected = values[i] * factor * number(weight, i, kind)
                found = number(source, first + i, kind) * table_scale
                values[i] = (projected + found) * np.float32(SQRT_HALF)


EMBED_PER_LAYER = {kind: Kernel(count_pieces, _embed, kind) for kind in KINDS}
"""Kernels by the dtype name of table and weight. In place: ``x = (rms_norm(scale * x) * weight +
table_scale * table[token_id]) / sqrt(2)``, with a norm over each layer's part.

Operands: address of the number of rows; x [rows, layers, width]; layers; width; weight [width]; eps
and scale, numbers from `word_of_float`; token_ids int64; table [vocabulary, layers, width];
table_scale, a number from `word_of_float`; the token that replaces those without a row; the number
of rows.
"""


@compiled
def _gate(operands, piece, thread, num_threads, name):
    x, width, inputs, stride = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
    )  # fmt: skip
    out = word(operands, 5)
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        values, factors = floats(x + row * width * 4), floats(inputs + row * stride)
        gated = floats(out + row * width * 4)
        for i in range(width):
            gated[i] = activation(values[i], name) * factors[i]


GATE_LAYER_INPUT = {name: Kernel(count_pieces, _gate, name) for name in ACTIVATIONS}
"""Kernels by the activation's name. ``out = f(x) * inputs``.

Operands: address of the number of rows; x [rows, width]; width; inputs, their stride in bytes; out
[rows, width].
"""
