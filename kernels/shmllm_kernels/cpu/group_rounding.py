"""Rounds activations to 8 bits by groups for `group_products`, and owns their layout in memory.

A rounded row is padded to whole runs of 64 elements. It has, one after the other:

    integers      int8, one for each element; zeros in the padding
    scales        float32, one for each group
    offsets       float32: the scale times the sum of the group's integers
    corrections   int32: minus the sum of the group's integers
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from shmllm_kernels.cpu.codes import RUN
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import floats, short_words, word
from shmllm_kernels.cpu.rounding import LARGEST, as_integers, inverse_scale
from shmllm_kernels.cpu.rows import count_pieces, rows_of_piece
from shmllm_kernels.cpu.simd import FLOAT, INT32, Emitter, function

GROUPS = {"int8-g16": 16, "int8-g32": 32}
"""The number of elements of a group by the name of such activations, which stands where others have
a dtype name."""
_NUMBER_BYTES = 4


@compiled
def padded(k):
    """Returns the number of elements of a row in whole runs."""
    return (k + RUN - 1) // RUN * RUN


def _group(kind: str) -> int:
    return GROUPS[kind]


@compiled
def numbers_bytes(k, kind):
    """Returns the size of one number for each group of a row."""
    return padded(k) // _group(kind) * _NUMBER_BYTES


@compiled
def row_bytes(k, kind):
    """Returns the size of a row of k rounded activations, whole cache lines."""
    return (padded(k) + 3 * numbers_bytes(k, kind) + 63) // 64 * 64


def _reduced(e: Emitter, operation: str, vector: ir.Value) -> ir.Value:
    name = f"llvm.vector.reduce.{operation}.v{e.lanes}i32"
    return e.builder.call(function(e.builder, name, INT32, [e.integers]), [vector])


@emitted
def _largest_magnitude(builder, source, count, kind):
    """As `rounding.largest_magnitude`, of a group of which `count` elements exist."""
    e = Emitter(builder, _group(kind))
    bits = builder.bitcast(e.load_first(source, count), e.integers)
    largest = _reduced(e, "smax", builder.and_(bits, e.splat_int(0x7FFFFFFF)))
    return builder.bitcast(largest, FLOAT)


@emitted
def _put_group(builder, source, count, inverse, out, kind):
    """Rounds a group, of which `count` elements exist, and returns the sum of its integers."""
    e = Emitter(builder, _group(kind))
    integers = as_integers(e, e.load_first(source, count), inverse)
    narrow = builder.trunc(integers, ir.VectorType(ir.IntType(8), e.lanes))
    builder.store(narrow, builder.inttoptr(out, narrow.type.as_pointer()), align=1)
    return _reduced(e, "add", integers)


@compiled
def _round_row(source, width, out, kind):
    group, size = _group(kind), numbers_bytes(width, kind)
    place = out + padded(width)
    scales, offsets, corrections = (
        floats(place), floats(place + size), short_words(place + 2 * size),
    )  # fmt: skip
    for i in range(padded(width) // group):
        begin = i * group
        x, count = source + 4 * begin, width - begin
        largest = _largest_magnitude(x, count, kind)
        total = _put_group(x, count, inverse_scale(largest), out + begin, kind)
        scales[i] = largest / np.float32(LARGEST)
        offsets[i] = scales[i] * np.float32(total)
        corrections[i] = -total


@compiled
def _round(operands, piece, thread, num_threads, kind):
    source, out = word(operands, 1), word(operands, 2)
    width, stride = word(operands, 3), word(operands, 4)
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        _round_row(source + row * width * 4, width, out + row * stride, kind)


ROUND = {kind: Kernel(count_pieces, _round, kind) for kind in GROUPS}
"""Kernels by the name of the rounded activations. A group is divided by its scale, its largest
magnitude / 127, and rounded to the nearest, ties up. A group with a number that is not finite has a
scale that is not finite.

Operands: address of the number of rows; x [rows, width] float32; out; width; the stride of out, at
least `row_bytes`.
"""
