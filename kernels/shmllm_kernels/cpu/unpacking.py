"""Unpacks weights of few bits into a panel: the columns that a tile of a product multiplies next.

    weights    a scale for       unpacked to float32    to bfloat16
    int8       (a whole row)     -                      exactly
    int4       32 elements       exactly                to the nearest, ties to even
    int4-g64   64 elements       exactly                to the nearest, ties to even

A panel stays in the L1 cache while all rows of activations pass it. A format of weights is one row
of `PACKINGS`. Tiles widen int8 to float32 themselves; its scales are applied to the products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from llvmlite import ir

from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import itemsize, on_stack
from shmllm_kernels.cpu.simd import LANES, Emitter, function

RUN = 64
"""The number of elements that are unpacked at a time."""
SMALLEST_GROUP = 32
"""The smallest number of elements that share a scale."""
MAX_DEPTH = 1024
"""The largest number of elements of a column in a panel."""
_BYTE, _WORD = ir.IntType(8), ir.IntType(16)


@dataclass(frozen=True, slots=True)
class Packing:
    """How a run of weights is stored.

    Attributes:
        run_bytes: the size of a run.
        num_scales: the number of its scales, float16, which lie elsewhere; 0: products are scaled.
        unpack: (emitter, address of a run, address of its scales in float32) -> vectors as products
            read them, by the dtype name of activations.
        unpack_first: likewise, with the number of elements in the last run of a row; empty: rows
            are padded to whole runs.
    """

    run_bytes: int
    num_scales: int
    unpack: dict[str, Callable[..., list[ir.Value]]]
    unpack_first: dict[str, Callable[..., list[ir.Value]]] = field(default_factory=dict)


def _load_bytes(e: Emitter, address: ir.Value, count: int) -> ir.Value:
    pointer = e.builder.inttoptr(address, ir.VectorType(_BYTE, count).as_pointer())
    return e.builder.load(pointer, align=1)


def _rounded(e: Emitter, low: ir.Value, high: ir.Value) -> ir.Value:
    """Rounds two vectors of 16 float32 to one of 32 bfloat16, as int32. (The types of LLVM's
    intrinsic depend on its version.)"""
    kind = ir.FunctionType(e.integers, [e.vector, e.vector])
    return e.builder.asm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v", [low, high], False)


def _scale(e: Emitter, scales: ir.Value, index: int) -> ir.Value:
    return e.broadcast(e.load_scalar(e.at(scales, 4 * index)))


def _bytes_to_bfloat16(load: Callable[..., ir.Value]) -> Callable[..., list[ir.Value]]:
    """load: (emitter, address, index of a quarter of the run, number of elements) -> int8."""

    def unpack(e: Emitter, source: ir.Value, scales: ir.Value, *count: ir.Value) -> list[ir.Value]:
        quarters = [
            e.builder.sitofp(load(e, e.at(source, LANES * i), i, *count), e.vector)
            for i in range(RUN // LANES)
        ]
        return [_rounded(e, *quarters[i : i + 2]) for i in range(0, len(quarters), 2)]

    return unpack


def _first_quarter(e: Emitter, address: ir.Value, index: int, count: ir.Value) -> ir.Value:
    return e.load_first_bits(address, e.builder.sub(count, e.const(LANES * index)), 8)


def _nibbles_to_float32(group: int) -> Callable[..., list[ir.Value]]:
    def unpack(e: Emitter, source: ir.Value, scales: ir.Value) -> list[ir.Value]:
        out = []
        for first in range(0, RUN, LANES):
            read = _load_bytes(e, e.at(source, first % (RUN // 2)), LANES)
            wide = e.builder.zext(read, e.integers)
            if first < RUN // 2:
                nibbles = e.builder.and_(wide, e.splat_int(15))
            else:
                nibbles = e.builder.lshr(wide, e.splat_int(4))
            numbers = e.builder.sitofp(e.builder.sub(nibbles, e.splat_int(8)), e.vector)
            out.append(e.builder.fmul(numbers, _scale(e, scales, first // group)))
        return out

    return unpack


def _nibbles_to_bfloat16(group: int) -> Callable[..., list[ir.Value]]:
    """Looks the nibbles up in a table of the products of all nibbles with the scales: 16 entries
    for the first half of the run, and then 16 for the second."""

    def unpack(e: Emitter, source: ir.Value, scales: ir.Value) -> list[ir.Value]:
        b, words = e.builder, ir.VectorType(_WORD, 32)
        splat = lambda number: ir.Constant(words, [number] * 32)  # noqa: E731
        numbers = ir.Constant(e.vector, [float(i - 8) for i in range(16)])
        low, high = (b.fmul(numbers, _scale(e, scales, i * (RUN // 2) // group)) for i in range(2))
        table = b.bitcast(_rounded(e, low, high), words)
        wide = b.zext(_load_bytes(e, source, RUN // 2), words)
        places = b.and_(wide, splat(15)), b.or_(b.lshr(wide, splat(4)), splat(16))
        look_up = function(b, "llvm.x86.avx512.permvar.hi.512", words, [words, words])
        return [b.bitcast(b.call(look_up, [table, place]), e.integers) for place in places]

    return unpack


SCALES_BYTES = 4 * (MAX_DEPTH // SMALLEST_GROUP)
"""The size of a column's scales in float32."""

PACKINGS = {
    "int8": Packing(
        RUN,
        0,
        {"bfloat16": _bytes_to_bfloat16(lambda e, address, i: _load_bytes(e, address, LANES))},
        {"bfloat16": _bytes_to_bfloat16(_first_quarter)},
    ),
    **{
        kind: Packing(
            RUN // 2,
            RUN // group,
            {"float32": _nibbles_to_float32(group), "bfloat16": _nibbles_to_bfloat16(group)},
        )
        for kind, group in (("int4", 32), ("int4-g64", 64))
    },
}
"""The packed formats by the name of the weights' kind."""


def is_unpacked(kind: str, x_kind: str) -> bool:
    """Returns whether weights of a kind go through a panel for activations of a kind."""
    return kind in PACKINGS and x_kind in PACKINGS[kind].unpack


def has_column_scales(kind: str) -> bool:
    """Returns whether the products of each column are scaled."""
    return kind in PACKINGS and PACKINGS[kind].num_scales == 0


def _run_bytes(kind: str) -> int:
    return PACKINGS[kind].run_bytes if kind in PACKINGS else RUN * itemsize(kind)


def num_scales_of(kind: str) -> int:
    """Returns the number of scales of a run."""
    return PACKINGS[kind].num_scales


def _is_padded(kind: str) -> bool:
    return kind in PACKINGS and not _has_tail(kind)


def _has_tail(kind: str) -> bool:
    return bool(PACKINGS[kind].unpack_first)


@compiled
def row_bytes(k, kind):
    """Returns the size of a row of k weights."""
    if _is_padded(kind):
        return (k + RUN - 1) // RUN * _run_bytes(kind)
    return k * itemsize(kind)


@compiled
def scale_bytes(k, kind):
    """Returns the size of the scales of a row of k weights."""
    if has_column_scales(kind):
        return 4
    return (k + RUN - 1) // RUN * (2 * num_scales_of(kind)) if _is_padded(kind) else 0


def _store_all(e: Emitter, values: list[ir.Value], out: ir.Value) -> None:
    for i, value in enumerate(values):
        e.store(value, e.at(out, 4 * LANES * i))


@emitted
def _unpack_run(builder, source, scales, out, kind, x_kind):
    e = Emitter(builder)
    _store_all(e, PACKINGS[kind].unpack[x_kind](e, source, scales), out)


@emitted
def _unpack_first(builder, source, scales, out, count, kind, x_kind):
    e = Emitter(builder)
    _store_all(e, PACKINGS[kind].unpack_first[x_kind](e, source, scales, count), out)


@emitted
def _prefetch(builder, address):
    Emitter(builder).prefetch(address)


def panel_stride(x_kind: str) -> int:
    """Returns the bytes from one column of a panel to the next. (With a power of two, all columns
    would lie in the same sets of the L1 cache.)"""
    return MAX_DEPTH * itemsize(x_kind) + 64


@emitted
def panel(builder, num_columns, kind, x_kind):
    """Returns the address of a panel on the stack, or 0 if weights of that kind need none.

    num_columns: a constant.
    """
    if not is_unpacked(kind, x_kind):
        return 0
    size = ir.Constant(ir.IntType(64), num_columns.constant * panel_stride(x_kind))
    return on_stack.emit(builder, size)


@emitted
def _widen_some(builder, scales, count, out):
    """Converts up to LANES scales to float32."""
    e = Emitter(builder)
    e.store(e.load_first(scales, count, "float16"), out)


@compiled
def widen_scales(scales, count, out):
    """Converts a column's scales to float32. (One by one, they take as long as its weights.)"""
    for i in range(0, count, LANES):
        _widen_some(scales + 2 * i, count - i, out + 4 * i)


@compiled
def unpack(source, stride, scales, scale_stride, num_columns, depth, out, kind, x_kind):
    """Unpacks columns into a panel, and prefetches as many columns behind them.

    Args:
        source, stride: the first column's elements; the bytes from one column to the next.
        scales, scale_stride: likewise its scales.
        num_columns: the number of columns.
        depth: the number of their elements, at most MAX_DEPTH.
        out: the panel.
    """
    num_runs = depth // RUN if _has_tail(kind) else (depth + RUN - 1) // RUN
    num_scales = num_runs * num_scales_of(kind)
    own = on_stack(SCALES_BYTES)
    for column in range(num_columns):
        row, target = source + column * stride, out + column * panel_stride(x_kind)
        widen_scales(scales + column * scale_stride, num_scales, own)
        for run in range(num_runs):
            at = row + run * _run_bytes(kind)
            _prefetch(at + num_columns * stride)
            _unpack_run(
                at, own + 4 * num_scales_of(kind) * run, target + run * RUN * itemsize(x_kind),
                kind, x_kind,
            )  # fmt: skip
        if _has_tail(kind):
            rest = depth - num_runs * RUN
            if rest > 0:
                _unpack_first(
                    row + num_runs * _run_bytes(kind), own,
                    target + num_runs * RUN * itemsize(x_kind), rest, kind, x_kind,
                )  # fmt: skip
