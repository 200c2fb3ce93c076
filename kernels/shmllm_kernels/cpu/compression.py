"""Kernels of compressed attention (DeepSeek-AI, "DeepSeek-V4", 2026, section 2.3): they make one
entry of the keys and gates of several tokens.

A row of the cache has what a token contributes to entries beside its own key. The token that
completes a window reads the rows of all its tokens there, whether they belong to this step or to
earlier ones: an entry's bits depend on its tokens alone. `reference.compression` has the formulas.
This module must not know what attends to entries, which is the task of `listed_keys`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from shmllm_kernels.cpu.attention_state import cache_lines
from shmllm_kernels.cpu.functions import exp
from shmllm_kernels.cpu.heads import rotate, sum_of_squares
from shmllm_kernels.cpu.indexer import blocks_of, pieces_of_step
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.latent_layout import DTYPES, place_of, put_row
from shmllm_kernels.cpu.latents import KINDS
from shmllm_kernels.cpu.memory import float_of_word, floats, number, short_words, word
from shmllm_kernels.cpu.rows import count_pieces, rows_of_piece


class Pages(NamedTuple):
    """Where a layer's rows lie, in blocks of a number of tokens that is a power of two."""

    cache: int  # the address of its first row
    block_shift: int  # the binary logarithm of the number of tokens
    block_stride: int  # the bytes from one block of the layer to the next
    row_bytes: int


class Window(NamedTuple):
    """What one entry is made of."""

    rate: int  # the number of its tokens
    overlaps: int  # 1: of those before them, too
    dim: int  # the width of an entry
    first_value: int  # the first element of a row that its values begin with
    first_gate: int


@compiled
def pages_at(address):
    """Returns Pages, from words in their order."""
    return Pages(word(address, 0), word(address, 1), word(address, 2), word(address, 3))


@compiled
def row_at(pages, blocks, position):
    """Returns the address of the row of a position. blocks: a row of the block table."""
    block = np.int64(short_words(blocks)[position >> pages.block_shift])
    offset = position & ((1 << pages.block_shift) - 1)
    return pages.cache + block * pages.block_stride + offset * pages.row_bytes


@compiled
def entry_at(pages, blocks, rate, entry):
    """Returns the address of an entry, which lies in the block of the last of its tokens, behind
    those of this block that end before."""
    index = ((entry + 1) * rate - 1) >> pages.block_shift
    block = np.int64(short_words(blocks)[index])
    before = (index << pages.block_shift) // rate
    return pages.cache + block * pages.block_stride + (entry - before) * pages.row_bytes


@compiled
def _store(operands, piece, thread, num_threads, stored):
    x, stride, width, slots = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
    )  # fmt: skip
    pages = pages_at(word(operands, 5))
    begin, end = rows_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        slot = word(slots, token)
        block, offset = slot >> pages.block_shift, slot & ((1 << pages.block_shift) - 1)
        place = pages.cache + block * pages.block_stride + offset * pages.row_bytes
        put_row(place, x + token * stride, width, stored)


STORE_ROWS = {stored: Kernel(count_pieces, _store, stored) for stored in DTYPES}
"""Kernels by the dtype name of the cache, which write rows to it.

Operands: address of the number of tokens; x, float32 rows; the bytes from row to row; their width;
slots, int64 [tokens], block * block_size + offset; `Pages` of the rows, whose first address may be
that of a part of each.
"""


@compiled
def _normalise(operands, piece, thread, num_threads):
    x, stride, num_heads, dim = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
    )  # fmt: skip
    eps = float_of_word(word(operands, 5))
    begin, end = rows_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        for head in range(num_heads):
            row = x + token * stride + head * dim * 4
            values = floats(row)
            mean = sum_of_squares(row, dim) / np.float32(dim)
            scale = np.float32(1.0) / np.sqrt(mean + eps)
            for i in range(dim):
                values[i] *= scale


NORMALISE_HEADS = Kernel(count_pieces, _normalise)
"""Divides each head by its root mean square, in place.

Operands: address of the number of rows; x, float32; the bytes from row to row; the number of heads;
their width; eps, a number from `word_of_float`.
"""


def scratch_bytes(dim: int) -> int:
    """Returns the size of one thread's scratch memory."""
    return 3 * int(cache_lines(4 * dim))


@compiled
def _first_bias(window, position, is_own):
    """Returns the index of the bias of the first element of a position's gates."""
    width = window.dim * (1 + window.overlaps)
    return position % window.rate * width + (window.dim if is_own * window.overlaps != 0 else 0)


@compiled
def _raise_largest(row, window, behind, bias, largest, stored):
    """Takes the gates of a row into account. behind: by how many elements they lie behind the first
    ones; bias: the address of the bias of the first of them."""
    biases, found = floats(bias), floats(largest)
    for i in range(window.dim):
        gate = number(row, place_of(window.first_gate + behind + i, stored), stored) + biases[i]
        found[i] = max(found[i], gate)


@compiled
def _add_row(row, window, behind, bias, largest, totals, out, stored):
    """Adds the values of a row, weighted by the exponentials of its gates."""
    biases, most, sums, weighted = floats(bias), floats(largest), floats(totals), floats(out)
    for i in range(window.dim):
        gate = number(row, place_of(window.first_gate + behind + i, stored), stored) + biases[i]
        share = exp(gate - most[i])
        sums[i] += share
        value = number(row, place_of(window.first_value + behind + i, stored), stored)
        weighted[i] += share * value


@compiled
def _average(pages, blocks, window, position, bias, scratch, stored):
    """Computes the entry whose last token has a position, before its norm; returns its address."""
    own = position + 1 - window.rate
    first = own - window.rate if window.overlaps * own > 0 else own
    size = cache_lines(4 * window.dim)
    largest, sums, out = floats(scratch), floats(scratch + size), floats(scratch + 2 * size)
    for i in range(window.dim):
        largest[i] = np.float32(-math.inf)
        sums[i] = np.float32(0.0)
        out[i] = np.float32(0.0)
    for at in range(first, position + 1):
        behind = window.dim if window.overlaps * (at - own + 1) > 0 else 0
        of_row = bias + 4 * _first_bias(window, at, 1 if at >= own else 0)
        _raise_largest(row_at(pages, blocks, at), window, behind, of_row, scratch, stored)
    for at in range(first, position + 1):
        behind = window.dim if window.overlaps * (at - own + 1) > 0 else 0
        of_row = bias + 4 * _first_bias(window, at, 1 if at >= own else 0)
        _add_row(
            row_at(pages, blocks, at), window, behind, of_row, scratch, scratch + size,
            scratch + 2 * size, stored,
        )  # fmt: skip
    for i in range(window.dim):
        out[i] /= sums[i]
    return scratch + 2 * size


@compiled
def _compress(operands, token, thread, num_threads, stored, kind):
    position, sizes = word(word(operands, 2), token), word(operands, 4)
    window = Window(
        word(sizes, 0), word(sizes, 1), word(sizes, 2), word(sizes, 3), word(sizes, 4),
    )  # fmt: skip
    if (position + 1) % window.rate != 0:
        return
    blocks = blocks_of(word(operands, 0), word(operands, 1), token)
    scratch = word(operands, 12) + thread * word(operands, 13)
    row = _average(
        pages_at(word(operands, 3)), blocks, window, position, word(operands, 7), scratch, stored
    )
    values, weight, num_pairs = floats(row), word(operands, 8), word(sizes, 5)
    mean = sum_of_squares(row, window.dim) / np.float32(window.dim)
    scale = np.float32(1.0) / np.sqrt(mean + float_of_word(word(operands, 9)))
    for i in range(window.dim):
        values[i] = values[i] * scale * number(weight, i, kind)
    angles = token * num_pairs * 4
    rotated = row + 4 * (window.dim - 2 * num_pairs)
    rotate(rotated, num_pairs, 1, word(operands, 10) + angles, word(operands, 11) + angles)
    entries = blocks_of(word(operands, 0), word(operands, 5), token)
    place = entry_at(pages_at(word(operands, 6)), entries, window.rate, position // window.rate)
    put_row(place, row, window.dim, stored)


COMPRESS = {kinds: Kernel(pieces_of_step, _compress, *kinds) for kinds in KINDS}
"""Kernels by the dtype names of the cache and of the norm's weight. Each token of a step that is
the last one of a window writes the window's entry.

Operands (addresses, if not marked as numbers; strides in bytes):

    0  step: int64 words, the number of tokens and the number of requests
    1  requests: words, see `attention_pieces.request_words`, with the block table of rows
    2  positions: int64 [tokens]
    3  `Pages` of the rows of tokens, from where their values and gates begin
    4  words: those of `Window`, then how many pairs of neighbours rotate, the last ones of an entry
    5  requests: as 1, with the block table of entries
    6  `Pages` of the entries
    7  bias of gates: float32 [rate, dim, or twice as many if windows overlap]
    8  the norm's weight [dim], and 9 its eps, a number from `word_of_float`
    10 cos, 11 sin: float32 [tokens, pairs], of the position of the first token of the window that
       each token is the last one of
    12 scratch memory of the first thread
    13 its stride from thread to thread, at least `scratch_bytes` (a number)
"""
