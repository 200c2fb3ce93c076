"""Kernels of the residual stream: additions, and the norms of its rows.

A row's result depends on that row alone: one thread computes it from beginning to end. All
activations are float32; weights and biases have the model's dtype.
"""

from __future__ import annotations

import numpy as np

from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled, compiled_with
from shmllm_kernels.cpu.memory import float_of_word, floats, number, word
from shmllm_kernels.cpu.rows import count_pieces, rows_of_piece

KINDS = ("float32", "float16", "bfloat16")


@compiled
def _add_row(addend, residual, width, scale):
    added, values = floats(addend), floats(residual)
    for i in range(width):
        values[i] += scale * added[i]


@compiled_with("reassoc", "contract")
def mean_square(address, count):
    """Returns the mean of the squares of `count` float32."""
    values = floats(address)
    total = np.float32(0.0)
    for i in range(count):
        total += values[i] * values[i]
    return total / np.float32(count)


@compiled_with("reassoc", "contract")
def mean_of(address, count):
    """Returns the mean of `count` float32."""
    values = floats(address)
    total = np.float32(0.0)
    for i in range(count):
        total += values[i]
    return total / np.float32(count)


@compiled_with("reassoc", "contract")
def variance_of(address, count, mean):
    """Returns the mean of the squared distances of `count` float32 from their mean."""
    values = floats(address)
    total = np.float32(0.0)
    for i in range(count):
        total += (values[i] - mean) * (values[i] - mean)
    return total / np.float32(count)


@compiled
def _multiply_row(source, out, width, factor, weight, offset, kind):
    values, normed = floats(source), floats(out)
    for i in range(width):
        normed[i] = values[i] * factor * (number(weight, i, kind) + offset)


@compiled
def add_rms_norm(operands, begin, end, kind):
    """Computes the rows [begin, end) of ADD_RMS_NORM."""
    addend, residual, weight = word(operands, 1), word(operands, 2), word(operands, 3)
    out, width, eps = word(operands, 4), word(operands, 5), float_of_word(word(operands, 6))
    scale, offset = float_of_word(word(operands, 7)), float_of_word(word(operands, 8))
    stride = word(operands, 9)
    for row in range(begin, end):
        source = residual + row * stride
        if addend != 0:
            _add_row(addend + row * width * 4, source, width, scale)
        factor = np.float32(1.0) / np.sqrt(mean_square(source, width) + eps)
        if out == residual:  # LLVM vectorises each of the two
            _multiply_row(source, source, width, factor, weight, offset, kind)
        else:
            _multiply_row(source, out + row * width * 4, width, factor, weight, offset, kind)


@compiled
def _add_rms_norm(operands, piece, thread, num_threads, kind):
    begin, end = rows_of_piece(operands, piece, num_threads)
    add_rms_norm(operands, begin, end, kind)


ADD_RMS_NORM = {kind: Kernel(count_pieces, _add_rms_norm, kind) for kind in KINDS}
"""Kernels by the dtype name of the weight. ``residual += scale * x; out = residual / rms(residual)
* (weight + offset)``, with ``rms = sqrt(mean(residual**2) + eps)`` (Zhang and Sennrich, 2019).

Operands: address of the number of rows; x [rows, width] or 0; residual [rows, width]; weight
[width]; out [rows, width], which may be residual; width; eps, scale and offset, numbers from
`word_of_float`; the bytes from one row of residual to the next.
"""


@compiled
def _add_layer_norm(operands, piece, thread, num_threads, kind):
    addend, residual, weight = word(operands, 1), word(operands, 2), word(operands, 3)
    out, width, eps = word(operands, 4), word(operands, 5), float_of_word(word(operands, 6))
    scale, bias, stride = float_of_word(word(operands, 7)), word(operands, 8), word(operands, 9)
    offset = float_of_word(word(operands, 10))
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        source = residual + row * stride
        if addend != 0:
            _add_row(addend + row * width * 4, source, width, scale)
        mean = mean_of(source, width)
        factor = np.float32(1.0) / np.sqrt(variance_of(source, width, mean) + eps)
        values, normed = floats(source), floats(out + row * width * 4)
        for i in range(width):
            normed[i] = (values[i] - mean) * factor * (number(weight, i, kind) + offset)
        if bias != 0:
            for i in range(width):
                normed[i] += number(bias, i, kind)


ADD_LAYER_NORM = {kind: Kernel(count_pieces, _add_layer_norm, kind) for kind in KINDS}
"""Kernels by the dtype name of weight and bias. ``residual += scale * x; out = (residual - mean) /
sqrt(variance + eps) * (weight + offset) + bias`` (Ba et al., 2016).

Operands: address of the number of rows; x [rows, width] or 0; residual [rows, width]; weight
[width]; out [rows, width], which may be residual; width; eps and scale, numbers from
`word_of_float`; bias [width] or 0; the bytes from one row of residual to the next; offset, a
number from `word_of_float`.
"""


@compiled
def _add(operands, piece, thread, num_threads):
    addend, residual, width = word(operands, 1), word(operands, 2), word(operands, 3)
    scale, stride = float_of_word(word(operands, 4)), word(operands, 5)
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        _add_row(addend + row * width * 4, residual + row * stride, width, scale)


ADD = Kernel(count_pieces, _add)
"""``residual += scale * x``.

Operands: address of the number of rows; x [rows, width]; residual [rows, width]; width; scale, a
number from `word_of_float`; the bytes from one row of residual to the next.
"""


@compiled
def _scale(operands, piece, thread, num_threads, kind):
    width = word(operands, 2)
    factor = float_of_word(word(operands, 3))
    if word(operands, 4) != 0:
        factor *= number(word(operands, 4), 0, kind)
    begin, end = rows_of_piece(operands, piece, num_threads)
    values = floats(word(operands, 1))
    for i in range(begin * width, end * width):
        values[i] *= factor


SCALE = {kind: Kernel(count_pieces, _scale, kind) for kind in KINDS}
"""Kernels by the dtype name of the weight. ``x *= factor * weight``, in place.

Operands: address of the number of rows; x [rows, width]; width; factor, a number from
`word_of_float`; weight [1], or 0 for a weight of 1.
"""


@compiled
def _scale_columns(operands, piece, thread, num_threads):
    width, scale = word(operands, 2), float_of_word(word(operands, 3))
    factors = floats(word(operands, 4))
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        values = floats(word(operands, 1) + row * width * 4)
        for i in range(width):
            values[i] = values[i] * (scale * factors[i])


SCALE_COLUMNS = Kernel(count_pieces, _scale_columns)
"""``x *= factor * weight``, in place, with a weight for each column.

Operands: address of the number of rows; x [rows, width]; width; factor, a number from
`word_of_float`; weight [width] float32.
"""
