"""The codes of packed weights, and the numbers that they stand for.

    codes of a run of 64    bytes    where they lie
    8 bits                  64       in order
    4 bits                  32       byte i has element i in its low bits, 32 + i in its high bits
    5 bits                  40       as 4 bits; then bit j of a 64-bit word is bit 4 of element j
    6 bits                  48       as 4 bits; then bits 2 * (j // 16) and after of byte j % 16 are
                                     bits 4 and 5 of element j

Products of integers take a code as an unsigned byte: what it stands for, in units, plus a bias.

This module must not know the parameters that turn a number into a weight; see `unpacking`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from shmllm_kernels.cpu.shuffles import transposed, transposed_eights, transposed_fours
from shmllm_kernels.cpu.simd import INT32, Emitter, function

RUN = 64
"""The number of elements whose codes lie together."""
_HALF, _QUARTER = RUN // 2, RUN // 4
_BIT, _BYTE = ir.IntType(1), ir.IntType(8)
_LARGE_TABLE = 32


Words = Callable[[Emitter, Sequence[ir.Value], int], list[ir.Value]]


@dataclass(frozen=True, slots=True)
class Codes:
    """What the bits of a run stand for.

    Attributes:
        run_bytes: the size of a run.
        read: (emitter, address of a run, index of an element, vector type) -> the codes from that
            element on as integers, one for each lane; a vector of up to half a run.
        numbers: (emitter, codes in a vector of LANES) -> the numbers, float32.
        num_bits: the size of the integers that `numbers` takes.
        table: the numbers of all codes, if they are few.
        unit: what a number of 1 stands for, a power of two: it is multiplied to the scale, which
            changes no weight unless that is beyond 2**119.
        bytes: (emitter, address of a run) -> its codes as RUN unsigned bytes; None: numbers are no
            integers.
        byte_bias: what was added to the number that a byte stands for, 0 or a power of two.
        byte_unit: what a byte of 1 stands for, a power of two.
        words: (emitter, addresses of the same runs of 16 columns, number of runs, 1 or 2) -> for
            each run RUN // 4 vectors, of which the i-th has four bytes of each column, those of the
            elements from 4 * i on; None: nothing is gained over `bytes`, transposed.
    """

    run_bytes: int
    read: Callable[[Emitter, ir.Value, int, ir.VectorType], ir.Value]
    numbers: Callable[[Emitter, ir.Value], ir.Value]
    num_bits: int = 32
    table: tuple[float, ...] = ()
    unit: float = 1.0
    bytes: Callable[[Emitter, ir.Value], ir.Value] | None = None
    byte_bias: int = 0
    byte_unit: float = 1.0
    words: Words | None = None


def splat(vector: ir.VectorType, number: int) -> ir.Constant:
    """Returns a vector of one integer in all lanes."""
    return ir.Constant(vector, [number] * vector.count)


def _load_bytes(e: Emitter, address: ir.Value, count: int) -> ir.Value:
    pointer = e.builder.inttoptr(address, ir.VectorType(_BYTE, count).as_pointer())
    return e.builder.load(pointer, align=1)


def _read_bytes(e: Emitter, source: ir.Value, first: int, vector: ir.VectorType) -> ir.Value:
    """Reads 8 bits with their sign."""
    return e.builder.sext(_load_bytes(e, e.at(source, first), vector.count), vector)


def _read_nibbles(e: Emitter, source: ir.Value, first: int, vector: ir.VectorType) -> ir.Value:
    wide = e.builder.zext(_load_bytes(e, e.at(source, first % _HALF), vector.count), vector)
    if first < _HALF:
        return e.builder.and_(wide, splat(vector, 15))
    return e.builder.lshr(wide, splat(vector, 4))


def _read_5_bits(e: Emitter, source: ir.Value, first: int, vector: ir.VectorType) -> ir.Value:
    low = _read_nibbles(e, source, first, vector)
    is_set = _load_mask(e, e.at(source, _HALF), first, vector.count)
    return e.builder.or_(low, e.builder.select(is_set, splat(vector, 16), splat(vector, 0)))


def _load_mask(e: Emitter, address: ir.Value, first: int, count: int) -> ir.Value:
    """Loads `count` bits, from one that is a multiple of `count`, as a mask."""
    size = ir.IntType(max(count, 8))
    bits = e.builder.load(e.builder.inttoptr(e.at(address, first // 8), size.as_pointer()), align=1)
    if count < 8:
        moved = e.builder.lshr(bits, ir.Constant(size, first % 8))
        bits = e.builder.trunc(moved, ir.IntType(count))
    return e.builder.bitcast(bits, ir.VectorType(_BIT, count))


def _read_6_bits(e: Emitter, source: ir.Value, first: int, vector: ir.VectorType) -> ir.Value:
    """Reads up to a quarter of a run."""
    low = _read_nibbles(e, source, first, vector)
    place = e.at(source, _HALF + first % _QUARTER)
    wide = e.builder.zext(_load_bytes(e, place, vector.count), vector)
    shift = 4 - 2 * (first // _QUARTER)
    move = e.builder.shl if shift >= 0 else e.builder.lshr
    moved = move(wide, splat(vector, abs(shift)))
    return e.builder.or_(low, e.builder.and_(moved, splat(vector, 0x30)))


def _minus(bias: int) -> Callable[[Emitter, ir.Value], ir.Value]:
    return lambda e, codes: e.builder.sitofp(
        e.builder.sub(codes, splat(e.integers, bias)), e.vector
    )


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers with a sign, two bits of exponent and one of mantissa, by their bits."""
_DOUBLED = sum(int(2 * number) << 4 * code for code, number in enumerate(E2M1[:8]))


def _e2m1(e: Emitter, codes: ir.Value) -> ir.Value:
    """Looks twice the magnitude up in an integer."""
    b = e.builder
    place = b.shl(b.and_(codes, e.splat_int(7)), e.splat_int(2))
    doubled = b.and_(b.lshr(e.splat_int(_DOUBLED), place), e.splat_int(15))
    magnitude = b.fmul(b.sitofp(doubled, e.vector), ir.Constant(e.vector, [0.5] * e.lanes))
    sign = b.shl(b.and_(codes, e.splat_int(8)), e.splat_int(28))
    return b.bitcast(b.or_(b.bitcast(magnitude, e.integers), sign), e.vector)


def _e4m3(e: Emitter, codes: ir.Value) -> ir.Value:
    """Reinterprets codes, int16 with their sign, as float16, whose exponent is biased by 8 more.
    (The conversion of subnormal float16 is fast, that of subnormal float32 is not everywhere.)"""
    b, words = e.builder, codes.type
    moved = b.and_(b.shl(codes, splat(words, 7)), splat(words, 0xBFFF))
    magnitude = b.and_(codes, splat(words, 127))
    is_nan = b.icmp_signed("==", magnitude, splat(words, 127))
    # The sum has the largest exponent, which stands for no number.
    bits = b.select(is_nan, b.add(moved, splat(words, 0x4000)), moved)
    return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), e.lanes)), e.vector)


def _joined(e: Emitter, low: ir.Value, high: ir.Value) -> ir.Value:
    """Returns the lanes of two vectors one after the other."""
    lanes = ir.Constant(ir.VectorType(INT32, 2 * low.type.count), list(range(2 * low.type.count)))
    return e.builder.shuffle_vector(low, high, lanes)


def _nibbles_as_bytes(e: Emitter, source: ir.Value) -> ir.Value:
    read = _load_bytes(e, source, _HALF)
    low = e.builder.and_(read, splat(read.type, 15))
    return _joined(e, low, e.builder.lshr(read, splat(read.type, 4)))


def _5_bits_as_bytes(e: Emitter, source: ir.Value) -> ir.Value:
    low = _nibbles_as_bytes(e, source)
    is_set = _load_mask(e, e.at(source, _HALF), 0, RUN)
    return e.builder.or_(low, e.builder.select(is_set, splat(low.type, 16), splat(low.type, 0)))


def _6_bits_as_bytes(e: Emitter, source: ir.Value) -> ir.Value:
    b, read = e.builder, _load_bytes(e, e.at(source, _HALF), _QUARTER)
    quarters = [b.shl(read, splat(read.type, 4)), b.shl(read, splat(read.type, 2))]
    quarters += [read, b.lshr(read, splat(read.type, 2))]
    halves = [_joined(e, *quarters[i : i + 2]) for i in (0, 2)]
    high = _joined(e, *halves)
    return b.or_(_nibbles_as_bytes(e, source), b.and_(high, splat(high.type, 0x30)))


def _bytes_plus_128(e: Emitter, source: ir.Value) -> ir.Value:
    read = _load_bytes(e, source, RUN)
    return e.builder.xor(read, splat(read.type, 128))


def _load_words(e: Emitter, address: ir.Value, count: int) -> ir.Value:
    pointer = e.builder.inttoptr(address, ir.VectorType(INT32, count).as_pointer())
    return e.builder.load(pointer, align=1)


def _nibbles_as_words(e: Emitter, columns: Sequence[ir.Value], num_runs: int) -> list[ir.Value]:
    """Transposes the bytes of the columns before each becomes two. The two halves of a cache line
    are loaded together: one of them could have left the L1 cache before the other is loaded."""
    rows = [_load_words(e, column, num_runs * _HALF // 4) for column in columns]
    stored = transposed_eights(e, rows) if num_runs == 1 else transposed(e, rows)
    b, mask, out = e.builder, e.splat_int(0x0F0F0F0F), []
    for run in range(num_runs):
        own = stored[_HALF // 4 * run :][: _HALF // 4]
        out += [b.and_(words, mask) for words in own]
        out += [b.and_(b.lshr(words, e.splat_int(4)), mask) for words in own]
    return out


def _6_bits_as_words(e: Emitter, columns: Sequence[ir.Value], num_runs: int) -> list[ir.Value]:
    if num_runs == 2:
        behind = [e.at(column, _HALF + _QUARTER) for column in columns]
        return _6_bits_as_words(e, columns, 1) + _6_bits_as_words(e, behind, 1)
    b, places = e.builder, [e.at(column, _HALF) for column in columns]
    stored = transposed_fours(e, [_load_words(e, place, _QUARTER // 4) for place in places])
    out = []
    for i, low in enumerate(_nibbles_as_words(e, columns, 1)):
        high, shift = stored[i % 4], 4 - 2 * (i // 4)
        moved = (b.shl if shift >= 0 else b.lshr)(high, e.splat_int(abs(shift)))
        out.append(b.or_(low, b.and_(moved, e.splat_int(0x30303030))))
    return out


_FLOAT4_BIAS = 16


def _e2m1_as_bytes(e: Emitter, source: ir.Value) -> ir.Value:
    return _look_up_e2m1(e, _nibbles_as_bytes(e, source))


def _e2m1_as_words(e: Emitter, columns: Sequence[ir.Value], num_runs: int) -> list[ir.Value]:
    codes = [
        e.builder.bitcast(words, ir.VectorType(_BYTE, RUN))
        for words in _nibbles_as_words(e, columns, num_runs)
    ]
    return [e.builder.bitcast(_look_up_e2m1(e, each), e.integers) for each in codes]


def _look_up_e2m1(e: Emitter, codes: ir.Value) -> ir.Value:
    """Looks twice the number, plus the bias, up in a register."""
    numbers = [int(2 * number) + _FLOAT4_BIAS for number in E2M1]
    table = ir.Constant(codes.type, numbers * (RUN // len(numbers)))
    look_up = function(
        e.builder, "llvm.x86.avx512.pshuf.b.512", codes.type, [codes.type, codes.type]
    )
    return e.builder.call(look_up, [table, codes])


def of_4_bits(bias: int = 0) -> Codes:
    """Returns the codes that stand for integers from -bias on."""
    table = tuple(float(code - bias) for code in range(16))
    return Codes(
        _HALF, _read_nibbles, _minus(bias), table=table, bytes=_nibbles_as_bytes, byte_bias=bias,
        words=_nibbles_as_words,
    )  # fmt: skip


def of_5_bits(bias: int = 0) -> Codes:
    """As `of_4_bits`."""
    table = tuple(float(code - bias) for code in range(_LARGE_TABLE))
    return Codes(
        _HALF + RUN // 8, _read_5_bits, _minus(bias), table=table, bytes=_5_bits_as_bytes,
        byte_bias=bias,
    )  # fmt: skip


def of_6_bits(bias: int = 0) -> Codes:
    """As `of_4_bits`."""
    return Codes(
        _HALF + _QUARTER, _read_6_bits, _minus(bias), bytes=_6_bits_as_bytes, byte_bias=bias,
        words=_6_bits_as_words,
    )  # fmt: skip


INT8 = Codes(RUN, _read_bytes, _minus(0), bytes=_bytes_plus_128, byte_bias=128)
FLOAT4 = Codes(
    _HALF, _read_nibbles, _e2m1, table=E2M1, bytes=_e2m1_as_bytes, byte_bias=_FLOAT4_BIAS,
    byte_unit=0.5, words=_e2m1_as_words,
)  # fmt: skip
FLOAT8 = Codes(RUN, _read_bytes, _e4m3, num_bits=16, unit=256.0)
