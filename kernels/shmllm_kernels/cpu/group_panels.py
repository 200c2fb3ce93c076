"""The panels of `group_products`: columns of weights side by side, as its tiles multiply them.

A panel has PANEL_COLUMNS columns: a vector holds a word of each. A plane of a run is 16 such
vectors, and after all runs come the parameters, a vector for each. `group_arithmetic` has the
planes.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from shmllm_kernels.cpu.codes import RUN
from shmllm_kernels.cpu.group_arithmetic import OWN
from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import on_stack
from shmllm_kernels.cpu.shuffles import transposed
from shmllm_kernels.cpu.simd import Emitter
from shmllm_kernels.cpu.unpacking import (
    MAX_DEPTH,
    PACKINGS,
    SCALES_BYTES,
    prefetch,
    scale_bytes,
    widen_scales,
)

PANEL_COLUMNS = 16
PANEL_DEPTH = MAX_DEPTH // OWN.num_weight_planes
"""The largest number of elements of a column in a panel."""
VECTOR_BYTES = _LINE = 64
PLANE_VECTORS = RUN // 4
RUN_BYTES = RUN * PANEL_COLUMNS * OWN.num_weight_planes
PARAMETERS_AT = MAX_DEPTH * PANEL_COLUMNS
PANEL_BYTES = PARAMETERS_AT + SCALES_BYTES * PANEL_COLUMNS


def column_of(e: Emitter, source: ir.Value, stride: ir.Value, last: ir.Value, i: int) -> ir.Value:
    """Returns the address of a column; the last column stands for those behind it."""
    b, index = e.builder, e.const(i)
    own = b.select(b.icmp_signed("<", index, last), index, last)
    return e.at(source, b.mul(stride, own))


def prefetch_columns(e: Emitter, source: ir.Value, stride: ir.Value, num_bytes: int) -> None:
    """Prefetches so many bytes of PANEL_COLUMNS columns, `stride` bytes from one to the next."""
    for i in range(PANEL_COLUMNS):
        column = e.at(source, e.builder.mul(stride, e.const(i)))
        for at in range(0, num_bytes, _LINE):
            e.prefetch(e.at(column, at))


def prefetch_in_order(
    e: Emitter, source: ir.Value, stride: ir.Value, run: ir.Value, num_runs: ir.Value,
    num_bytes: int,
) -> None:  # fmt: skip
    """As `prefetch_columns` after all runs, but in the order of memory if columns of so many runs
    have nothing between them. (On AVX2 a row then reads up to 1.3 times as fast.)"""
    b, size = e.builder, e.const(num_bytes)
    is_dense = b.icmp_signed("==", stride, b.mul(num_runs, size))
    place = b.mul(run, size)
    skipped = b.select(is_dense, b.mul(place, e.const(PANEL_COLUMNS - 1)), e.const(0))
    step = b.select(is_dense, size, stride)
    prefetch_columns(e, e.at(source, skipped), step, num_bytes)


def bytes_of(e: Emitter, address: ir.Value, kind: str) -> ir.Value:
    """Loads the codes of a run as bytes, in a vector of int32."""
    read = PACKINGS[kind].codes.bytes
    assert read is not None
    return e.builder.bitcast(read(e, address), e.integers)


def _words(e: Emitter, columns: Sequence[ir.Value], kind: str) -> list[ir.Value]:
    """Loads the codes of a run of each column as the vectors of a panel."""
    own = PACKINGS[kind].codes.words
    if own is not None:
        return _planes(e, own(e, columns, 1))
    planes = zip(*(OWN.weight_planes(e, bytes_of(e, each, kind)) for each in columns), strict=True)
    return [word for plane in planes for word in transposed(e, plane)]


def _planes(e: Emitter, words: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns the words of all planes of the words of codes."""
    planes = zip(*(OWN.weight_planes(e, each) for each in words), strict=True)
    return [word for plane in planes for word in plane]


def _store_all(e: Emitter, vectors: Sequence[ir.Value], out: ir.Value) -> None:
    for i, vector in enumerate(vectors):
        pointer = e.builder.inttoptr(e.at(out, VECTOR_BYTES * i), vector.type.as_pointer())
        e.builder.store(vector, pointer, align=VECTOR_BYTES)


@emitted
def _place_run(builder, source, stride, last, out, kind):
    e = Emitter(builder, PANEL_COLUMNS)
    columns = [column_of(e, source, stride, last, i) for i in range(PANEL_COLUMNS)]
    _store_all(e, _words(e, columns, kind), out)


@emitted
def _place_parameters(builder, widened, out):
    """Writes 16 parameters of each column. widened: float32, SCALES_BYTES from one column to the
    next."""
    e = Emitter(builder, PANEL_COLUMNS)
    rows = [e.load(e.at(widened, SCALES_BYTES * i)) for i in range(PANEL_COLUMNS)]
    _store_all(e, transposed(e, rows), out)


def run_bytes(kind: str) -> int:
    """Returns the size of a run of a column as it is stored."""
    return PACKINGS[kind].codes.run_bytes


def _num_scales(kind: str) -> int:
    return PACKINGS[kind].num_scales


@compiled
def place_codes(source, stride, num_columns, num_runs, panel, kind):
    """Writes the codes of columns to a panel.

    Args:
        source, stride: the first column's codes; the bytes from one column to the next.
        num_columns: the number of columns, at most PANEL_COLUMNS.
        num_runs: the number of runs, PANEL_DEPTH elements at most.
        panel: PANEL_BYTES, aligned to 64.
    """
    for run in range(num_runs):
        _place_run(
            source + run * run_bytes(kind), stride, num_columns - 1, panel + run * RUN_BYTES, kind
        )  # fmt: skip


@compiled
def place_parameters(scales, stride, num_columns, num_runs, panel, kind):
    """Writes the parameters of columns to a panel, and prefetches those of as many columns behind
    them. The arguments are those of `place_codes`."""
    widened = on_stack(PANEL_COLUMNS * SCALES_BYTES)
    for column in range(PANEL_COLUMNS):
        own = scales + min(column, num_columns - 1) * stride
        for at in range(0, scale_bytes(num_runs * RUN, kind), VECTOR_BYTES):
            prefetch(own + PANEL_COLUMNS * stride + at)
        widen_scales(own, num_runs * RUN, widened + column * SCALES_BYTES, kind)
    for i in range(0, num_runs * _num_scales(kind), PANEL_COLUMNS):
        _place_parameters(widened + 4 * i, panel + PARAMETERS_AT + i * VECTOR_BYTES)
