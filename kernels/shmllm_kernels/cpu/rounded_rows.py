"""Norms of the residual stream, and activations, that are rounded for products by tiles."""

from __future__ import annotations

from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import word
from shmllm_kernels.cpu.norms import KINDS, add_rms_norm
from shmllm_kernels.cpu.rows import ACTIVATIONS, activate
from shmllm_kernels.cpu.tile_rounding import (
    BLOCK_ROWS,
    TILED,
    WORD_BYTES,
    line_bytes,
    round_steps,
)


@compiled
def _rows_at_once(num_rows, num_threads):
    """Returns the number of rows of a piece: a block, or half of one if threads would have none."""
    return BLOCK_ROWS if num_rows > BLOCK_ROWS * (num_threads - 1) else BLOCK_ROWS // 2


@compiled
def _count_pieces(operands, piece, thread, num_threads):
    num_rows = word(word(operands, 0), 0)
    size = _rows_at_once(num_rows, num_threads)
    return (num_rows + size - 1) // size


@compiled
def _rows_of_piece(operands, piece, num_threads):
    """Returns the bounds [begin, end) of a piece's rows."""
    num_rows = word(word(operands, 0), 0)
    size = _rows_at_once(num_rows, num_threads)
    return piece * size, min((piece + 1) * size, num_rows)


@compiled
def _round(operands, begin, end, source, width, out, stride, x_kind):
    """Rounds the rows [begin, end), of one block, of what lies at `source`."""
    round_steps(
        source + begin * width * 4, width, 0, width,
        out + begin // BLOCK_ROWS * BLOCK_ROWS * stride + begin % BLOCK_ROWS * WORD_BYTES,
        end - begin, line_bytes(word(word(operands, 0), 0)), x_kind,
    )  # fmt: skip


@compiled
def _add_rms_norm(operands, piece, thread, num_threads, kind, x_kind):
    begin, end = _rows_of_piece(operands, piece, num_threads)
    add_rms_norm(operands, begin, end, kind)
    _round(
        operands, begin, end, word(operands, 4), word(operands, 5), word(operands, 10),
        word(operands, 11), x_kind,
    )  # fmt: skip


ADD_RMS_NORM = {
    (kind, x_kind): Kernel(_count_pieces, _add_rms_norm, kind, TILED[x_kind])
    for kind in KINDS
    for x_kind in TILED
}
"""Kernels by a key of `norms.ADD_RMS_NORM` and one of `tile_rounding.ROUND`, which do both.

Operands: those of `norms.ADD_RMS_NORM`, then the address of the rounded rows, and their stride.
"""


@compiled
def _activate(operands, piece, thread, num_threads, name, is_gated, x_kind):
    begin, end = _rows_of_piece(operands, piece, num_threads)
    activate(operands, begin, end, name, is_gated)
    _round(
        operands, begin, end, word(operands, 2), word(operands, 3), word(operands, 4),
        word(operands, 5), x_kind,
    )  # fmt: skip


ACTIVATE = {
    (name, is_gated, x_kind): Kernel(_count_pieces, _activate, name, is_gated, TILED[x_kind])
    for name in ACTIVATIONS
    for is_gated in (True, False)
    for x_kind in TILED
}
"""Kernels by a key of `rows.ACTIVATE` and one of `tile_rounding.ROUND`, which do both.

Operands: those of `rows.ACTIVATE`, then the address of the rounded rows, and their stride.
"""
