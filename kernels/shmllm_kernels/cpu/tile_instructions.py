"""The instructions on tiles: registers of up to 16 lines of 64 bytes, which AMX multiplies.

This module owns the names of the instructions and what surrounds them: the configuration, and how
sums become rows. It must not know how matrices are cut into tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir

from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import put_word
from shmllm_kernels.cpu.shuffles import transposed
from shmllm_kernels.cpu.simd import Emitter, function

LINES = 16
"""The largest number of lines of a tile."""
LINE_BYTES = 64
"""The size of a line of a full tile."""
TILE_BYTES = LINES * LINE_BYTES

W0, W1 = 4, 5
"""Tiles of weights: each has a line of 64 bytes for each of its rows of weights."""
X0, X1 = 6, 7
"""Tiles of activations: 16 lines of 4 bytes for each row of activations. See `matrix_tiles`."""
W0X0, W0X1, W1X0, W1X1 = 0, 1, 2, 3
"""Tiles of sums of products: a line of 4 bytes for each row of activations for each of weights."""


class Tiles(NamedTuple):
    """Emitters of the instructions. Tiles are given by constant numbers, strides are in bytes.

    configure: (address of 64 bytes); sets lines and widths of all tiles, and clears them.
    zero: (tile).
    load, store: (tile, address, stride); a stride from line to line.
    dot: (kind, sums, weights, activations); adds the products over 64 bytes of bfloat16 or int8.
    release: (); clears and gives back the tiles.
    """

    configure: Any
    zero: Any
    load: Any
    store: Any
    dot: Any
    release: Any


_SUM_BYTES = 4
_BYTE = ir.IntType(8)
_DOTS = {"bfloat16": "llvm.x86.tdpbf16ps", "int8": "llvm.x86.tdpbssd"}


def _call(builder: ir.IRBuilder, name: str, *arguments: ir.Value) -> None:
    kinds = [argument.type for argument in arguments]
    builder.call(function(builder, name, ir.VoidType(), kinds), arguments)


def _pointer(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, _BYTE.as_pointer())


def _number(tile: ir.Constant) -> ir.Constant:
    return ir.Constant(_BYTE, tile.constant)


@emitted
def _configure(builder, address):
    _call(builder, "llvm.x86.ldtilecfg", _pointer(builder, address))


@emitted
def _zero(builder, tile):
    _call(builder, "llvm.x86.tilezero", _number(tile))


@emitted
def _load(builder, tile, address, stride):
    _call(builder, "llvm.x86.tileloadd64", _number(tile), _pointer(builder, address), stride)


@emitted
def _store(builder, tile, address, stride):
    _call(builder, "llvm.x86.tilestored64", _number(tile), _pointer(builder, address), stride)


@emitted
def _dot(builder, kind, sums, weights, activations):
    _call(builder, _DOTS[kind], *map(_number, (sums, weights, activations)))


@emitted
def _release(builder):
    _call(builder, "llvm.x86.tilerelease")


AMX = Tiles(_configure, _zero, _load, _store, _dot, _release)
"""The instructions of AMX-TILE, AMX-BF16 and AMX-INT8. A process needs `amx.HAS_AMX`; every thread
has its own tiles and its own configuration."""


@compiled
def configure(tiles, memory, num_weights, num_rows):
    """Sets the sizes of all tiles.

    Args:
        tiles: the instructions.
        memory: 64 bytes of scratch memory, aligned to 8.
        num_weights: the number of rows of weights in each tile, 1 to 16.
        num_rows: the number of rows of activations in each tile, 1 to 16.
    """
    of_sums = 4 * num_rows
    put_word(memory, 0, 1)  # palette 1, the only one
    put_word(memory, 1, 0)
    # Bytes of a line, 16 bits for each tile.
    put_word(memory, 2, of_sums * 0x0001000100010001)
    put_word(memory, 3, LINE_BYTES * 0x00010001 + of_sums * 0x0001000100000000)
    put_word(memory, 4, 0)
    put_word(memory, 5, 0)
    # Lines, 8 bits for each tile.
    put_word(memory, 6, num_weights * 0x010101010101 + LINES * 0x0101000000000000)
    put_word(memory, 7, 0)
    tiles.configure(memory)


@emitted
def copy_line(builder, source, num_bytes, out):
    """Copies up to 64 bytes to a line, and fills it with zeros. It does not read memory after the
    bytes."""
    bytes_of = Emitter(builder, LINE_BYTES)
    line = bytes_of.load_first_bits(source, num_bytes, 8)
    builder.store(line, builder.inttoptr(out, line.type.as_pointer()), align=LINE_BYTES)


@emitted
def prefetch_lines(builder, address, stride):
    """Prefetches the lines of a tile."""
    e = Emitter(builder)
    for i in range(LINES):
        e.prefetch(e.at(address, builder.mul(stride, e.const(i))))


def _as_floats(e: Emitter, address: ir.Value, kind: str) -> ir.Value:
    """Loads LANES sums as float32; those of int8 are int32."""
    if kind != "int8":
        return e.load(address)
    pointer = e.builder.inttoptr(address, e.integers.as_pointer())
    return e.builder.sitofp(e.builder.load(pointer, align=4), e.vector)


def _sums(e: Emitter, address: ir.Value, line: ir.Value, kind: str) -> list[ir.Value]:
    """Loads the lines of a tile of sums as float32."""
    return [
        _as_floats(e, e.at(address, e.builder.mul(line, e.const(i))), kind) for i in range(LINES)
    ]


@emitted
def put_tile(builder, sums, line, out, out_stride, num_rows, num_columns, kind):
    """Writes the transpose of a tile of sums to the result, which has a row for each of its words.

    Args:
        sums, line: the address of the tile, a line for each of the columns; the bytes from line to
            line. It reads LINE_BYTES of each.
        out, out_stride: the result, float32; the bytes from one row to the next.
        num_rows, num_columns: its size, at least 1 and at most LINES.
        kind: the dtype name of what was multiplied.
    """
    e = Emitter(builder, LINES)
    is_row = builder.icmp_signed("==", line, e.const(_SUM_BYTES))
    with builder.if_else(is_row) as (then, otherwise):
        with then:  # the sums of the only row lie in order
            e.store_first(_as_floats(e, sums, kind), out, num_columns)
        with otherwise:
            _put_rows(e, sums, line, out, out_stride, num_rows, num_columns, kind)


def _put_rows(
    e: Emitter, sums: ir.Value, line: ir.Value, out: ir.Value, out_stride: ir.Value,
    num_rows: ir.Value, num_columns: ir.Value, kind: str,
) -> None:  # fmt: skip
    """Writes the transpose of a tile; see `put_tile`."""
    builder = e.builder
    for i, row in enumerate(transposed(e, _sums(e, sums, line, kind))):
        # No row is written twice: those after the last one get no lane.
        is_row = builder.icmp_signed("<", e.const(i), num_rows)
        count = builder.select(is_row, num_columns, e.const(0))
        e.store_first(row, e.at(out, builder.mul(out_stride, e.const(i))), count)
