"""Unpacks weights of few bits into a panel: the columns that a tile of a product multiplies next.

    weights                   codes       group       weight              parameters
    int8                      int8        (a row)     q                   (products are scaled)
    int4, int4-g64            4 bits      32, 64      (q - 8) * s         float16
    q8_0, w8-g64-f16          int8        32, 64      q * s               float16
    w8-g32-bf16, -g64-bf16    int8        32, 64      q * s               bfloat16
    w8-g32-f32, -g64-f32      int8        32, 64      q * s               float32
    q4_1                      4 bits      32          q * s + m           float16
    q5_0                      5 bits      32          (q - 16) * s        float16
    q5_1                      5 bits      32          q * s + m           float16
    q4_k                      4 bits      32          q * s + m           k
    q5_k                      5 bits      32          q * s + m           k
    q6_k                      6 bits      16          (q - 32) * s        k6
    q2_k                      2 bits      16          q * s + m           k2
    q3_k                      3 bits      16          (q - 4) * s         k6
    ternary, ternary-f32      2 bits      64          (q - 1) * s         float16, float32
    iq4_nl, iq4_xs            iq4         32          number * s          float16, k8
    iq3_s, iq3_xxs            of 4 bits   32          number * s          k8
    iq2, iq1                  of 3 bits   16          number * s          k6
    nvfp4                     e2m1        16          number * s          e4m3
    nf4                       nf4         64          number * s          float32
    mxfp4                     e2m1        32          number * s          e8m0
    fp8                       e4m3        64          number * s          float32
    w4-g32-bf16, -g64-bf16    4 bits      32, 64      (q - 8) * s         bfloat16
    w4-g32-f32, -g64-f32      4 bits      32, 64      (q - 8) * s         float32
    w4z-g32-f16, -g64-f16     4 bits      32, 64      (q - z) * s         float16
    w4z-g32-bf16, -g64-bf16   4 bits      32, 64      (q - z) * s         bfloat16
    w4z-g32-f32, -g64-f32     4 bits      32, 64      (q - z) * s         float32

`codes` has the codes, `parameters` how parameters are stored. The parameters of a run of 64 are
first s of its groups, then m or z of its groups. A weight is computed in float32, each operation
rounded by itself, and for activations in bfloat16 rounded to the nearest, ties to even; subnormal
numbers become zero there, as in the products.

A panel stays in the L1 cache while all rows of activations pass it. A format of weights is one row
of `PACKINGS`. Tiles widen int8 to float32 themselves; its scales are applied to the products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from shmllm_kernels.code_tables import IQ1, IQ2, IQ3_S, IQ3_XXS, IQ4, NF4
from shmllm_kernels.cpu.arithmetic import round_pairs
from shmllm_kernels.cpu.codes import (
    FLOAT4,
    FLOAT8,
    INT8,
    RUN,
    Codes,
    integers,
    of_floats,
    of_table,
    splat,
)
from shmllm_kernels.cpu.language import compiled, compiled_noinline, emitted
from shmllm_kernels.cpu.memory import itemsize, on_stack
from shmllm_kernels.cpu.parameters import STORED, stored_bytes, widen
from shmllm_kernels.cpu.simd import LANES, Emitter, function
from shmllm_kernels.cpu.tile_instructions import copy_line

MAX_DEPTH = 1024
"""The largest number of elements of a column in a panel."""
_WORD = ir.IntType(16)


@dataclass(frozen=True, slots=True)
class Form:
    """How a number becomes a weight.

    Attributes:
        count: the number of parameters of a group.
        weights: (builder, numbers, *parameters of their groups) -> weights, float32.
        offset: (builder, *parameters) -> what is added to a number times its scale, if any: weights
            but for rounding.
    """

    count: int
    weights: Callable[..., ir.Value]
    offset: Callable[..., ir.Value] | None = None


BY_COLUMN = Form(0, lambda b, q: q)
SCALED = Form(1, lambda b, q, s: b.fmul(q, s))
OFFSET = Form(2, lambda b, q, s, m: b.fadd(b.fmul(q, s), m), lambda b, s, m: m)
ZERO = Form(2, lambda b, q, s, z: b.fmul(b.fsub(q, z), s), lambda b, s, z: b.fneg(b.fmul(z, s)))


@dataclass(frozen=True, slots=True)
class Packing:
    """How weights are stored.

    Attributes:
        codes: what their bits stand for.
        group: the number of elements that share parameters.
        form: how a number becomes a weight.
        stored: how parameters are stored, a key of `parameters.STORED`.
        is_padded: whether rows are padded to whole runs.
        x_kinds: the dtype names of the activations for which weights are unpacked.
    """

    codes: Codes
    group: int
    form: Form
    stored: str
    is_padded: bool = True
    x_kinds: tuple[str, ...] = ("float32", "bfloat16")

    @property
    def num_scales(self) -> int:
        """The number of parameters of a run."""
        return RUN // self.group * self.form.count

    def unpack(self, e: Emitter, source: ir.Value, scales: ir.Value, x_kind: str) -> list[ir.Value]:
        """Returns a run of weights as products read them.

        source, scales: the addresses of the run, and of its parameters in float32.
        """
        size = len(self.codes.table)
        if x_kind == "bfloat16" and size and self.group >= RUN // 2:
            return self._look_up_bfloat16(e, source, scales)
        floats = [
            self._look_up(e, source, scales, first)
            if size == LANES
            else self._weights(e, scales, first, self._numbers(e, source, first))
            for first in range(0, RUN, LANES)
        ]
        if x_kind == "float32":
            return floats
        return [round_pairs(e, *floats[i : i + 2]) for i in range(0, len(floats), 2)]

    def _weights(self, e: Emitter, scales: ir.Value, first: int, numbers: ir.Value) -> ir.Value:
        """Returns the weights of these numbers in the group of the element `first`."""
        places = range(first // self.group, self.num_scales, RUN // self.group)
        own = [e.broadcast(e.load_scalar(e.at(scales, 4 * place))) for place in places]
        if self.codes.unit != 1:
            own[0] = e.builder.fmul(own[0], ir.Constant(e.vector, [self.codes.unit] * e.lanes))
        return self.form.weights(e.builder, numbers, *own)

    def _numbers(self, e: Emitter, source: ir.Value, first: int) -> ir.Value:
        vector = ir.VectorType(ir.IntType(self.codes.num_bits), LANES)
        return self.codes.numbers(e, self.codes.read(e, source, first, vector))

    def _look_up(self, e: Emitter, source: ir.Value, scales: ir.Value, first: int) -> ir.Value:
        """Looks codes up in a table of the weights of all codes, in one register."""
        table = self._weights(e, scales, first, ir.Constant(e.vector, self.codes.table))
        name = "llvm.x86.avx512.permvar.sf.512"
        look_up = function(e.builder, name, e.vector, [e.vector, e.integers])
        return e.builder.call(look_up, [table, self.codes.read(e, source, first, e.integers)])

    def _look_up_bfloat16(self, e: Emitter, source: ir.Value, scales: ir.Value) -> list[ir.Value]:
        """Looks codes up in a table of the weights of all codes for the second half of the run, and
        then of those for the first. A register has a table of 32 entries. (The first half's codes
        have to be cut out of bytes, which also moves them to the second table.)"""
        b, numbers, words = e.builder, self.codes.table, ir.VectorType(_WORD, 2 * LANES)
        entries = [
            self._weights(e, scales, half, ir.Constant(e.vector, numbers[i : i + LANES]))
            for half in (RUN // 2, 0)
            for i in range(0, len(numbers), LANES)
        ]
        # LLVM joins reads of the same bytes, but not across `round_pairs`.
        codes = [self.codes.read(e, source, first, words) for first in (0, RUN // 2)]
        tables = [
            b.bitcast(round_pairs(e, *entries[i : i + 2]), words) for i in range(0, len(entries), 2)
        ]
        look_up = function(b, "llvm.x86.avx512.permvar.hi.512", words, [words, words])
        out = []
        for half in (0, 1):
            table, place = divmod((1 - half) * len(numbers), words.count)
            places = b.or_(codes[half], splat(words, place))
            out.append(b.bitcast(b.call(look_up, [tables[table], places]), e.integers))
        return out


_IQ4 = of_table(4, IQ4, 128)
PACKINGS = {
    "int8": Packing(INT8, RUN, BY_COLUMN, "", is_padded=False, x_kinds=("bfloat16",)),
    "int4": Packing(integers(4, 8), 32, SCALED, "float16"),
    "int4-g64": Packing(integers(4, 8), 64, SCALED, "float16"),
    "q8_0": Packing(INT8, 32, SCALED, "float16"),
    "q4_1": Packing(integers(4), 32, OFFSET, "float16"),
    "q5_0": Packing(integers(5, 16), 32, SCALED, "float16"),
    "q5_1": Packing(integers(5), 32, OFFSET, "float16"),
    "q4_k": Packing(integers(4), 32, OFFSET, "k"),
    "q5_k": Packing(integers(5), 32, OFFSET, "k"),
    "q6_k": Packing(integers(6, 32), 16, SCALED, "k6"),
    "q2_k": Packing(integers(2), 16, OFFSET, "k2"),
    "q3_k": Packing(integers(3, 4), 16, SCALED, "k6"),
    "ternary": Packing(integers(2, 1), 64, SCALED, "float16"),
    "ternary-f32": Packing(integers(2, 1), 64, SCALED, "float32"),
    "iq4_nl": Packing(_IQ4, 32, SCALED, "float16"),
    "iq4_xs": Packing(_IQ4, 32, SCALED, "k8"),
    "iq3_s": Packing(of_table(4, IQ3_S, 16), 32, SCALED, "k8"),
    "iq3_xxs": Packing(of_table(4, IQ3_XXS, 64, 0.25), 32, SCALED, "k8"),
    "iq2": Packing(of_table(3, IQ2, 64, 0.125), 16, SCALED, "k6"),
    "iq1": Packing(of_table(3, IQ1, 16, 0.125), 16, SCALED, "k6"),
    "nf4": Packing(of_floats(4, NF4), 64, SCALED, "float32"),
    "nvfp4": Packing(FLOAT4, 16, SCALED, "e4m3"),
    "mxfp4": Packing(FLOAT4, 32, SCALED, "e8m0"),
    "fp8": Packing(FLOAT8, 64, SCALED, "float32"),
    "w8-g64-f16": Packing(INT8, 64, SCALED, "float16"),
    **{
        f"{name}-g{group}-{short}": Packing(codes, group, form, dtype)
        for name, codes, form in (("w4", integers(4, 8), SCALED), ("w8", INT8, SCALED))
        for group in (32, 64)
        for short, dtype in (("bf16", "bfloat16"), ("f32", "float32"))
    },
    **{
        f"w4z-g{group}-{short}": Packing(integers(4), group, ZERO, dtype)
        for group in (32, 64)
        for short, dtype in (("f16", "float16"), ("bf16", "bfloat16"), ("f32", "float32"))
    },
}
"""The packed formats by the name of the weights' kind."""

SCALES_BYTES = 4 * (MAX_DEPTH // RUN) * max(each.num_scales for each in PACKINGS.values())
"""The size of a column's parameters in float32."""


def is_unpacked(kind: str, x_kind: str) -> bool:
    """Returns whether weights of a kind go through a panel for activations of a kind."""
    return kind in PACKINGS and x_kind in PACKINGS[kind].x_kinds


def has_column_scales(kind: str) -> bool:
    """Returns whether the products of each column are scaled."""
    return kind in PACKINGS and PACKINGS[kind].form is BY_COLUMN


def part_step(kind: str) -> int:
    """Returns the number of elements, whole runs and whole records of parameters, of which a part
    of a row has a multiple."""
    packing = PACKINGS[kind]
    return RUN * max(STORED[packing.stored].count // max(packing.num_scales, 1), 1)


def _run_bytes(kind: str) -> int:
    return PACKINGS[kind].codes.run_bytes


def _is_padded(kind: str) -> bool:
    return kind in PACKINGS and PACKINGS[kind].is_padded


def _num_scales(kind: str) -> int:
    return PACKINGS[kind].num_scales


def _stored(kind: str) -> str:
    return PACKINGS[kind].stored


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
    if _is_padded(kind):
        return stored_bytes((k + RUN - 1) // RUN * _num_scales(kind), _stored(kind))
    return 0


@compiled
def run_scales_bytes(kind):
    """Returns the size of a run's parameters in float32."""
    return 4 * _num_scales(kind)


@emitted
def _unpack_run(builder, source, scales, out, kind, x_kind):
    e = Emitter(builder)
    for i, value in enumerate(PACKINGS[kind].unpack(e, source, scales, x_kind)):
        e.store(value, e.at(out, 4 * LANES * i))


@emitted
def prefetch(builder, address):
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


@compiled
def widen_scales(scales, depth, out, kind):
    """Converts the parameters of `depth` elements of a column to float32, in SCALES_BYTES."""
    widen(scales, (depth + RUN - 1) // RUN * _num_scales(kind), out, _stored(kind))


@emitted
def whole_run(builder, source, num_elements, kind):
    """Returns the address of a row's last run, which has `num_elements`: its own, or that of a copy
    filled with zeros if the row is not padded."""
    if _is_padded(kind):
        return source
    copy = on_stack.emit(builder, ir.Constant(ir.IntType(64), RUN))
    copy_line.emit(builder, source, num_elements, copy)
    return copy


@compiled
def _unpack_some(source, num_elements, scales, out, kind, x_kind):
    """Unpacks a run that has `num_elements`, unless it is whole."""
    if num_elements < RUN:
        _unpack_run(whole_run(source, num_elements, kind), scales, out, kind, x_kind)
    else:
        _unpack_run(source, scales, out, kind, x_kind)


@compiled_noinline
def unpack_run(
    source, ahead, stride, scales, num_columns, num_elements, out, out_stride, kind, x_kind
):  # fmt: skip
    """Unpacks a run of each of some columns, and prefetches one of other columns.

    Args:
        source, ahead, stride: the run in the first column, and in the first one of the others; the
            bytes from one column to the next.
        scales: the parameters of the first column's run in float32, SCALES_BYTES before those of
            the next.
        num_columns: the number of columns.
        num_elements: how many elements the run has, unless it is whole.
        out, out_stride: memory for whole runs; the bytes from one column's to the next one's.
    """
    for column in range(num_columns):
        at, own, to = (
            source + column * stride, scales + column * SCALES_BYTES, out + column * out_stride,
        )  # fmt: skip
        prefetch(ahead + column * stride)
        _unpack_some(at, num_elements, own, to, kind, x_kind)


@compiled
def unpack(source, stride, scales, scale_stride, num_columns, depth, out, kind, x_kind):
    """Unpacks columns into a panel, and prefetches as many columns behind them.

    Args:
        source, stride: the first column's elements; the bytes from one column to the next.
        scales, scale_stride: likewise its scales.
        num_columns: the number of columns.
        depth: the number of their elements, at most MAX_DEPTH.
        out: the panel. It gets whole runs.
    """
    own = on_stack(SCALES_BYTES)
    for column in range(num_columns):
        row, target = source + column * stride, out + column * panel_stride(x_kind)
        widen_scales(scales + column * scale_stride, depth, own, kind)
        for run in range((depth + RUN - 1) // RUN):
            at = row + run * _run_bytes(kind)
            prefetch(at + num_columns * stride)
            _unpack_some(
                at, depth - run * RUN, own + run_scales_bytes(kind) * run,
                target + run * RUN * itemsize(x_kind), kind, x_kind,
            )  # fmt: skip
