"""Attention's two products by tile instructions, for up to 16 query rows and one chunk of keys.

Queries and weights are the first operands, keys and values, as the cache has them, the second: sums
have a line for each query row. A score is summed over the dimensions in their order, in steps of
TILE_DIMS, an output over the keys in theirs, in steps of TILE_KEYS, in a tile: results depend on
the operands alone. A row of sums depends on one row of the first operand, so rows that nobody wrote
do no harm.
"""

from __future__ import annotations

from shmllm_kernels.cpu.cache_layout import TILE_DIMS, TILE_KEYS
from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import put_word, word
from shmllm_kernels.cpu.simd import LANES, Emitter, Loop
from shmllm_kernels.cpu.tile_instructions import LINE_BYTES, LINES

ROWS = LINES
"""The largest number of query rows of a product."""
CHUNK_TILES = 8
"""The number of tiles of keys in a chunk, after which the softmax is updated."""
CHUNK_KEYS = CHUNK_TILES * TILE_KEYS
SCORES_STRIDE = 4 * CHUNK_KEYS
WEIGHTS_STRIDE = 2 * CHUNK_KEYS

S0, S1, S2, S3 = 0, 1, 2, 3
"""Tiles of sums: a line of 64 bytes for each query row."""
QUERIES, WEIGHTS = 4, 5
"""Tiles with a line for each query row: 32 dimensions, or 16 keys."""
KEYS, VALUES = 6, 7
"""Tiles with a line of 64 bytes for each pair of dimensions of 16 keys, and for each pair of keys
of 16 dimensions."""
TILES_AT_ONCE = 4
"""The largest number of tiles of the cache that a tile of rows is multiplied with."""
_KIND = "bfloat16"


@compiled
def configure_attention(tiles, memory, num_rows):
    """Sets the sizes of all tiles.

    Args:
        tiles: the instructions.
        memory: 64 bytes of scratch memory, aligned to 8.
        num_rows: the number of query rows in each tile, 1 to ROWS.
    """
    put_word(memory, 0, 1)  # palette 1, the only one
    put_word(memory, 1, 0)
    # Bytes of a line, 16 bits for each tile.
    put_word(memory, 2, LINE_BYTES * 0x0001000100010001)
    put_word(memory, 3, LINE_BYTES * 0x0001000100000001 + (2 * TILE_KEYS << 16))
    put_word(memory, 4, 0)
    put_word(memory, 5, 0)
    # Lines, 8 bits for each tile.
    of_cache = (TILE_DIMS << 47) + (TILE_KEYS << 55)  # half as many lines as both
    put_word(memory, 6, num_rows * 0x010101010101 + of_cache)
    put_word(memory, 7, 0)
    tiles.configure(memory)


@compiled
def _begin(tiles, num_sums):
    tiles.zero(S0)
    if num_sums > 1:
        tiles.zero(S1)
    if num_sums > 2:
        tiles.zero(S2)
        tiles.zero(S3)


@compiled
def _end(tiles, num_sums, out, stride):
    tiles.store(S0, out, stride)
    if num_sums > 1:
        tiles.store(S1, out + LINE_BYTES, stride)
    if num_sums > 2:
        tiles.store(S2, out + 2 * LINE_BYTES, stride)
        tiles.store(S3, out + 3 * LINE_BYTES, stride)


@compiled
def _step(tiles, rows, row, row_stride, cache, first, second, third, fourth, stride, num_sums):
    """Adds the products of a tile of rows and 1, 2 or 4 tiles of the cache. rows, cache: the tiles
    that these are loaded to."""
    tiles.load(rows, row, row_stride)
    tiles.load(cache, first, stride)
    tiles.dot(_KIND, S0, rows, cache)
    if num_sums > 1:
        tiles.load(cache, second, stride)
        tiles.dot(_KIND, S1, rows, cache)
    if num_sums > 2:
        tiles.load(cache, third, stride)
        tiles.dot(_KIND, S2, rows, cache)
        tiles.load(cache, fourth, stride)
        tiles.dot(_KIND, S3, rows, cache)


@emitted
def _prefetch(builder, address, count):
    """Prefetches a constant number of lines."""
    e = Emitter(builder)
    for i in range(count.constant):
        e.prefetch(e.at(address, LINE_BYTES * i))


@compiled
def _score_tiles(tiles, query, query_stride, keys, num_keys, line, num_steps, out, ahead, fetches):
    """Computes the scores of 1, 2 or 4 tiles of keys."""
    first, second = word(keys, 0), word(keys, 1) if num_keys > 1 else 0
    third, fourth = word(keys, 2) if num_keys > 2 else 0, word(keys, 3) if num_keys > 2 else 0
    _begin(tiles, num_keys)
    for step in range(num_steps):
        done = step * (TILE_DIMS * LINE_BYTES >> 1)
        if fetches:
            _prefetch(word(ahead, 0) + done, TILE_DIMS // 2)
            if num_keys > 1:
                _prefetch(word(ahead, 1) + done, TILE_DIMS // 2)
            if num_keys > 2:
                _prefetch(word(ahead, 2) + done, TILE_DIMS // 2)
                _prefetch(word(ahead, 3) + done, TILE_DIMS // 2)
        at = step * ((TILE_DIMS >> 1) * line)
        _step(
            tiles, QUERIES, query + step * LINE_BYTES, query_stride, KEYS, first + at, second + at,
            third + at, fourth + at, line, num_keys,
        )  # fmt: skip
    _end(tiles, num_keys, out, SCORES_STRIDE)


@compiled
def score_keys(tiles, query, query_stride, keys, first, end, line, num_steps, out, ahead, fetches):
    """Computes the scores of some tiles of keys.

    Args:
        tiles: the instructions.
        query, query_stride: the address of bfloat16 [rows, TILE_DIMS * num_steps], multiplied by
            scale and log2(e); the bytes from one row to the next.
        keys: address of a table of addresses, those of a chunk's tiles of keys.
        first, end: the first tile, and the one behind the last.
        line: bytes from one pair of dimensions of a tile to the next.
        num_steps: the number of steps of TILE_DIMS dimensions.
        out: address of the scores, float32 [ROWS, CHUNK_KEYS].
        ahead: address of a table like `keys`, of as many bytes to prefetch.
        fetches: whether there are any (a constant).
    """
    tile = first
    while tile < end:
        at, to = keys + 8 * tile, out + LINE_BYTES * tile
        soon = ahead + 8 * tile
        if end - tile >= 4:
            _score_tiles(tiles, query, query_stride, at, 4, line, num_steps, to, soon, fetches)
            tile += 4
        elif end - tile >= 2:
            _score_tiles(tiles, query, query_stride, at, 2, line, num_steps, to, soon, fetches)
            tile += 2
        else:
            _score_tiles(tiles, query, query_stride, at, 1, line, num_steps, to, soon, fetches)
            tile += 1


@compiled
def _weigh_tiles(tiles, weights, values, first, end, line, num_tiles, skip, out, ahead, fetches):
    """Sums 1, 2 or 4 tiles of dimensions of the weighted values."""
    _begin(tiles, num_tiles)
    for tile in range(first, end):
        at = word(values, tile) + skip
        if fetches:
            lines = num_tiles * (TILE_KEYS // 2)
            _prefetch(word(ahead, tile) + (TILE_KEYS // 2) * skip, lines)
        _step(
            tiles, WEIGHTS, weights + 2 * TILE_KEYS * tile, WEIGHTS_STRIDE, VALUES, at,
            at + LINE_BYTES, at + 2 * LINE_BYTES, at + 3 * LINE_BYTES, line, num_tiles,
        )  # fmt: skip
    _end(tiles, num_tiles, out, line)


@compiled
def weigh_values(tiles, weights, values, first, end, line, out, ahead, fetches):
    """Sums the weighted values of some tiles of keys.

    Args:
        tiles: the instructions.
        weights: address of bfloat16 [rows, CHUNK_KEYS].
        values: address of a table of addresses, those of the values of a chunk's tiles of keys.
        first, end: the first tile, and the one behind the last.
        line: bytes from one pair of keys to the next, 4 for each dimension.
        out: address of the sums, float32 [ROWS, dimensions].
        ahead: address of a table like `values`, of as many bytes to prefetch.
        fetches: whether there is anything (a constant).
    """
    skip = 0
    while skip < line:
        at = out + skip
        if line - skip >= 4 * LINE_BYTES:
            _weigh_tiles(tiles, weights, values, first, end, line, 4, skip, at, ahead, fetches)
            skip += 4 * LINE_BYTES
        elif line - skip >= 2 * LINE_BYTES:
            _weigh_tiles(tiles, weights, values, first, end, line, 2, skip, at, ahead, fetches)
            skip += 2 * LINE_BYTES
        else:
            _weigh_tiles(tiles, weights, values, first, end, line, 1, skip, at, ahead, fetches)
            skip += LINE_BYTES


@emitted
def add_to_scaled(builder, total, factor, sums, num_bytes):
    """Computes ``total = total * factor + sums`` for rows of float32, whole vectors."""
    e = Emitter(builder)
    factors = e.broadcast(factor)
    loop = Loop(e, e.const(0), num_bytes, 4 * LANES)
    loop.begin([])
    place = e.at(total, loop.index)
    e.store(e.fma(e.load(place), factors, e.load(e.at(sums, loop.index))), place)
    loop.end([])
