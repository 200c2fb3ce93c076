"""Words and numbers of memory by address, for compiled code.

Kernels get their operands as addresses, since they run where there are no Python objects. Owns
how an address becomes a number, and what each stored kind of number is. A kind is chosen by the
*type* of a `kind` argument (its value means nothing), so that one function serves them all.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from shmllm_kernels.cpu.simd import FLOAT, INT32, INT64, STORED

KINDS = {
    "float32": np.float32(0),
    "float16": np.int16(0),
    "bfloat16": np.uint16(0),
    "int8": np.int8(0),
}
"""What stands for a kind where one is asked for."""

_STORED_AS = {
    types.float32: "float32",
    types.int16: "float16",
    types.uint16: "bfloat16",
    types.int8: "int8",
}


def stored_as(kind: types.Type) -> str:
    """The name of the kind that a `kind` argument of this type stands for."""
    return _STORED_AS[kind]


@intrinsic
def itemsize(typing_context, kind):
    """Bytes of one number."""
    num_bytes = STORED[stored_as(kind)][1]

    def emit(context, builder, signature, args):
        return ir.Constant(INT64, num_bytes)

    return types.int64(kind), emit


@intrinsic
def pointer(typing_context, address):
    """An address as `carray` takes it."""

    def emit(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), emit


@njit(inline="always")
def floats(address, count):
    """(count,) float32 at an address."""
    return carray(pointer(address), (count,), np.float32)


@njit(inline="always")
def words(address, count):
    """(count,) int64 at an address."""
    return carray(pointer(address), (count,), np.int64)


@njit(inline="always")
def short_words(address, count):
    """(count,) int32 at an address."""
    return carray(pointer(address), (count,), np.int32)


@intrinsic
def number(typing_context, address, index, kind):
    """The number at ``address[index]``, as float32."""
    stored = stored_as(kind)
    llvm_type, num_bytes = STORED[stored]

    def emit(context, builder, signature, args):
        at = builder.add(args[0], builder.mul(args[1], ir.Constant(INT64, num_bytes)))
        value = builder.load(builder.inttoptr(at, llvm_type.as_pointer()))
        if stored == "float32":
            return value
        if stored == "float16":
            return builder.fpext(value, FLOAT)
        if stored == "int8":
            return builder.sitofp(value, FLOAT)
        wide = builder.shl(builder.zext(value, INT32), ir.Constant(INT32, 16))
        return builder.bitcast(wide, FLOAT)

    return types.float32(types.int64, types.int64, kind), emit


@intrinsic
def put_number(typing_context, address, index, value, kind):
    """Store a float32 at ``address[index]``, rounded to the nearest, ties to even; what float16
    cannot hold becomes its largest number, since an infinity would spoil every sum."""
    stored = stored_as(kind)
    llvm_type, num_bytes = STORED[stored]

    def emit(context, builder, signature, args):
        at = builder.add(args[0], builder.mul(args[1], ir.Constant(INT64, num_bytes)))
        target = builder.inttoptr(at, llvm_type.as_pointer())
        builder.store(_narrowed(builder, args[2], stored), target)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, kind), emit


def _narrowed(builder: ir.IRBuilder, value: ir.Value, stored: str) -> ir.Value:
    if stored == "float32":
        return value
    if stored == "float16":
        for limit, beyond in ((65504.0, ">"), (-65504.0, "<")):
            bound = ir.Constant(FLOAT, limit)
            value = builder.select(builder.fcmp_ordered(beyond, value, bound), bound, value)
        return builder.fptrunc(value, ir.HalfType())
    bits = builder.bitcast(value, INT32)
    odd = builder.and_(builder.lshr(bits, ir.Constant(INT32, 16)), ir.Constant(INT32, 1))
    rounded = builder.add(builder.add(bits, ir.Constant(INT32, 0x7FFF)), odd)
    return builder.trunc(builder.lshr(rounded, ir.Constant(INT32, 16)), ir.IntType(16))


@intrinsic
def word(typing_context, address, index):
    """The int64 at ``address[index]``."""

    def emit(context, builder, signature, args):
        at = builder.add(args[0], builder.mul(args[1], ir.Constant(INT64, 8)))
        return builder.load(builder.inttoptr(at, INT64.as_pointer()))

    return types.int64(types.int64, types.int64), emit


@intrinsic
def put_word(typing_context, address, index, value):
    """Write an int64 at ``address[index]``."""

    def emit(context, builder, signature, args):
        at = builder.add(args[0], builder.mul(args[1], ir.Constant(INT64, 8)))
        builder.store(args[2], builder.inttoptr(at, INT64.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def float_of_bits(typing_context, bits):
    """An int32's bits as a float32."""

    def emit(context, builder, signature, args):
        return builder.bitcast(args[0], FLOAT)

    return types.float32(types.int32), emit


@njit(inline="always")
def exp(x):
    """e to the x, for x at most 88, to 2 units in the last place; 0 below -87.

    2**n * e**r with n whole and |r| <= ln(2) / 2, e**r by its Taylor polynomial of degree 7:
    plain arithmetic, which the compiler turns into vectors, as it cannot a call of expf.
    """
    bounded = max(x, np.float32(-87.0))
    n = np.floor(bounded * np.float32(1.4426950408889634) + np.float32(0.5))
    r = bounded - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    y = np.float32(1 / 5040)
    y = y * r + np.float32(1 / 720)
    y = y * r + np.float32(1 / 120)
    y = y * r + np.float32(1 / 24)
    y = y * r + np.float32(1 / 6)
    y = y * r + np.float32(0.5)
    y = y * r + np.float32(1.0)
    y = y * r + np.float32(1.0)
    scaled = y * float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))
    return scaled if x >= np.float32(-87.0) else np.float32(0.0)


def word_of_float(value: float) -> int:
    """A number as an operand: `float_of_word` makes it a float32 again."""
    return int(np.float32(value).view(np.int32))


@njit(inline="always")
def float_of_word(value):
    """What `word_of_float` was given."""
    return float_of_bits(np.int32(value))
