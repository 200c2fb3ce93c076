"""Joins and divides vectors, and moves numbers between 16 vectors of 16 by the shuffles of x86."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from shmllm_kernels.cpu.simd import INT32, Emitter

_WIDTH, _PART, _PARTS = 16, 4, 4
"""A vector has four parts of four numbers, 128 bits, which shuffles do not mix."""


def joined(e: Emitter, parts: Sequence[ir.Value]) -> ir.Value:
    """Returns the numbers of two, four or eight vectors one after the other."""
    if len(parts) > 2:
        half = len(parts) // 2
        parts = [joined(e, parts[:half]), joined(e, parts[half:])]
    kind = ir.VectorType(INT32, 2 * parts[0].type.count)
    return e.builder.shuffle_vector(*parts, ir.Constant(kind, list(range(kind.count))))


def divided(e: Emitter, vector: ir.Value, count: int) -> list[ir.Value]:
    """Returns the vectors of `count` numbers that `joined` makes one of."""
    kind = ir.VectorType(INT32, count)
    return [
        e.builder.shuffle_vector(vector, vector, ir.Constant(kind, [*range(at, at + count)]))
        for at in range(0, vector.type.count, count)
    ]


def _pair(e: Emitter, two: Sequence[ir.Value], lanes: Sequence[int]) -> ir.Value:
    return e.builder.shuffle_vector(*two, ir.Constant(e.integers, list(lanes)))


def _singles(half: int) -> list[int]:
    """Takes numbers of two vectors in turn, from one half of each part."""
    places = [_PART * part + 2 * half + i for part in range(_PARTS) for i in (0, 1)]
    return [lane for place in places for lane in (place, _WIDTH + place)]


def _twos(half: int) -> list[int]:
    """Takes two numbers of two vectors in turn, from one half of each part."""
    places = [_PART * part + 2 * half for part in range(_PARTS)]
    return [lane for p in places for lane in (p, p + 1, _WIDTH + p, _WIDTH + p + 1)]


def _every_other_part(first: int) -> list[int]:
    """Takes two parts of each of two vectors."""
    parts = [(vector, first + 2 * i) for vector in (0, 1) for i in (0, 1)]
    return [_WIDTH * vector + _PART * part + i for vector, part in parts for i in range(_PART)]


def _exchange_parts(e: Emitter, vectors: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns four vectors of which the i-th has the i-th parts of four vectors."""
    out = [vectors[0]] * _PARTS
    for odd in (0, 1):
        low, high = (_pair(e, vectors[i : i + 2], _every_other_part(odd)) for i in (0, 2))
        for upper in (0, 1):
            out[odd + 2 * upper] = _pair(e, (low, high), _every_other_part(upper))
    return out


def _transposed_parts(e: Emitter, four: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns the columns of the four rows that each part of four vectors has."""
    twos = [_pair(e, four[i : i + 2], _singles(half)) for i in (0, 2) for half in (0, 1)]
    return [_pair(e, (twos[i], twos[2 + i]), _twos(half)) for i in (0, 1) for half in (0, 1)]


def transposed(e: Emitter, rows: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns the columns of 16 vectors."""
    quads = [_transposed_parts(e, rows[4 * q : 4 * q + 4]) for q in range(_PARTS)]
    of_number = [_exchange_parts(e, [quad[i] for quad in quads]) for i in range(_PART)]
    return [of_number[i][part] for part in range(_PARTS) for i in range(_PART)]


def transposed_eights(e: Emitter, rows: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns the columns of 16 rows of eight numbers: eight vectors."""
    pairs = [joined(e, [rows[i], rows[i + 4]]) for i in (0, 1, 2, 3, 8, 9, 10, 11)]
    first, second = _transposed_parts(e, pairs[:4]), _transposed_parts(e, pairs[4:])
    columns = list(zip(first, second, strict=True))
    return [_pair(e, two, _every_other_part(odd)) for odd in (0, 1) for two in columns]


def transposed_fours(e: Emitter, rows: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns the columns of 16 rows of four numbers: four vectors."""
    return _transposed_parts(e, [joined(e, rows[i::4]) for i in range(4)])


def transposed_twos(e: Emitter, rows: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns the columns of 16 rows of two numbers: two vectors."""
    halves = [joined(e, rows[i : i + 8]) for i in (0, 8)]
    return [_pair(e, halves, range(column, 2 * _WIDTH, 2)) for column in (0, 1)]


def part_sums(e: Emitter, vectors: Sequence[ir.Value]) -> list[ir.Value]:
    """Sums the four numbers of each part of 16 vectors of int32; the i-th result has the sums of
    all i-th parts."""
    sums = list(vectors)
    for lanes in (_singles, _twos):
        sums = [
            e.builder.add(*(_pair(e, sums[i : i + 2], lanes(half)) for half in (0, 1)))
            for i in range(0, len(sums), 2)
        ]
    return _exchange_parts(e, sums)
