"""The codes of packed weights, and the numbers that they stand for.

    codes of a run of 64    bytes    where they lie
    8 bits                  64       in order
    2 bits                  16       byte i has the elements i, 16 + i, 32 + i and 48 + i, from its
                                     low bits on
    3 bits                  24       as 2 bits; then bit j of a 64-bit word is bit 2 of element j
    4 bits                  32       byte i has element i in its low bits, 32 + i in its high bits
    5 bits                  40       as 4 bits; then bit j of a 64-bit word is bit 4 of element j
    6 bits                  48       as 4 bits; then bits 2 * (j // 16) and after of byte j % 16 are
                                     bits 4 and 5 of element j

Products of integers take a code as an unsigned byte: what it stands for, in units, plus a bias.

This module must not know the parameters that turn a number into a weight; see `unpacking`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from llvmlite import ir

from shmllm_kernels.code_tables import E2M1
from shmllm_kernels.cpu.shuffles import (
    divided,
    joined,
    transposed,
    transposed_eights,
    transposed_fours,
    transposed_twos,
)
from shmllm_kernels.cpu.simd import INT32, LANES, Emitter, function

RUN = 64
"""The number of elements whose codes lie together."""
_HALF, _QUARTER = RUN // 2, RUN // 4
_BIT, _BYTE = ir.IntType(1), ir.IntType(8)
_SMALL_TABLE, _LARGE_TABLE = 16, 32


Read = Callable[[Emitter, ir.Value, int, ir.VectorType], ir.Value]
Numbers = Callable[[Emitter, ir.Value], ir.Value]
AsBytes = Callable[[Emitter, ir.Value], ir.Value]
Words = Callable[[Emitter, Sequence[ir.Value], int], list[ir.Value]]
RunWords = Callable[[Emitter, Sequence[ir.Value]], list[ir.Value]]


@dataclass(frozen=True, slots=True)
class Codes:
    """What the bits of a run stand for.

    Attributes:
        run_bytes: the size of a run.
        read: (emitter, address of a run, index of an element, vector type) -> the codes from that
            element on as integers, one for each lane; a vector of up to half a run.
        numbers: (emitter, codes in a vector of LANES) -> the numbers, float32.
        num_bits: the size of the integers that `numbers` takes.
        table: the numbers of all codes, if they are few: 16 or 32, of which some may have no code.
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
    read: Read
    numbers: Numbers
    num_bits: int = 32
    table: tuple[float, ...] = ()
    unit: float = 1.0
    bytes: AsBytes | None = None
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


def _read_2_bits(e: Emitter, source: ir.Value, first: int, vector: ir.VectorType) -> ir.Value:
    if vector.count > _QUARTER:
        part = ir.VectorType(vector.element, _QUARTER)
        firsts = range(first, first + vector.count, _QUARTER)
        return joined(e, [_read_2_bits(e, source, each, part) for each in firsts])
    read = _load_bytes(e, e.at(source, first % _QUARTER), vector.count)
    moved = e.builder.lshr(e.builder.zext(read, vector), splat(vector, 2 * (first // _QUARTER)))
    return e.builder.and_(moved, splat(vector, 3))


def _with_highest_bit(read: Read, num_bits: int) -> Read:
    """Reads codes of `num_bits` bits and one more."""
    place = num_bits * RUN // 8

    def joined(e: Emitter, source: ir.Value, first: int, vector: ir.VectorType) -> ir.Value:
        low, bit = read(e, source, first, vector), splat(vector, 1 << num_bits)
        is_set = _load_mask(e, e.at(source, place), first, vector.count)
        return e.builder.or_(low, e.builder.select(is_set, bit, splat(vector, 0)))

    return joined


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


def _minus(bias: int) -> Numbers:
    return lambda e, codes: e.builder.sitofp(
        e.builder.sub(codes, splat(e.integers, bias)), e.vector
    )


def _chosen(table: Sequence[float]) -> Numbers:
    """Chooses one of a table's numbers by the bits of codes, from the lowest on, for vectors that a
    table does not fit into."""

    def numbers(e: Emitter, codes: ir.Value) -> ir.Value:
        left = [ir.Constant(e.vector, [number] * e.lanes) for number in table]
        for bit in range((len(table) - 1).bit_length()):
            moved = e.builder.lshr(codes, e.splat_int(bit))
            is_set = e.builder.trunc(moved, ir.VectorType(_BIT, e.lanes))
            pairs = zip(left[::2], left[1::2], strict=True)
            left = [e.builder.select(is_set, high, low) for low, high in pairs]
        return left[0]

    return numbers


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


def _nibbles_as_bytes(e: Emitter, source: ir.Value) -> ir.Value:
    read = _load_bytes(e, source, _HALF)
    low = e.builder.and_(read, splat(read.type, 15))
    return joined(e, [low, e.builder.lshr(read, splat(read.type, 4))])


def _2_bits_as_bytes(e: Emitter, source: ir.Value) -> ir.Value:
    """Returns two bits of each element."""
    b, read = e.builder, _load_bytes(e, source, _QUARTER)
    quarters = [b.lshr(read, splat(read.type, shift)) for shift in (0, 2, 4, 6)]
    codes = joined(e, quarters)
    return b.and_(codes, splat(codes.type, 3))


def _with_highest_bit_as_bytes(read: AsBytes, num_bits: int) -> AsBytes:
    """As `_with_highest_bit`."""
    place = num_bits * RUN // 8

    def joined(e: Emitter, source: ir.Value) -> ir.Value:
        low, is_set = read(e, source), _load_mask(e, e.at(source, place), 0, RUN)
        bit = splat(low.type, 1 << num_bits)
        return e.builder.or_(low, e.builder.select(is_set, bit, splat(low.type, 0)))

    return joined


def _6_bits_as_bytes(e: Emitter, source: ir.Value) -> ir.Value:
    b, high = e.builder, _2_bits_as_bytes(e, e.at(source, _HALF))
    return b.or_(_nibbles_as_bytes(e, source), b.shl(high, splat(high.type, 4)))


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


def _by_run(words: RunWords, num_bits: int) -> Words:
    """Returns the words of each run by itself."""

    def of_runs(e: Emitter, columns: Sequence[ir.Value], num_runs: int) -> list[ir.Value]:
        places = [num_bits * RUN // 8 * run for run in range(num_runs)]
        return [
            word for place in places for word in words(e, [e.at(each, place) for each in columns])
        ]

    return of_runs


def _2_bits_as_words(e: Emitter, columns: Sequence[ir.Value]) -> list[ir.Value]:
    b, mask = e.builder, e.splat_int(0x03030303)
    stored = transposed_fours(e, [_load_words(e, column, _QUARTER // 4) for column in columns])
    return [b.and_(b.lshr(stored[i % 4], e.splat_int(2 * (i // 4))), mask) for i in range(RUN // 4)]


def _with_highest_bit_as_words(words: RunWords, num_bits: int) -> RunWords:
    """As `_with_highest_bit`."""

    def joined(e: Emitter, columns: Sequence[ir.Value]) -> list[ir.Value]:
        b, places = e.builder, [e.at(column, num_bits * RUN // 8) for column in columns]
        masks = transposed_twos(e, [_load_words(e, place, RUN // 32) for place in places])
        out = []
        for i, low in enumerate(words(e, columns)):
            fours = b.lshr(masks[i // 8], e.splat_int(4 * (i % 8)))
            out.append(b.or_(low, _spread(e, fours, num_bits)))
        return out

    return joined


def _spread(e: Emitter, fours: ir.Value, place: int) -> ir.Value:
    """Returns the four lowest bits of each lane as a bit of each of its bytes, at that place."""
    b = e.builder
    if e.lanes == LANES:
        table = [sum((four >> i & 1) << (8 * i + place) for i in range(4)) for four in range(16)]
        name = "llvm.x86.avx512.permvar.si.512"
        look_up = function(b, name, e.integers, [e.integers] * 2)
        return b.call(look_up, [ir.Constant(e.integers, table), fours])
    four = b.and_(fours, e.splat_int(15))
    moved = b.mul(four, e.splat_int(sum(1 << (7 * i + place) for i in range(4))))
    return b.and_(moved, e.splat_int(0x01010101 << place))


def _6_bits_as_words(e: Emitter, columns: Sequence[ir.Value]) -> list[ir.Value]:
    b, places = e.builder, [e.at(column, _HALF) for column in columns]
    stored = transposed_fours(e, [_load_words(e, place, _QUARTER // 4) for place in places])
    out = []
    for i, low in enumerate(_nibbles_as_words(e, columns, 1)):
        high, shift = stored[i % 4], 4 - 2 * (i // 4)
        moved = (b.shl if shift >= 0 else b.lshr)(high, e.splat_int(abs(shift)))
        out.append(b.or_(low, b.and_(moved, e.splat_int(0x30303030))))
    return out


def _look_up(e: Emitter, table: Sequence[int], codes: ir.Value) -> ir.Value:
    """Looks bytes up in a register."""
    count = codes.type.count
    if count > 4 * LANES:
        return joined(e, [_look_up(e, table, part) for part in divided(e, codes, 4 * LANES)])
    entries = ir.Constant(codes.type, [*table] * (count // len(table)))
    name = "llvm.x86.avx512.pshuf.b.512" if LANES == 16 else "llvm.x86.avx2.pshuf.b"
    look_up = function(e.builder, name, codes.type, [codes.type, codes.type])
    return e.builder.call(look_up, [entries, codes])


_OF_BITS: dict[int, tuple[Read, AsBytes, Words | None]] = {
    2: (_read_2_bits, _2_bits_as_bytes, _by_run(_2_bits_as_words, 2)),
    3: (
        _with_highest_bit(_read_2_bits, 2), _with_highest_bit_as_bytes(_2_bits_as_bytes, 2),
        _by_run(_with_highest_bit_as_words(_2_bits_as_words, 2), 3),
    ),
    4: (_read_nibbles, _nibbles_as_bytes, _nibbles_as_words),
    5: (
        _with_highest_bit(_read_nibbles, 4), _with_highest_bit_as_bytes(_nibbles_as_bytes, 4), None,
    ),
    6: (_read_6_bits, _6_bits_as_bytes, _by_run(_6_bits_as_words, 6)),
}  # fmt: skip
"""By the bits of a code."""


def integers(num_bits: int, bias: int = 0) -> Codes:
    """Returns the codes that stand for integers from -bias on."""
    read, as_bytes, words = _OF_BITS[num_bits]
    size = max(2**num_bits, _SMALL_TABLE)
    table = tuple(float(code - bias) for code in range(size)) if size <= _LARGE_TABLE else ()
    return Codes(
        num_bits * RUN // 8, read, _minus(bias), table=table, bytes=as_bytes, byte_bias=bias,
        words=words,
    )  # fmt: skip


def of_floats(num_bits: int, table: Sequence[float]) -> Codes:
    """Returns the codes that stand for the numbers of a table."""
    numbers = (*table, *(0.0 for _ in range(_SMALL_TABLE - len(table))))
    return Codes(num_bits * RUN // 8, _OF_BITS[num_bits][0], _chosen(table), table=numbers)


def of_table(num_bits: int, table: Sequence[float], byte_bias: int, byte_unit: float = 1) -> Codes:
    """As `of_floats`, of numbers that are integers of a byte in units."""
    _, as_bytes, words = _OF_BITS[num_bits]
    codes = of_floats(num_bits, table)
    entries = [int(number / byte_unit) + byte_bias for number in codes.table]

    def looked_up(e: Emitter, source: ir.Value) -> ir.Value:
        return _look_up(e, entries, as_bytes(e, source))

    def looked_up_words(e: Emitter, columns: Sequence[ir.Value], num_runs: int) -> list[ir.Value]:
        assert words is not None
        found = [
            e.builder.bitcast(each, ir.VectorType(_BYTE, RUN))
            for each in words(e, columns, num_runs)
        ]
        return [e.builder.bitcast(_look_up(e, entries, each), e.integers) for each in found]

    return replace(
        codes, bytes=looked_up, byte_bias=byte_bias, byte_unit=byte_unit,
        words=words and looked_up_words,
    )  # fmt: skip


INT8 = Codes(RUN, _read_bytes, _minus(0), bytes=_bytes_plus_128, byte_bias=128)
FLOAT4 = of_table(4, E2M1, 16, 0.5)
FLOAT8 = Codes(RUN, _read_bytes, _e4m3, num_bits=16, unit=256.0)
