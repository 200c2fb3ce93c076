"""The kernels around latent attention's projections: they rotate queries, and write each token's
latent and rotated key part to the cache."""

from __future__ import annotations

import numpy as np

from shmllm_kernels.cpu.heads import rotate, sum_of_squares
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.latent_layout import DTYPES, put_row
from shmllm_kernels.cpu.memory import float_of_word, floats, number, word
from shmllm_kernels.cpu.rows import count_pieces, rows_of_piece

KINDS = [(stored, dtype) for stored in DTYPES for dtype in DTYPES]
"""The dtype names of the cache and of the model's weights that kernels exist for."""


@compiled
def _rotate_back(head, num_pairs, is_interleaved, cos, sin):
    """Undoes `rotate`."""
    values, cosines, sines = floats(head), floats(cos), floats(sin)
    step, gap = np.int64(1), num_pairs
    if is_interleaved != 0:
        step, gap = np.int64(2), np.int64(1)
    for i in range(num_pairs):
        a, b, c, s = values[i * step], values[i * step + gap], cosines[i], sines[i]
        values[i * step] = a * c + b * s
        values[i * step + gap] = b * c - a * s


@compiled
def _rotate_heads(operands, piece, thread, num_threads, is_back):
    x, stride, num_heads, head_bytes = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
    )  # fmt: skip
    num_pairs, is_interleaved = word(operands, 5), word(operands, 6)
    begin, end = rows_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        cos = word(operands, 7) + token * num_pairs * 4
        sin = word(operands, 8) + token * num_pairs * 4
        for head in range(num_heads):
            place = x + token * stride + head * head_bytes
            if is_back:
                _rotate_back(place, num_pairs, is_interleaved, cos, sin)
            else:
                rotate(place, num_pairs, is_interleaved, cos, sin)


ROTATE = Kernel(count_pieces, _rotate_heads, False)
"""Applies rotary embedding in place (`reference.rope` has the formulas).

Operands: address of the number of rows; x, the part of the first head that is rotated; bytes from
row to row; the number of heads; bytes from head to head; pairs, the number of pairs; 0: element i
belongs to element i + pairs, 1: element 2 i to element 2 i + 1; cos and sin, float32 [rows, pairs].
"""

ROTATE_BACK = Kernel(count_pieces, _rotate_heads, True)
"""Undoes ROTATE, with the same operands."""


@compiled
def _store(operands, piece, thread, num_threads, stored, kind):
    x, stride, rank, num_pairs, is_interleaved = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
        word(operands, 5),
    )  # fmt: skip
    weight, eps = word(operands, 8), float_of_word(word(operands, 9))
    slots, cache, row_bytes = word(operands, 10), word(operands, 11), word(operands, 12)
    shift, block_stride, width = word(operands, 13), word(operands, 14), word(operands, 15)
    begin, end = rows_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        row = x + token * stride
        values = floats(row)
        mean = sum_of_squares(row, rank) / np.float32(rank)
        scale = np.float32(1.0) / np.sqrt(mean + eps)
        for i in range(rank):
            values[i] = values[i] * scale * number(weight, i, kind)
        cos = word(operands, 6) + token * num_pairs * 4
        sin = word(operands, 7) + token * num_pairs * 4
        rotate(row + 4 * (width - 2 * num_pairs), num_pairs, is_interleaved, cos, sin)
        slot = word(slots, token)
        place = cache + (slot >> shift) * block_stride + (slot & ((1 << shift) - 1)) * row_bytes
        put_row(place, row, width, stored)


STORE_LATENTS = {kinds: Kernel(count_pieces, _store, *kinds) for kinds in KINDS}
"""Kernels by the dtype names of the cache and of the norm's weight. They normalise latents
(RMSNorm), rotate key parts, both in place, and write them to the cache. The key part is the last
part of a row, behind the latent or within it.

Operands (addresses; strides in bytes):

    0  the address of the number of tokens
    1  x: float32 rows
    2  the stride of x (a number)
    3  rank: the width of a latent (a number)
    4  the number of pairs of a key part, and 5 how they are rotated: see ROTATE (numbers)
    6  cos, 7  sin: float32 [tokens, pairs], of the tokens' positions
    8  the norm's weight [rank], and 9 its eps, a number from `word_of_float`
    10 slots: int64 [tokens], block * block_size + offset
    11 the layer's cache, see `LatentLayout`
    12 row_bytes, 13 log2 of the block size, 14 the stride from block to block (numbers)
    15 the width of a row of x (a number)
"""
