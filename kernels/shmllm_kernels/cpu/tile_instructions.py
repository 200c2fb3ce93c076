"""The instructions on tiles: registers of up to 16 lines of 64 bytes, which AMX multiplies.

This module owns the names of the instructions and what surrounds them: the configuration, and the
transposition of a result. It must not know how matrices are cut into tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir

from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import put_word
from shmllm_kernels.cpu.simd import INT64, Emitter, function

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
def transpose(builder, address):
    """Transposes 16 lines of 16 words of 32 bits in memory aligned to 64 bytes."""
    e = Emitter(builder, LINES)
    places = [
        builder.inttoptr(e.at(address, LINE_BYTES * i), e.integers.as_pointer())
        for i in range(LINES)
    ]
    lines = [builder.load(place, align=LINE_BYTES) for place in places]
    distance = LINES
    while distance > 1:
        distance //= 2  # the blocks of this size beside the diagonal change places
        low = [i + LINES - distance if i & distance else i for i in range(LINES)]
        high = [lane + distance for lane in low]
        for i in range(LINES):
            if not i & distance:
                pair = lines[i], lines[i + distance]
                for j, lanes in ((i, low), (i + distance, high)):
                    lines[j] = builder.shuffle_vector(*pair, ir.Constant(e.integers, lanes))
    for line, place in zip(lines, places, strict=True):
        builder.store(line, place, align=LINE_BYTES)


@emitted
def copy_line(builder, source, num_bytes, out):
    """Copies up to 64 bytes to a line, and fills it with zeros. It does not read memory after the
    bytes."""
    bytes_of = Emitter(builder, LINE_BYTES)
    line = bytes_of.load_first_bits(source, num_bytes, 8)
    builder.store(line, builder.inttoptr(out, line.type.as_pointer()), align=LINE_BYTES)


@emitted
def add_line(builder, line, out, count, adds, kind):
    """Adds the first `count` sums of a line to float32 numbers at `out`, or stores them there if
    `adds` is 0. kind: the dtype name of what was multiplied; sums of int8 are int32."""
    e = Emitter(builder, LINES)
    if kind == "int8":
        bits = builder.load(builder.inttoptr(line, e.integers.as_pointer()), align=LINE_BYTES)
        sums = builder.sitofp(bits, e.vector)
    else:
        sums = e.load(line)
    is_adding = builder.icmp_signed("!=", adds, ir.Constant(INT64, 0))
    before = builder.select(is_adding, e.load_first(out, count), e.zeros())
    e.store_first(builder.fadd(before, sums), out, count)
