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
from shmllm_kernels.cpu.memory import itemsize
from shmllm_kernels.cpu.simd import INT32, LANES, STORED, Emitter, function

RUN = 64
"""The number of elements that are unpacked at a time."""
MAX_DEPTH = 1024
"""The largest number of elements of a column in a panel."""
_BYTE, _WORD = ir.IntType(8), ir.IntType(16)


@dataclass(frozen=True, slots=True)
class Packing:
    """How a run of weights is stored.

    Attributes:
        run_bytes: the size of a run.
        scale_bytes: the size of its scales, which lie elsewhere; 0: products are scaled.
        unpack: (emitter, address of a run, address of its scales, address in the panel), by the
            dtype name of the panel.
        unpack_first: likewise, with the number of elements in the last run of a row; empty: rows
            are padded to whole runs.
    """

    run_bytes: int
    scale_bytes: int
    unpack: dict[str, Callable[..., None]]
    unpack_first: dict[str, Callable[..., None]] = field(default_factory=dict)


def _store(e: Emitter, value: ir.Value, address: ir.Value) -> None:
    e.builder.store(value, e.builder.inttoptr(address, value.type.as_pointer()), align=2)


def _load_bytes(e: Emitter, address: ir.Value, count: int) -> ir.Value:
    pointer = e.builder.inttoptr(address, ir.VectorType(_BYTE, count).as_pointer())
    return e.builder.load(pointer, align=1)


def _rounded(e: Emitter, low: ir.Value, high: ir.Value) -> ir.Value:
    """Rounds two vectors of 16 float32 to one of 32 bfloat16. (The intrinsic's types depend on the
    version of LLVM.)"""
    kind = ir.FunctionType(ir.VectorType(_WORD, 32), [e.vector, e.vector])
    return e.builder.asm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v", [low, high], False)


def _scale(e: Emitter, scales: ir.Value, index: int) -> ir.Value:
    """Loads one float16 into every lane, as float32. (Converted before it is copied, a scale would
    wait for the register that it is inserted into.)"""
    halves = ir.VectorType(_WORD, e.lanes)
    address = e.builder.inttoptr(e.at(scales, 2 * index), _WORD.as_pointer())
    undef = ir.Constant(halves, ir.Undefined)
    one = e.builder.insert_element(undef, e.builder.load(address, align=2), ir.Constant(INT32, 0))
    every = e.builder.shuffle_vector(one, undef, e.splat_int(0))
    return e.builder.fpext(
        e.builder.bitcast(every, ir.VectorType(STORED["float16"][0], e.lanes)), e.vector
    )


def _bytes_to_bfloat16(load: Callable[..., ir.Value]) -> Callable[..., None]:
    """load: (emitter, address, index of a quarter of the run, number of elements) -> int8."""

    def unpack(e: Emitter, source: ir.Value, scales: ir.Value, out: ir.Value, *count: ir.Value):
        quarters = [
            e.builder.sitofp(load(e, e.at(source, LANES * i), i, *count), e.vector)
            for i in range(RUN // LANES)
        ]
        for i in range(0, len(quarters), 2):
            _store(e, _rounded(e, *quarters[i : i + 2]), e.at(out, 2 * LANES * i))

    return unpack


def _first_quarter(e: Emitter, address: ir.Value, index: int, count: ir.Value) -> ir.Value:
    return e.load_first_bits(address, e.builder.sub(count, e.const(LANES * index)), 8)


def _nibbles_to_float32(group: int) -> Callable[..., None]:
    def unpack(e: Emitter, source: ir.Value, scales: ir.Value, out: ir.Value) -> None:
        for first in range(0, RUN, LANES):
            read = _load_bytes(e, e.at(source, first % (RUN // 2)), LANES)
            wide = e.builder.zext(read, e.integers)
            if first < RUN // 2:
                nibbles = e.builder.and_(wide, e.splat_int(15))
            else:
                nibbles = e.builder.lshr(wide, e.splat_int(4))
            numbers = e.builder.sitofp(e.builder.sub(nibbles, e.splat_int(8)), e.vector)
            e.store(
                e.builder.fmul(numbers, _scale(e, scales, first // group)), e.at(out, 4 * first)
            )

    return unpack


def _nibbles_to_bfloat16(group: int) -> Callable[..., None]:
    """Looks the nibbles up in a table of the products of all nibbles with the scales: 16 entries
    for the first half of the run, and then 16 for the second."""

    def unpack(e: Emitter, source: ir.Value, scales: ir.Value, out: ir.Value) -> None:
        b, words = e.builder, ir.VectorType(_WORD, 32)
        splat = lambda number: ir.Constant(words, [number] * 32)  # noqa: E731
        numbers = ir.Constant(e.vector, [float(i - 8) for i in range(16)])
        low, high = (b.fmul(numbers, _scale(e, scales, i * (RUN // 2) // group)) for i in range(2))
        table = _rounded(e, low, high)
        wide = b.zext(_load_bytes(e, source, RUN // 2), words)
        places = b.and_(wide, splat(15)), b.or_(b.lshr(wide, splat(4)), splat(16))
        look_up = function(b, "llvm.x86.avx512.permvar.hi.512", words, [words, words])
        for i, place in enumerate(places):
            _store(e, b.call(look_up, [table, place]), e.at(out, i * RUN))

    return unpack


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
            2 * RUN // group,
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
    return kind in PACKINGS and PACKINGS[kind].scale_bytes == 0


def _run_bytes(kind: str) -> int:
    return PACKINGS[kind].run_bytes if kind in PACKINGS else RUN * itemsize(kind)


def _run_scale_bytes(kind: str) -> int:
    return PACKINGS[kind].scale_bytes


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
    return (k + RUN - 1) // RUN * _run_scale_bytes(kind) if _is_padded(kind) else 0


@emitted
def _unpack_run(builder, source, scales, out, kind, x_kind):
    PACKINGS[kind].unpack[x_kind](Emitter(builder), source, scales, out)


@emitted
def _unpack_first(builder, source, scales, out, count, kind, x_kind):
    PACKINGS[kind].unpack_first[x_kind](Emitter(builder), source, scales, out, count)


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
    with builder.goto_entry_block():
        memory = builder.alloca(_BYTE, num_columns.constant * panel_stride(x_kind))
        memory.align = 64
        return builder.ptrtoint(memory, ir.IntType(64))


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
    for column in range(num_columns):
        row, own, target = (
            source + column * stride, scales + column * scale_stride,
            out + column * panel_stride(x_kind),
        )  # fmt: skip
        for run in range(num_runs):
            at = row + run * _run_bytes(kind)
            _prefetch(at + num_columns * stride)
            _unpack_run(
                at, own + run * _run_scale_bytes(kind), target + run * RUN * itemsize(x_kind),
                kind, x_kind,
            )  # fmt: skip
        if _has_tail(kind):
            rest = depth - num_runs * RUN
            if rest > 0:
                _unpack_first(
                    row + num_runs * _run_bytes(kind), own,
                    target + num_runs * RUN * itemsize(x_kind), rest, kind, x_kind,
                )  # fmt: skip
