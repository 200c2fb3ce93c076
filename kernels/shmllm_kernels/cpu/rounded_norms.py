"""Norms of the residual stream whose results are rounded for products by tile instructions."""

from __future__ import annotations

from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import word
from shmllm_kernels.cpu.norms import KINDS, add_rms_norm
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
def _add_rms_norm(operands, piece, thread, num_threads, kind, x_kind):
    num_rows, width = word(word(operands, 0), 0), word(operands, 5)
    size = _rows_at_once(num_rows, num_threads)
    begin = piece * size
    end = min(begin + size, num_rows)
    add_rms_norm(operands, begin, end, kind)
    block = word(operands, 9) + begin // BLOCK_ROWS * BLOCK_ROWS * word(operands, 10)
    round_steps(
        word(operands, 4) + begin * width * 4, width, 0, width,
        block + begin % BLOCK_ROWS * WORD_BYTES, end - begin, line_bytes(num_rows), x_kind,
    )  # fmt: skip


ADD_RMS_NORM = {
    (kind, x_kind): Kernel(_count_pieces, _add_rms_norm, kind, TILED[x_kind])
    for kind in KINDS
    for x_kind in TILED
}
"""Kernels by a key of `norms.ADD_RMS_NORM` and one of `tile_rounding.ROUND`, which do both.

Operands: those of `norms.ADD_RMS_NORM`, then the address of the rounded rows, and their stride.
"""
