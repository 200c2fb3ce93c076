"""Rounds activations for products by tile instructions, and owns their layout in memory.

Rows lie in blocks of 16. The numbers of a row are words of 4 bytes: two bfloat16 or four int8. A
block has its words one after the other, each for all rows of the block, and after them, for
integers, the scale of every row, float32. Zeros fill the last step of 64 bytes of a row. So 64
bytes of every row are a tile: 16 lines with a word of each row. If there are fewer than 16 rows,
the only block is as narrow as they are, and one row lies in memory as ever.

An int16 is ``256 * high + low``, both int8. Each step has a tile of the high digits, and behind it
one of the low digits: products with either are exact in int32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llvmlite import ir

from shmllm_kernels.cpu.arithmetic import HAS_BFLOAT16, round_pairs
from shmllm_kernels.cpu.bfloat16 import round_to_shorts
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import floats, itemsize, on_stack, put_word, word
from shmllm_kernels.cpu.rounding import LARGEST, as_integers, inverse_scale, largest_magnitude
from shmllm_kernels.cpu.shuffles import joined, transposed
from shmllm_kernels.cpu.simd import INT32, Emitter
from shmllm_kernels.cpu.tile_instructions import LINE_BYTES, LINES

BLOCK_ROWS = LINES
"""The number of rows of activations in a block; `products.ROWS_AT_ONCE` is a multiple of it."""
WORD_BYTES = 4
PIECES_PER_THREAD = 4
NUMBERS_AT_ONCE = 4096
"""The least numbers in a piece of work."""


def rounded_bytes(num_rows: int, k: int, kind: str) -> int:
    """Returns the size of rounded activations: `num_rows` rows of k elements of a dtype name."""
    return (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS * row_bytes(k, kind)


def row_bytes(k: int, kind: str) -> int:
    """Returns the stride of rounded activations: a row's part of its block."""
    numbers: int = padded_bytes(k, kind)
    return numbers + (WORD_BYTES if has_row_scales(kind) else 0)


def has_row_scales(kind: str) -> bool:
    """Returns whether every row has a scale."""
    return kind in ("int8", "int16")


def num_digits(kind: str) -> int:
    """Returns the number of tiles of a step."""
    return 2 if kind == "int16" else 1


def digit(kind: str) -> str:
    """Returns the dtype name of what tiles multiply, and of the weights that they load."""
    return "int8" if kind == "int16" else kind


def step_width(kind: str) -> int:
    """Returns the number of elements of a step."""
    return LINE_BYTES // itemsize(digit(kind))


@compiled
def padded_bytes(k, kind):
    """Returns the size of a row's numbers, in whole steps."""
    steps = (k + step_width(kind) - 1) // step_width(kind)
    return steps * (LINE_BYTES * num_digits(kind))


@compiled
def line_bytes(num_rows):
    """Returns the size of one word of all rows of a block."""
    return WORD_BYTES * min(num_rows, BLOCK_ROWS)


def _as_bfloat16(e: Emitter, low: ir.Value, high: ir.Value) -> ir.Value:
    """Rounds 32 numbers to the nearest, ties to even; returns 16 words. AMX takes subnormal numbers
    for zero, which the CPU's instruction makes of them."""
    if HAS_BFLOAT16:
        return round_pairs(e, low, high)
    halves = [round_to_shorts(e, values) for values in (low, high)]
    return e.builder.bitcast(joined(e, halves), e.integers)


def _bytes(e: Emitter, integers: Sequence[ir.Value]) -> ir.Value:
    """Returns the lowest bytes of four vectors as one of words."""
    byte = ir.VectorType(ir.IntType(8), LINES)
    parts = [e.builder.trunc(each, byte) for each in integers]
    return e.builder.bitcast(joined(e, parts), e.integers)


def _words(
    e: Emitter, source: ir.Value, count: ir.Value | None, inverse: ir.Value, kind: str
) -> list[ir.Value]:
    """Returns the tiles of one step of a row: the first `count` numbers, or all, rounded, and
    zeros."""
    vectors = []
    for i in range(step_width(kind) // LINES):
        at = e.at(source, 4 * LINES * i)
        if count is None:
            vectors.append(e.load(at))
        else:
            vectors.append(e.load_first(at, e.builder.sub(count, e.const(LINES * i))))
    if kind == "bfloat16":
        return [_as_bfloat16(e, *vectors)]
    integers = [as_integers(e, each, inverse) for each in vectors]
    if kind == "int8":
        return [_bytes(e, integers)]
    b, shift = e.builder, e.splat_int(8)
    high = [b.ashr(b.add(each, e.splat_int(128)), shift) for each in integers]
    low = [b.sub(each, b.shl(top, shift)) for each, top in zip(integers, high, strict=True)]
    return [_bytes(e, high), _bytes(e, low)]


@emitted
def _round_step(builder, rows, offset, num_rows, count, inverses, out, line, kind):
    """Rounds a step of up to 16 rows. rows, offset: a table of their addresses, and where in them
    the step begins, in bytes. count: how many numbers it has; None: all. inverses: the address of
    the rows' factors, float32."""
    e = Emitter(builder, LINES)
    last = builder.sub(num_rows, e.const(1))
    words = []
    for i in range(LINES):
        is_after = builder.icmp_signed("<", last, e.const(i))
        row = builder.select(is_after, last, e.const(i))
        inverse = e.load_scalar(e.at(inverses, builder.mul(row, e.const(4))))
        at = e.at(e.load_word(e.at(rows, builder.mul(row, e.const(8)))), offset)
        words.append(_words(e, at, count, inverse, kind))
    lines = [line for tile in zip(*words, strict=True) for line in transposed(e, tile)]
    for i, each in enumerate(lines):
        place = e.at(out, builder.mul(line, e.const(i)))
        e.store_first(builder.bitcast(each, e.vector), place, num_rows)


@emitted
def put_pairs(builder, lines, out, line, num_rows):
    """Rounds 16 lines of numbers, each of up to 16 rows, to 8 lines of words of bfloat16.

    Args:
        lines: the address of float32 lines, `line` bytes apart; LINE_BYTES of each are read.
        out: the address of the words of the first two lines, in a block of up to 16 rows.
        line: the size of a line.
        num_rows: the number of its rows.
    """
    e = Emitter(builder, LINES)
    shorts = ir.VectorType(ir.IntType(16), 2 * LINES)
    in_turns = [lane for i in range(LINES) for lane in (i, LINES + i)]
    mask = ir.Constant(ir.VectorType(INT32, 2 * LINES), in_turns)
    for i in range(LINES // 2):
        places = [builder.mul(line, e.const(2 * i + half)) for half in (0, 1)]
        pair = [e.load(e.at(lines, place)) for place in places]
        rounded = builder.bitcast(_as_bfloat16(e, *pair), shorts)
        words = builder.shuffle_vector(rounded, ir.Constant(shorts, ir.Undefined), mask)
        place = e.at(out, builder.mul(line, e.const(i)))
        e.store_first(builder.bitcast(words, e.vector), place, num_rows)


@emitted
def _round_step_of_row(builder, source, count, inverse, out, kind):
    """Rounds a step of the only row."""
    e = Emitter(builder, LINES)
    for i, tile in enumerate(_words(e, source, count, inverse, kind)):
        e.store(builder.bitcast(tile, e.vector), e.at(out, LINE_BYTES * i))


@compiled
def round_rows(rows, width, begin, end, out, num_rows, line, kind):
    """Rounds the elements [begin, end) of some rows of one block.

    Args:
        rows: a table of the rows' addresses, float32.
        width: the number of elements of a row.
        out: the address of the first row's first word.
        num_rows: the number of rows.
        line: the size of a line of the block.
        kind: the dtype name.
    """
    step, factors = step_width(kind), on_stack(4 * BLOCK_ROWS)
    inverses = floats(factors)
    if has_row_scales(kind):
        scales = floats(out + (padded_bytes(width, kind) >> 2) * line)
        unit = np.float32(256.0 if kind == "int16" else 1.0)  # a power of 2: it rounds nothing
        for row in range(num_rows):
            largest = largest_magnitude(word(rows, row), width)
            inverses[row] = inverse_scale(largest) * unit
            if begin == 0:
                scales[row] = largest / np.float32(LARGEST) / unit
    for i in range(begin, end, step):
        at = out + (i // step * (LINE_BYTES * num_digits(kind)) >> 2) * line
        if line == WORD_BYTES:
            numbers = word(rows, 0) + 4 * i
            _round_step_of_row(numbers, min(end - i, step), inverses[0], at, kind)
        elif i + step <= end:
            _round_step(rows, 4 * i, num_rows, None, factors, at, line, kind)
        else:
            _round_step(rows, 4 * i, num_rows, end - i, factors, at, line, kind)


@compiled
def round_steps(source, width, begin, end, out, num_rows, line, kind):
    """As `round_rows`, for rows that follow each other from the address `source` on."""
    rows = on_stack(8 * BLOCK_ROWS)
    for row in range(num_rows):
        put_word(rows, row, source + row * width * 4)
    round_rows(rows, width, begin, end, out, num_rows, line, kind)


@compiled
def _chunk_width(num_rows, width, num_threads):
    """Returns the number of elements of each row in a piece of work, whole steps of any dtype."""
    num_blocks = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    chunks = (PIECES_PER_THREAD * num_threads + num_blocks - 1) // num_blocks
    most = max(width // chunks, NUMBERS_AT_ONCE // min(num_rows, BLOCK_ROWS))
    return (most + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES


@compiled
def _count_pieces(operands, piece, thread, num_threads):
    num_rows, width = word(word(operands, 0), 0), word(operands, 3)
    chunk = _chunk_width(max(num_rows, 1), width, num_threads)
    return (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS * ((width + chunk - 1) // chunk)


@compiled
def _round(operands, piece, thread, num_threads, kind):
    num_rows, source, out = word(word(operands, 0), 0), word(operands, 1), word(operands, 2)
    width, stride = word(operands, 3), word(operands, 4)
    chunk = _chunk_width(num_rows, width, num_threads)
    num_chunks = (width + chunk - 1) // chunk
    first, begin = piece // num_chunks * BLOCK_ROWS, piece % num_chunks * chunk
    round_steps(
        source + first * width * 4, width, begin, min(begin + chunk, width), out + first * stride,
        min(BLOCK_ROWS, num_rows - first), line_bytes(num_rows), kind,
    )  # fmt: skip


TILED = {"bfloat16 tiles": "bfloat16", "int8 tiles": "int8", "int16 tiles": "int16"}
"""What activations in blocks are called where others are called by their dtype name, and the dtype
name of their numbers."""


def tiled(kind: str) -> str:
    """Returns the name in TILED of activations with numbers of a dtype name."""
    return f"{kind} tiles"


ROUND = {name: Kernel(_count_pieces, _round, kind) for name, kind in TILED.items()}
"""As `rounding.ROUND`, in blocks: the same numbers and scales. In int16 a row is divided by its
scale, its largest magnitude / (127 * 256), and rounded likewise. `out` has `rounded_bytes`; its
stride is `row_bytes`."""
