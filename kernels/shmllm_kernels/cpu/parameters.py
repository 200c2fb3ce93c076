"""The parameters of packed weights: how they are stored, and how they become float32.

    stored as                      widened
    float16, bfloat16, float32     exactly
    e8m0    1 byte b               2 ** (b - 127); b = 0 is subnormal
    k       20 bytes for 4 runs    d * s0, d * s1, -(dmin * m0), -(dmin * m1) of each run
    k2      20 bytes for 4 runs    d * s of the 4 groups of each run, and then -(dmin * m)
    k6      18 bytes for 4 runs    d * s for each of the 16 groups
    k8      10 bytes for 4 runs    d * s for each of the 8 groups
    e4m3    8 bytes for 1 run      d * s for each of the 4 groups

A record "k" has d and dmin, float16, and for each run s0, s1, m0 and m1, uint8; "k2" has d, dmin
and a byte for each group, s in its low bits, m in its high bits; "k6" and "k8" have d and then s
for each group, int8; "e4m3" has d, float32, and s for each group in that format. This module must
not know what parameters mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from shmllm_kernels.cpu.codes import FLOAT8, splat
from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import itemsize
from shmllm_kernels.cpu.simd import FLOAT, LANES, Emitter

_IN_RECORD = 16
_BYTE = ir.IntType(8)


@dataclass(frozen=True, slots=True)
class Stored:
    """How parameters are stored.

    Attributes:
        count: the number of parameters in a record.
        num_bytes: the size of a record.
        at_once: the number of parameters that are widened at a time, of whole records.
        widen: (builder, address, number of parameters from there on) -> `at_once` parameters in
            float32; those that do not exist are not read.
    """

    count: int
    num_bytes: int
    at_once: int
    widen: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]


def _array(stored: str) -> Stored:
    return Stored(
        1, itemsize(stored), LANES,
        lambda builder, address, count: Emitter(builder).load_first(address, count, stored),
    )  # fmt: skip


def _powers(builder: ir.IRBuilder, address: ir.Value, count: ir.Value) -> ir.Value:
    e = Emitter(builder)
    exponents = builder.zext(e.load_first_bits(address, count, 8), e.integers)
    is_zero = builder.icmp_signed("==", exponents, e.splat_int(0))
    bits = builder.shl(exponents, e.splat_int(23))
    return builder.bitcast(builder.select(is_zero, e.splat_int(1 << 22), bits), e.vector)


def _half(e: Emitter, address: ir.Value) -> ir.Value:
    pointer = e.builder.inttoptr(address, ir.HalfType().as_pointer())
    return e.builder.fpext(e.builder.load(pointer, align=2), FLOAT)


def _load_bytes(e: Emitter, address: ir.Value) -> ir.Value:
    pointer = e.builder.inttoptr(address, ir.VectorType(_BYTE, e.lanes).as_pointer())
    return e.builder.load(pointer, align=1)


def _scales_and_minima(builder: ir.IRBuilder, address: ir.Value, count: ir.Value) -> ir.Value:
    e = Emitter(builder, _IN_RECORD)
    numbers = builder.uitofp(_load_bytes(e, e.at(address, 4)), e.vector)
    d, dmin = _half(e, address), _half(e, e.at(address, 2))
    lanes = [lane & 2 and e.lanes for lane in range(e.lanes)]  # d, d, -dmin, -dmin
    factors = builder.shuffle_vector(
        e.broadcast(d), e.broadcast(builder.fneg(dmin)), ir.Constant(e.integers, lanes)
    )
    return builder.fmul(numbers, factors)


def _of_16_groups(builder: ir.IRBuilder, address: ir.Value, count: ir.Value) -> ir.Value:
    e, both = Emitter(builder, _IN_RECORD), Emitter(builder, 2 * _IN_RECORD)
    read = _load_bytes(e, e.at(address, 4))
    scales = builder.uitofp(builder.and_(read, splat(read.type, 15)), e.vector)
    minima = builder.uitofp(builder.lshr(read, splat(read.type, 4)), e.vector)
    d, dmin = _half(e, address), builder.fneg(_half(e, e.at(address, 2)))
    products = builder.fmul(scales, e.broadcast(d)), builder.fmul(minima, e.broadcast(dmin))
    # Four scales, and then four of the others, for each run.
    lanes = [4 * run + i + part for run in range(4) for part in (0, _IN_RECORD) for i in range(4)]
    return builder.shuffle_vector(*products, ir.Constant(both.integers, lanes))


def _factors(num_factors: int) -> Stored:
    """A float16 and so many signed bytes that it is multiplied by."""

    def widen(builder: ir.IRBuilder, address: ir.Value, count: ir.Value) -> ir.Value:
        e = Emitter(builder, num_factors)
        numbers = builder.sitofp(_load_bytes(e, e.at(address, 2)), e.vector)
        return builder.fmul(numbers, e.broadcast(_half(e, address)))

    return Stored(num_factors, 2 + num_factors, num_factors, widen)


_IN_RUN = 4


def _float8_factors(builder: ir.IRBuilder, address: ir.Value, count: ir.Value) -> ir.Value:
    e = Emitter(builder, _IN_RUN)
    words = ir.VectorType(ir.IntType(16), _IN_RUN)
    codes = builder.sext(_load_bytes(e, e.at(address, 4)), words)
    unit = ir.Constant(e.vector, [FLOAT8.unit] * _IN_RUN)
    numbers = builder.fmul(FLOAT8.numbers(e, codes), unit)
    return builder.fmul(numbers, e.broadcast(e.load_scalar(address)))


STORED = {
    "": Stored(1, 0, LANES, lambda builder, address, count: Emitter(builder).zeros()),
    "float16": _array("float16"),
    "bfloat16": _array("bfloat16"),
    "float32": _array("float32"),
    "e8m0": Stored(1, 1, LANES, _powers),
    "k": Stored(_IN_RECORD, 20, _IN_RECORD, _scales_and_minima),
    "k2": Stored(2 * _IN_RECORD, 20, 2 * _IN_RECORD, _of_16_groups),
    "k6": _factors(16),
    "k8": _factors(8),
    "e4m3": Stored(_IN_RUN, 8, _IN_RUN, _float8_factors),
}
"""The stored forms by name; "" has no parameters."""


def _attributes(stored: str) -> tuple[int, int, int]:
    own = STORED[stored]
    return own.count, own.num_bytes, own.at_once


@compiled
def stored_bytes(count, stored):
    """Returns the size of so many parameters, in whole records."""
    in_record, num_bytes, _ = _attributes(stored)
    return (count + in_record - 1) // in_record * num_bytes


@emitted
def _widen_some(builder, address, count, out, stored):
    Emitter(builder).store(STORED[stored].widen(builder, address, count), out)


@compiled
def widen(address, count, out, stored):
    """Converts parameters to float32. (One by one, they take as long as the weights.) It writes
    `Stored.at_once` numbers at a time."""
    _, _, at_once = _attributes(stored)
    for i in range(0, count, at_once):
        _widen_some(address + stored_bytes(i, stored), count - i, out + 4 * i, stored)
