"""Low-rank adapters of experts: what they add to the products of `experts`.

An adapter has an entry of `lora` for each expert. `pairs.SORT_LISTED` lays the pairs of one
expert out adapter by adapter, so a block consists of stretches of pairs with the same adapter.
SHRINK_PAIRS computes the products of each stretch with A; the kernels of `experts` add the products
with B to their own. Every element is summed in the same order, for any stretch: results do not
depend on the batch, to the last bit.
"""

from __future__ import annotations

from typing import NamedTuple

from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.lora import DTYPES, expand_rows, num_parts, shrink_rows
from shmllm_kernels.cpu.memory import word
from shmllm_kernels.cpu.pairs import BLOCK_WORDS
from shmllm_kernels.cpu.product_tiles import IN_ORDER, LISTED, TILE_COLUMNS
from shmllm_kernels.cpu.products import Rows


class ExpertAdapters(NamedTuple):
    """What the kernels know of the adapters of one product of each expert: int64 words.

    num_units: the address of an int64; 0: no token of the step has an adapter.
    table: the address of [places, products] int64, the addresses of entries; 0: an adapter changes
        nothing in a product.
    num_products: the number of columns of the table.
    first_product: the product of the first expert; those of the others follow it.
    places: the address of [tokens] int64, the place of each token's adapter; -1: it has none.
    tokens: the address of [pairs] int64, the token of each sorted pair.
    t: the address of [pairs, ranks or more] float32, the products with A, by sorted pair.
    t_stride: its stride in bytes.
    rows: the address of [products.ROWS_AT_ONCE] int64, the numbers from 0 on.
    """

    num_units: int
    table: int
    num_products: int
    first_product: int
    places: int
    tokens: int
    t: int
    t_stride: int
    rows: int


@compiled
def _place(adapters, pair):
    return word(word(adapters, 4), word(word(adapters, 5), pair))


@compiled
def _stretch(adapters, pair, end):
    """Returns the number of pairs from this one on that have its adapter, or none as it does."""
    place, last = _place(adapters, pair), pair + 1
    while last < end and _place(adapters, last) == place:
        last += 1
    return last - pair


@compiled
def _entry(adapters, pair, expert):
    """Returns the address of the entry of a pair's adapter, or 0."""
    place = _place(adapters, pair)
    if place < 0:
        return 0
    product = word(adapters, 3) + expert
    return word(word(adapters, 1), place * word(adapters, 2) + product)


@compiled
def has_adapters(adapters):
    """Returns whether a token of the step has an adapter."""
    return word(word(adapters, 0), 0) != 0


@compiled
def add_to_block(adapters, expert, first, count, begin, end, out, out_stride, kind):
    """Adds what the adapters add to the columns [begin, end) of a block's products.

    Args:
        adapters: the address of `ExpertAdapters`.
        expert, first, count: the block.
        out, out_stride: column c of pair ``first + i`` lies at ``out + i * out_stride + 4 * c``.
        kind: the dtype name of B.
    """
    t_stride = word(adapters, 7)
    pair = first
    while pair < first + count:
        size = _stretch(adapters, pair, first + count)
        entry = _entry(adapters, pair, expert)
        if entry != 0:
            expand_rows(
                word(adapters, 6) + pair * t_stride, t_stride, entry, begin, end, out, out_stride,
                word(adapters, 8) + 8 * (pair - first), size, kind,
            )  # fmt: skip
        pair += size


@compiled
def _parts(operands, num_threads):
    return num_parts(word(word(operands, 1), 0), word(operands, 6) // TILE_COLUMNS, num_threads)


@compiled
def _shrink_pieces(operands, piece, thread, num_threads):
    pieces = word(word(operands, 1), 0) * _parts(operands, num_threads)
    return pieces if has_adapters(word(operands, 0)) else 0


@compiled
def _shrink(operands, piece, thread, num_threads, kind, order):
    adapters, parts = word(operands, 0), _parts(operands, num_threads)
    block = word(operands, 2) + piece // parts * (8 * BLOCK_WORDS)
    expert, first, end = word(block, 0), word(block, 1), word(block, 1) + word(block, 2)
    x, x_stride, t_stride = word(operands, 3), word(operands, 4), word(adapters, 7)
    pair = first
    while pair < end:
        size = _stretch(adapters, pair, end)
        entry = _entry(adapters, pair, expert)
        if entry != 0:
            own = x + pair * x_stride if order == IN_ORDER else x
            rows = Rows(own, x_stride, word(adapters, 5) + 8 * pair, "float32", order)
            t = word(adapters, 6) + pair * t_stride
            shrink_rows(
                rows, size, entry, word(operands, 5), t, t_stride, piece % parts, parts, kind
            )
        pair += size


SHRINK_PAIRS = {
    (kind, order): Kernel(_shrink_pieces, _shrink, kind, order)
    for kind in DTYPES
    for order in (LISTED, IN_ORDER)
}
"""Kernels by the dtype name of A and the order of x: ``t = x @ A.T`` for the pairs of each expert.
LISTED: a pair reads the row of its token; IN_ORDER: x has a row for each sorted pair.

Operands (addresses; strides in bytes):

    0  `ExpertAdapters`
    1  the address of the number of blocks, 2  blocks: see `pairs.SORT`
    3  x float32, 4  its stride, 5  k
    6  the largest number of rows that an A has
"""
