"""Rounds vectors of float32 to bfloat16, to the nearest, ties to even, as `memory.put_number`."""

from __future__ import annotations

from llvmlite import ir

from shmllm_kernels.cpu.arithmetic import HAS_BFLOAT16
from shmllm_kernels.cpu.simd import INT32, LANES, Emitter

SHORT = ir.IntType(16)


def round_upper(e: Emitter, x: ir.Value) -> ir.Value:
    """Returns int32 whose upper halves are the rounded numbers; the lower halves are 0."""
    b = e.builder
    bits = b.bitcast(x, e.integers)
    odd = b.and_(b.lshr(bits, e.splat_int(16)), e.splat_int(1))
    rounded = b.add(b.add(bits, e.splat_int(0x7FFF)), odd)
    return b.and_(rounded, e.splat_int(-0x10000))


def upper_halves(e: Emitter, upper: ir.Value) -> ir.Value:
    """Returns the upper halves of int32, as integers of 16 bits."""
    shorts = ir.VectorType(SHORT, e.lanes)
    return e.builder.trunc(e.builder.lshr(upper, e.splat_int(16)), shorts)


def round_to_shorts(e: Emitter, x: ir.Value) -> ir.Value:
    """Returns the rounded numbers as integers of 16 bits."""
    return upper_halves(e, round_upper(e, x))


def store_normal(e: Emitter, x: ir.Value, address: ir.Value) -> ir.Value:
    """Stores numbers as bfloat16, none of them subnormal; returns what they are rounded to."""
    b = e.builder
    if not HAS_BFLOAT16 or e.lanes != LANES:
        upper = round_upper(e, x)
        store_bits(e, upper_halves(e, upper), address)
        return b.bitcast(upper, e.vector)
    shorts = ir.VectorType(SHORT, e.lanes)
    kind = ir.FunctionType(shorts, [e.vector])
    rounded = b.asm(kind, "vcvtneps2bf16 $1, $0", "=v,v", [x], False)
    store_bits(e, rounded, address)
    return b.bitcast(b.shl(b.zext(rounded, e.integers), e.splat_int(16)), e.vector)


def store_bits(e: Emitter, value: ir.Value, address: ir.Value) -> None:
    """Stores integers of any size."""
    pointer = e.builder.inttoptr(address, value.type.as_pointer())
    e.builder.store(value, pointer, align=2)


def store_halves(e: Emitter, words: ir.Value, address: ir.Value, half: ir.Value) -> None:
    """Stores the lower halves (half 0) or the upper ones (half 1) of int32, and leaves the other
    halves in memory as they are: another thread may write them."""
    b, count = e.builder, 2 * e.lanes
    shorts, bits = ir.VectorType(SHORT, count), ir.VectorType(ir.IntType(1), count)
    lanes = ir.Constant(shorts, [lane % 2 for lane in range(count)])
    undef = ir.Constant(shorts, ir.Undefined)
    one = b.insert_element(undef, b.trunc(half, SHORT), ir.Constant(INT32, 0))
    every = ir.Constant(ir.VectorType(INT32, count), [0] * count)
    mask = b.icmp_unsigned("==", lanes, b.shuffle_vector(one, undef, every))
    pointer = b.inttoptr(address, shorts.as_pointer())
    name = f"llvm.masked.store.v{count}i16.p0"
    kinds = [shorts, shorts.as_pointer(), INT32, bits]
    store = b.module.globals.get(name) or ir.Function(
        b.module, ir.FunctionType(ir.VoidType(), kinds), name
    )
    b.call(store, [b.bitcast(words, shorts), pointer, ir.Constant(INT32, 2), mask])
