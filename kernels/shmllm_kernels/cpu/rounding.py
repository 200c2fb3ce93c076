"""Kernels that round activations for the products that the CPU computes in fewer bits."""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir

from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import View, as_value, compiled, emitted
from shmllm_kernels.cpu.memory import float_of_bits, floats, put_number, short_words, word
from shmllm_kernels.cpu.products import corrections_at, num_parts, part_depth, width_of
from shmllm_kernels.cpu.rows import count_pieces, rows_of_piece
from shmllm_kernels.cpu.simd import FLOAT, Emitter, function

LARGEST = 127
_TOO_SMALL = 2.0**-112
"""256 times the inverse of a scale of such numbers may be infinite."""


def row_bytes(k: int, kind: str) -> int:
    """Returns the size of a row of k rounded activations, as `ROUND` writes it."""
    return 2 * k if kind == "bfloat16" else corrections_at(k) + 4 * num_parts(k) + 4


@emitted
def put_byte(builder, address, index, value):
    """Stores an int32 at ``address[index]`` as an int8."""
    byte = ir.IntType(8)
    place = View(builder, address, byte).at(builder, as_value(index))
    builder.store(builder.trunc(value, byte), place)


@compiled
def _round_bfloat16(values, width, out):
    for i in range(width):
        put_number(out, i, values[i], "bfloat16")


@compiled
def largest_magnitude(source, width):
    """Returns the largest magnitude; infinity or NaN if there is one: without their signs, the bits
    of floats are in the order of the numbers, and these come last."""
    bits, largest = short_words(source), np.int32(0)
    for i in range(width):
        largest = max(largest, bits[i] & 0x7FFFFFFF)
    return float_of_bits(largest)


@compiled
def inverse_scale(largest):
    """Returns the factor that brings numbers of up to that magnitude to 8 bits; 0 if they are all
    zero or too small, or if one is not finite."""
    is_usable = largest > np.float32(_TOO_SMALL) and largest < np.float32(math.inf)
    return np.float32(LARGEST) / largest if is_usable else np.float32(0.0)


@compiled
def rounded_byte(value, inverse):
    """Returns ``value * inverse`` rounded to the nearest integer, ties up, as an int32."""
    # A number that is not finite, times 0, is NaN, which no integer stands for.
    scaled = value * inverse if inverse > np.float32(0.0) else np.float32(0.0)
    return np.int32(np.floor(scaled + np.float32(0.5)))


def as_integers(e: Emitter, values: ir.Value, inverse: ir.Value) -> ir.Value:
    """Rounds ``values * inverse`` to the nearest, ties up; returns int32, zeros if inverse is 0."""
    half = ir.Constant(e.vector, [0.5] * e.lanes)
    # A number that is not finite, times 0, is NaN, which no integer stands for.
    is_usable = e.builder.fcmp_ordered(">", inverse, ir.Constant(FLOAT, 0.0))
    scaled = e.builder.fmul(values, e.broadcast(inverse))
    usable = e.builder.select(is_usable, scaled, e.zeros())
    floor = function(e.builder, f"llvm.floor.v{e.lanes}f32", e.vector, [e.vector])
    return e.builder.fptosi(e.builder.call(floor, [e.builder.fadd(usable, half)]), e.integers)


@compiled
def _round_int8(source, width, out):
    values, largest = floats(source), largest_magnitude(source, width)
    inverse = inverse_scale(largest)
    corrections, depth = (
        short_words(out + corrections_at(width)),
        part_depth(width, width_of("int8")),
    )
    for part in range(num_parts(width)):
        total = np.int32(0)
        for i in range(part * depth, min((part + 1) * depth, width)):
            rounded = rounded_byte(values[i], inverse)
            put_byte(out, i, rounded)
            total += rounded
        corrections[part] = total * -128
    scale = floats(out + corrections_at(width) + 4 * num_parts(width))
    scale[0] = largest / np.float32(LARGEST)


@compiled
def _round(operands, piece, thread, num_threads, kind):
    source, out = word(operands, 1), word(operands, 2)
    width, stride = word(operands, 3), word(operands, 4)
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        if kind == "int8":
            _round_int8(source + row * width * 4, width, out + row * stride)
        else:
            _round_bfloat16(floats(source + row * width * 4), width, out + row * stride)


ROUND = {kind: Kernel(count_pieces, _round, kind) for kind in ("bfloat16", "int8")}
"""Kernels by the dtype name of the rounded activations.

bfloat16: to the nearest, ties to even. int8: a row is divided by its scale, its largest magnitude
/ 127, and rounded to the nearest, ties up. The row has then, each aligned to 4 bytes: the integers;
for each part of k that a product sums at a time, -128 times the sum of its integers, int32; the
scale, float32. A row with a number that is not finite has a scale that is not finite.

Operands: address of the number of rows; x [rows, width]; out; width; the stride of out, at least
`row_bytes`.
"""
