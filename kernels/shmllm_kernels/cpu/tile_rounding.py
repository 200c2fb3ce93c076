"""Rounds activations for products by tile instructions, and owns their layout in memory.

Rows lie in blocks of 16. The numbers of a row are words of 4 bytes: two bfloat16 or four int8. A
block has its words one after the other, each for all rows of the block, and after them, for int8,
the scale of every row, float32. Zeros fill the last step of 64 bytes of a row. So 64 bytes of every
row are a tile: 16 lines with a word of each row. If there are fewer than 16 rows, the only block is
as narrow as they are, and one row lies in memory as ever.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import floats, itemsize, on_stack, short_words, word
from shmllm_kernels.cpu.rounding import LARGEST, as_int8, inverse_scale, largest_magnitude
from shmllm_kernels.cpu.simd import Emitter
from shmllm_kernels.cpu.tile_instructions import LINE_BYTES, LINES

BLOCK_ROWS = LINES
"""The number of rows of activations in a block; `products.ROWS_AT_ONCE` is a multiple of it."""
WORD_BYTES = 4


def rounded_bytes(num_rows: int, k: int, kind: str) -> int:
    """Returns the size of rounded activations: `num_rows` rows of k elements of a dtype name."""
    return (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS * row_bytes(k, kind)


def row_bytes(k: int, kind: str) -> int:
    """Returns the stride of rounded activations: a row's part of its block."""
    numbers: int = padded_bytes(k, kind)
    return numbers + (WORD_BYTES if kind == "int8" else 0)


@compiled
def padded_bytes(k, kind):
    """Returns the size of a row's numbers, in whole steps."""
    return (k * itemsize(kind) + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES


@compiled
def line_bytes(num_rows):
    """Returns the size of one word of all rows of a block."""
    return WORD_BYTES * min(num_rows, BLOCK_ROWS)


def _as_bfloat16(e: Emitter, values: ir.Value) -> ir.Value:
    """Rounds to the nearest, ties to even; returns int32."""
    bits = e.builder.bitcast(values, e.integers)
    odd = e.builder.and_(e.builder.lshr(bits, e.splat_int(16)), e.splat_int(1))
    rounded = e.builder.add(e.builder.add(bits, e.splat_int(0x7FFF)), odd)
    return e.builder.lshr(rounded, e.splat_int(16))


@emitted
def _round_words(builder, source, count, inverse, out, kind):
    """Rounds the first `count` numbers of a step, and zeros after them, to 16 words at `out`."""
    num_bits = 8 * itemsize(kind)
    e = Emitter(builder, 8 * LINE_BYTES // num_bits)
    values = e.load_first(source, count)
    wide = as_int8(e, values, inverse) if kind == "int8" else _as_bfloat16(e, values)
    narrow = builder.trunc(wide, ir.VectorType(ir.IntType(num_bits), e.lanes))
    place = builder.inttoptr(out, narrow.type.as_pointer())
    builder.store(narrow, place, align=LINE_BYTES)


@compiled
def _round_block(source, width, out, num_rows, line, kind):
    """Rounds the rows of one block. A step of all rows follows that of all rows before, since their
    words share cache lines."""
    step = LINE_BYTES // itemsize(kind)
    words, inverses = on_stack(LINE_BYTES), floats(on_stack(4 * BLOCK_ROWS))
    if kind == "int8":
        scales = floats(out + (padded_bytes(width, kind) >> 2) * line)
        for row in range(num_rows):
            largest = largest_magnitude(source + row * width * 4, width)
            inverses[row] = inverse_scale(largest)
            scales[row] = largest / np.float32(LARGEST)
    for begin in range(0, width, step):
        at = out + (begin * itemsize(kind) >> 2) * line
        for row in range(num_rows):
            numbers = source + (row * width + begin) * 4
            _round_words(numbers, min(width - begin, step), inverses[row], words, kind)
            for i in range(LINES):
                short_words(at + i * line)[row] = short_words(words)[i]


@compiled
def _count_blocks(operands, piece, thread, num_threads):
    return (word(word(operands, 0), 0) + BLOCK_ROWS - 1) // BLOCK_ROWS


@compiled
def _round(operands, piece, thread, num_threads, kind):
    num_rows, source, out = word(word(operands, 0), 0), word(operands, 1), word(operands, 2)
    width, stride = word(operands, 3), word(operands, 4)
    first = piece * BLOCK_ROWS
    rows = min(BLOCK_ROWS, num_rows - first)
    _round_block(
        source + first * width * 4, width, out + first * stride, rows, line_bytes(num_rows), kind
    )


TILED = {"bfloat16 tiles": "bfloat16", "int8 tiles": "int8"}
"""What activations in blocks are called where others are called by their dtype name, and the dtype
name of their numbers."""


def tiled(kind: str) -> str:
    """Returns the name in TILED of activations with numbers of a dtype name."""
    return f"{kind} tiles"


ROUND = {name: Kernel(_count_blocks, _round, kind) for name, kind in TILED.items()}
"""As `rounding.ROUND`, in blocks: the same numbers and scales. `out` has `rounded_bytes`; its
stride is `row_bytes`."""
