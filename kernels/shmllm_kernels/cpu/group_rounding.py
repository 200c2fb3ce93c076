"""Rounds activations to 8 bits by groups for `group_products`, and owns their layout in memory.

A rounded row is padded to whole runs of 64 elements. It has, one after the other:

    integers      int8, one for each element; zeros in the padding
    scales        float32, one for each group
    offsets       float32: the scale times the sum of the group's integers
    corrections   int32: minus the sum of the group's integers
"""

from __future__ import annotations

from llvmlite import ir

from shmllm_kernels.cpu.codes import RUN
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import word
from shmllm_kernels.cpu.rounding import LARGEST
from shmllm_kernels.cpu.rows import count_pieces, rows_of_piece
from shmllm_kernels.cpu.simd import FLOAT, INT32, Emitter, function
from shmllm_kernels.cpu.tile_rounding import as_int8

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


@emitted
def _round_group(builder, source, count, out, place, num_bytes, kind):
    """Rounds a group, of which `count` elements exist. place, num_bytes: the address of its scale,
    and the bytes from there to its offset and from that to its correction."""
    e = Emitter(builder, _group(kind))
    values = e.load_first(source, count)
    bits = builder.and_(builder.bitcast(values, e.integers), e.splat_int(0x7FFFFFFF))
    # Without signs, the bits of floats are in the order of the numbers; infinity and NaN come last.
    largest = builder.bitcast(_reduced(e, "smax", bits), FLOAT)
    is_usable = builder.and_(
        builder.fcmp_ordered(">", largest, ir.Constant(FLOAT, 0.0)),
        builder.fcmp_ordered("<", largest, ir.Constant(FLOAT, float("inf"))),
    )
    inverse = builder.fdiv(ir.Constant(FLOAT, float(LARGEST)), largest)
    integers = as_int8(e, values, builder.select(is_usable, inverse, ir.Constant(FLOAT, 0.0)))
    total = _reduced(e, "add", integers)
    narrow = builder.trunc(integers, ir.VectorType(ir.IntType(8), e.lanes))
    builder.store(narrow, builder.inttoptr(out, narrow.type.as_pointer()), align=1)
    scale = builder.fdiv(largest, ir.Constant(FLOAT, float(LARGEST)))
    numbers = (scale, builder.fmul(scale, builder.sitofp(total, FLOAT)), builder.neg(total))
    for number in numbers:
        builder.store(number, builder.inttoptr(place, number.type.as_pointer()), align=4)
        place = builder.add(place, num_bytes)


def _reduced(e: Emitter, operation: str, vector: ir.Value) -> ir.Value:
    name = f"llvm.vector.reduce.{operation}.v{e.lanes}i32"
    return e.builder.call(function(e.builder, name, INT32, [e.integers]), [vector])


@compiled
def _round(operands, piece, thread, num_threads, kind):
    source, out = word(operands, 1), word(operands, 2)
    width, stride = word(operands, 3), word(operands, 4)
    begin, end = rows_of_piece(operands, piece, num_threads)
    group, num_bytes = _group(kind), numbers_bytes(width, kind)
    for row in range(begin, end):
        x, to = source + row * width * 4, out + row * stride
        for i in range(padded(width) // group):
            place = to + padded(width) + i * _NUMBER_BYTES
            begins = i * group
            _round_group(
                x + 4 * begins, width - begins, to + begins, place, num_bytes, kind
            )  # fmt: skip


ROUND = {kind: Kernel(count_pieces, _round, kind) for kind in GROUPS}
"""Kernels by the name of the rounded activations. A group is divided by its scale, its largest
magnitude / 127, and rounded to the nearest, ties up. A group with a number that is not finite has a
scale that is not finite.

Operands: address of the number of rows; x [rows, width] float32; out; width; the stride of out, at
least `row_bytes`.
"""
