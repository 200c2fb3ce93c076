"""Reads and writes numbers in memory by address, for compiled code.

Kernels get addresses as operands, because they run without Python objects. This module owns the
conversion between float32 and the stored dtypes. A parameter ``kind`` is the name of a stored
dtype, a constant during translation, so that one function serves all dtypes.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from shmllm_kernels.cpu.language import View, as_value, compiled, emitted
from shmllm_kernels.cpu.simd import FLOAT, INT32, INT64, STORED


def itemsize(kind: str) -> int:
    """Returns the size of one number in bytes."""
    return STORED[kind][1]


@emitted
def floats(builder, address):
    """An array of float32 at an address."""
    return View(builder, address, FLOAT)


@emitted
def short_words(builder, address):
    """An array of int32 at an address."""
    return View(builder, address, INT32)


@emitted
def number(builder, address, index, kind):
    """Loads the number at ``address[index]`` as float32."""
    value = builder.load(View(builder, address, STORED[kind][0]).at(builder, index))
    if kind == "float32":
        return value
    if kind == "float16":
        return builder.fpext(value, FLOAT)
    if kind == "int8":
        return builder.sitofp(value, FLOAT)
    wide = builder.shl(builder.zext(value, INT32), ir.Constant(INT32, 16))
    return builder.bitcast(wide, FLOAT)


@emitted
def put_number(builder, address, index, value, kind):
    """Stores a float32 at ``address[index]``, rounded to the nearest, ties to even.

    float16 saturates: a value beyond its range becomes its largest number, since an infinity would
    make every sum infinite or NaN.
    """
    place = View(builder, address, STORED[kind][0]).at(builder, index)
    builder.store(_narrowed(builder, value, kind), place)


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


@emitted
def word(builder, address, index):
    """Loads the int64 at ``address[index]``."""
    return builder.load(View(builder, address, INT64).at(builder, index))


@emitted
def put_word(builder, address, index, value):
    """Stores an int64 at ``address[index]``."""
    builder.store(as_value(value), View(builder, address, INT64).at(builder, index))


@emitted
def put_narrow(builder, address, index, value, num_bytes):
    """Stores the last bytes of an int64, 1 or 2 of them, at ``address[index]``."""
    narrow = ir.IntType(8 * num_bytes.constant)
    builder.store(builder.trunc(value, narrow), View(builder, address, narrow).at(builder, index))


@emitted
def on_stack(builder, num_bytes):
    """The address of memory of a constant size, aligned to 64 bytes, until the function returns."""
    with builder.goto_entry_block():
        place = builder.alloca(ir.ArrayType(ir.IntType(8), num_bytes.constant))
    place.align = 64
    return builder.ptrtoint(place, INT64)


@emitted
def float_of_bits(builder, bits):
    """Reinterprets the bits of an int32 as a float32."""
    return builder.bitcast(bits, FLOAT)


def word_of_float(value: float) -> int:
    """Returns a number's float32 bits as an integer operand; `float_of_word` reverses it."""
    return int(np.float32(value).view(np.int32))


@compiled
def float_of_word(value):
    """Returns the float32 whose bits `word_of_float` returned."""
    return float_of_bits(np.int32(value))
