"""How products by groups multiply integers: by the CPU's dot products of bytes or of words.

A run of 64 elements is multiplied plane by plane. A plane has 64 bytes of activations, 16 words of
32 bits, and as many of each column of weights. Word i holds something of the elements from 4 * i
to 4 * i + 3 only, so a group of elements is the same words of every plane.

              instruction    a plane of activations has      and of weights
    bytes     AVX512_VNNI    a digit of each element, int8   the code of each element: one plane for
                                                             all digits
    words     AVX2           every other element, int16      the codes of these elements

Both sums are exact, so both ways have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from shmllm_kernels.cpu.arithmetic import HAS_DOTS_OF_WORDS, dot_bytes, dot_words
from shmllm_kernels.cpu.shuffles import divided, joined
from shmllm_kernels.cpu.simd import INT32, LANES, Emitter

DIGIT_BITS = 8
_WORD = ir.IntType(16)


@dataclass(frozen=True, slots=True)
class GroupArithmetic:
    """One way to multiply integers.

    Attributes:
        num_x_planes: (number of an integer's digits) -> the planes of a run of activations.
        x_planes: (emitter, int32 integers of a group, number of digits) -> the group's part of each
            plane.
        num_weight_planes: the planes of a run of weights.
        weight_planes: (emitter, the codes of a run, bytes in 16 int32) -> the planes.
        dot: (emitter, int32 sums, weights, activations) -> the sums with the products of each lane.
        place_bits: by how many bits sums are shifted before the next plane is added.
    """

    num_x_planes: Callable[[int], int]
    x_planes: Callable[[Emitter, ir.Value, int], list[ir.Value]]
    num_weight_planes: int
    weight_planes: Callable[[Emitter, ir.Value], list[ir.Value]]
    dot: Callable[[Emitter, ir.Value, ir.Value, ir.Value], ir.Value]
    place_bits: int


def _digits(e: Emitter, integers: ir.Value, num_digits: int) -> list[ir.Value]:
    """Returns the digits of integers, int8, the highest first."""
    b, kind = e.builder, ir.VectorType(ir.IntType(DIGIT_BITS), e.lanes)
    digits, rest = [], integers
    for _ in range(num_digits):
        digits.append(b.trunc(rest, kind))
        without = b.sub(rest, b.sext(digits[-1], e.integers))
        rest = b.ashr(without, e.splat_int(DIGIT_BITS))
    return digits[::-1]


def _every_other(e: Emitter, integers: ir.Value, num_digits: int) -> list[ir.Value]:
    """Returns the integers with an even place, and those with an odd one, int16."""
    words = e.builder.trunc(integers, ir.VectorType(_WORD, e.lanes))
    kind = ir.VectorType(INT32, e.lanes // 2)
    return [
        e.builder.shuffle_vector(words, words, ir.Constant(kind, [*range(odd, e.lanes, 2)]))
        for odd in (0, 1)
    ]


def _bytes_as_words(e: Emitter, codes: ir.Value) -> list[ir.Value]:
    """Returns the bytes with an even place, and those with an odd one, each in 16 bits."""
    b, words = e.builder, ir.VectorType(_WORD, 2 * e.lanes)
    pairs = b.bitcast(codes, words)
    low = b.and_(pairs, ir.Constant(words, [255] * words.count))
    high = b.lshr(pairs, ir.Constant(words, [8] * words.count))
    return [b.bitcast(each, e.integers) for each in (low, high)]


def _by_registers(e: Emitter, compute: Callable[..., ir.Value], *vectors: ir.Value) -> ir.Value:
    """Returns what (emitter, parts of the vectors) -> part computes of each register's part."""
    own = Emitter(e.builder, LANES)
    registers = zip(*(divided(e, each, LANES) for each in vectors), strict=True)
    return joined(e, [compute(own, *parts) for parts in registers])


def _dot_words(e: Emitter, sums: ir.Value, weights: ir.Value, x: ir.Value) -> ir.Value:
    return _by_registers(e, dot_words, sums, weights, x)


def _kept(e: Emitter, sums: ir.Value) -> ir.Value:
    kind = ir.FunctionType(e.integers, [e.integers])
    return e.builder.asm(kind, "", "=x,0", [sums], True)


def in_order(e: Emitter, sums: Sequence[ir.Value]) -> list[ir.Value]:
    """Keeps LLVM from adding further numbers before these sums exist, where registers are few. (It
    would add up one sum of a tile after the other, and keep all weights and activations in memory
    meanwhile.)"""
    if e.lanes == LANES:
        return list(sums)
    return [_by_registers(e, _kept, each) for each in sums]


_BYTES = GroupArithmetic(
    lambda num_digits: num_digits, _digits, 1, lambda e, codes: [codes], dot_bytes, DIGIT_BITS
)
_WORDS = GroupArithmetic(lambda num_digits: 2, _every_other, 2, _bytes_as_words, _dot_words, 0)

OWN = _WORDS if HAS_DOTS_OF_WORDS else _BYTES
"""How this CPU multiplies integers by groups, if it has `arithmetic.HAS_INT8`."""
