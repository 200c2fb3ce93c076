"""Rounds activations to 8 or 16 bits by groups for `group_products`, and owns their layout.

A rounded row is padded to whole runs of 64 elements. It has, one after the other:

    integers      for each run its planes, see `group_arithmetic`; zeros in the padding
    scales        float32, one for each group
    offsets       float32: the scale times the sum of the group's integers
    corrections   int32: minus the sum of the group's integers

An integer of 8 bits has one digit, itself. One of 16 bits is 256 times its first digit plus its
second one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir

from shmllm_kernels.cpu.codes import RUN
from shmllm_kernels.cpu.group_arithmetic import DIGIT_BITS, OWN
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import floats, short_words, word
from shmllm_kernels.cpu.rounding import LARGEST, as_integers, inverse_scale
from shmllm_kernels.cpu.rows import count_pieces, rows_of_piece
from shmllm_kernels.cpu.simd import FLOAT, INT32, Emitter, function


class Grouping(NamedTuple):
    """How activations are rounded.

    dtype: the dtype name that stands for it in options.
    num_digits: the number of digits of an integer.
    size: the number of elements of a group.
    """

    dtype: str
    num_digits: int
    size: int


GROUPINGS = {
    f"{dtype}-g{size}": Grouping(dtype, num_digits, size)
    for dtype, num_digits in (("int8", 1), ("int16", 2))
    for size in (16, 32)
}
"""By the name of such activations, which stands where others have a dtype name."""
_NUMBER_BYTES = 4


@compiled
def padded(k):
    """Returns the number of elements of a row in whole runs."""
    return (k + RUN - 1) // RUN * RUN


def _group(kind: str) -> int:
    return GROUPINGS[kind].size


def num_planes(kind: str) -> int:
    """Returns the number of planes of a run of activations."""
    return OWN.num_x_planes(GROUPINGS[kind].num_digits)


def _unit(kind: str) -> float:
    """Returns what a first digit of 1 stands for, a power of 2: it rounds nothing."""
    return float(2 ** (DIGIT_BITS * (GROUPINGS[kind].num_digits - 1)))


@compiled
def integers_bytes(k, kind):
    """Returns the size of the integers of a row of k elements."""
    return padded(k) * num_planes(kind)


@compiled
def numbers_bytes(k, kind):
    """Returns the size of one number for each group of a row."""
    return padded(k) // _group(kind) * _NUMBER_BYTES


@compiled
def row_bytes(k, kind):
    """Returns the size of a row of k rounded activations, whole cache lines."""
    return (integers_bytes(k, kind) + 3 * numbers_bytes(k, kind) + 63) // 64 * 64


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
    for place, plane in enumerate(OWN.x_planes(e, integers, GROUPINGS[kind].num_digits)):
        pointer = builder.inttoptr(e.at(out, RUN * place), plane.type.as_pointer())
        builder.store(plane, pointer, align=1)
    return _reduced(e, "add", integers)


@compiled
def _round_row(source, width, out, kind):
    group, size = _group(kind), numbers_bytes(width, kind)
    place, unit = out + integers_bytes(width, kind), np.float32(_unit(kind))
    scales, offsets, corrections = (
        floats(place), floats(place + size), short_words(place + 2 * size),
    )  # fmt: skip
    for i in range(padded(width) // group):
        begin = i * group
        x, count = source + 4 * begin, width - begin
        largest = _largest_magnitude(x, count, kind)
        own = out + begin // RUN * RUN * num_planes(kind) + begin % RUN
        total = _put_group(x, count, inverse_scale(largest) * unit, own, kind)
        scales[i] = largest / np.float32(LARGEST) / unit
        offsets[i] = scales[i] * np.float32(total)
        corrections[i] = -total


@compiled
def _round(operands, piece, thread, num_threads, kind):
    source, out = word(operands, 1), word(operands, 2)
    width, stride = word(operands, 3), word(operands, 4)
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        _round_row(source + row * width * 4, width, out + row * stride, kind)


ROUND = {kind: Kernel(count_pieces, _round, kind) for kind in GROUPINGS}
"""Kernels by the name of the rounded activations. A group is divided by its scale, its largest
magnitude / 127 or, in 16 bits, / (127 * 256), and rounded to the nearest, ties up. A group with a
number that is not finite has a scale that is not finite.

Operands: address of the number of rows; x [rows, width] float32; out; width; the stride of out, at
least `row_bytes`.
"""
