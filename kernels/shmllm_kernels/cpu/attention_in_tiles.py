"""Attention over a cache for tile instructions, see `cache_layout.IN_TILES`.

Pieces, chunks, splits and the softmax are those of `attention`; scaled queries and weights are
rounded to bfloat16. A product also multiplies the values of keys that a row does not see, by
weights of 0. Those in the tiles that it visits belong to the same request, but for what lies behind
its last key, which may be NaN: the last tile of values is copied without that.
"""

from __future__ import annotations

from shmllm_kernels.cpu import cache_layout as at
from shmllm_kernels.cpu.attention_job import Job, divide_scratch, find_chunk, whole_rows
from shmllm_kernels.cpu.attention_matrix_tiles import (
    CHUNK_KEYS,
    CHUNK_TILES,
    ROWS,
    SCORES_STRIDE,
    TILES_AT_ONCE,
    WEIGHTS_STRIDE,
    add_to_scaled,
    configure_attention,
    score_keys,
    weigh_values,
)
from shmllm_kernels.cpu.attention_pieces import biases_of, biases_step, find_tile, num_pieces
from shmllm_kernels.cpu.attention_state import (
    SPLIT_KEYS,
    clear,
    merge,
    state_at,
    state_bytes,
    store_output,
)
from shmllm_kernels.cpu.bfloat16 import round_to_shorts, store_bits
from shmllm_kernels.cpu.cache_layout import TILE_DIMS, TILE_KEYS
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import (
    float_of_word,
    floats,
    word,
)
from shmllm_kernels.cpu.simd import LANES, Emitter, Loop
from shmllm_kernels.cpu.softmax import add_biases, cap_scores, weigh_rounded, weigh_whole
from shmllm_kernels.cpu.tile_instructions import AMX, LINE_BYTES
from shmllm_kernels.cpu.windows import first_visible


@emitted
def _round_query(builder, query, count, scale, out, padded):
    """Writes a scaled query as bfloat16, with zeros after its `count` numbers."""
    e = Emitter(builder)
    scales = e.broadcast(scale)
    loop = Loop(e, e.const(0), padded, LANES)
    loop.begin([])
    place = e.at(query, builder.mul(loop.index, e.const(4)))
    numbers = e.load_first(place, builder.sub(count, loop.index))
    rounded = round_to_shorts(e, builder.fmul(numbers, scales))
    store_bits(e, rounded, e.at(out, builder.mul(loop.index, e.const(2))))
    loop.end([])


@compiled
def _load_queries(job, qkv, qkv_stride):
    tile, head_dim = job.tile, word(job.heads, at.HEAD_DIM)
    scale, padded = float_of_word(word(job.heads, at.SCALE)), job.num_steps * TILE_DIMS
    for row in range(job.rows):
        token, head = tile.first_token + row // job.per_kv, tile.kv_head * job.per_kv
        query = qkv + token * qkv_stride + 4 * (head + row % job.per_kv) * head_dim
        _round_query(query, head_dim, scale, job.scratch.query + 2 * row * padded, padded)


@compiled
def _end_of_keys(job, row):
    """Returns the position behind the last one that a row of the tile attends to."""
    query = row // job.per_kv
    return word(job.tile.ends, query) if job.tile.ends != 0 else job.tile.first_position + query + 1


@compiled
def _first_visible(job, row):
    """Returns the first position that a row of the tile attends to."""
    return first_visible(job.tile.first_position + row // job.per_kv, job.window)


@compiled
def _seen_tiles(job, row, first_key):
    """Returns the first of the chunk's tiles that some of the rows from `row` on attend to, up to
    ROWS, and the one behind the last; they are equal if there is none."""
    last_row = min(row + ROWS, job.rows) - 1
    begin = max(_first_visible(job, row), first_key) - first_key
    stop = min(_end_of_keys(job, last_row) - first_key, CHUNK_KEYS)
    first = begin // TILE_KEYS
    return first, (stop - 1) // TILE_KEYS + 1 if begin < stop else first


@compiled
def _score_rows(job, first_key):
    """Computes the scores of a chunk: of some keys for all rows, while they are in the L1 cache."""
    scratch, stride = job.scratch, job.num_steps * LINE_BYTES
    for tile in range(0, CHUNK_TILES, TILES_AT_ONCE):
        for row in range(0, job.rows, ROWS):
            first, end = _seen_tiles(job, row, first_key)
            begin, stop = max(first, tile), min(end, tile + TILES_AT_ONCE)
            query, scores = scratch.query + row * stride, scratch.scores + row * SCORES_STRIDE
            if job.rows <= ROWS:
                score_keys(
                    job.tiles, query, stride, scratch.keys, begin, stop, job.key_line,
                    job.num_steps, scores, scratch.keys_ahead, True,
                )  # fmt: skip
            else:
                score_keys(
                    job.tiles, query, stride, scratch.keys, begin, stop, job.key_line,
                    job.num_steps, scores, 0, False,
                )  # fmt: skip


@compiled
def _weigh_rows(job, state, first_key):
    """Turns the scores of a chunk into weights."""
    scratch, factors = job.scratch, floats(job.scratch.factors)
    for row in range(job.rows):
        first, end = _seen_tiles(job, row // ROWS * ROWS, first_key)
        scores = scratch.scores + row * SCORES_STRIDE + 4 * TILE_KEYS * first
        weights = scratch.weights + row * WEIGHTS_STRIDE + 2 * TILE_KEYS * first
        visible, num_vectors = _first_visible(job, row), (end - first) * (TILE_KEYS // LANES)
        offset, span = first_key + first * TILE_KEYS - visible, _end_of_keys(job, row) - visible
        max_score, weight_sums = state.max_scores + 4 * row, state.weight_sums + 4 * LANES * row
        if job.cap > 0 and first < end:
            cap_scores(scores, num_vectors, job.cap)
        if job.biases != 0 and first < end:
            key, query, head = first_key + first * TILE_KEYS, row // job.per_kv, row % job.per_kv
            biases = job.biases + head * job.biases_stride + query * job.biases_step
            count = _end_of_keys(job, row) - key
            add_biases(scores, num_vectors, LANES, biases + 4 * key, count)
        if (offset >= 0) & (offset + CHUNK_KEYS <= span) & (end - first == CHUNK_TILES):
            factors[row] = weigh_whole(scores, CHUNK_KEYS, max_score, weight_sums, weights)
        elif first < end:
            factors[row] = weigh_rounded(
                scores, num_vectors, offset, span, max_score, weight_sums, weights
            )


@compiled
def _add_values(job, state, first_key):
    """Adds the weighted values of a chunk."""
    scratch, num_bytes = job.scratch, 4 * job.padded
    for row in range(0, job.rows, ROWS):
        first, end = _seen_tiles(job, row, first_key)
        if first < end:
            weights = scratch.weights + row * WEIGHTS_STRIDE
            if job.rows <= ROWS:
                weigh_values(
                    job.tiles, weights, scratch.values, first, end, job.value_line, scratch.sums,
                    scratch.values_ahead, True,
                )  # fmt: skip
            else:
                weigh_values(
                    job.tiles, weights, scratch.values, first, end, job.value_line, scratch.sums,
                    0, False,
                )  # fmt: skip
            factors = floats(scratch.factors + 4 * row)
            for i in range(min(job.rows - row, ROWS)):
                total = state.out + (row + i) * num_bytes
                add_to_scaled(total, factors[i], scratch.sums + i * num_bytes, num_bytes)


@compiled
def _attend_split(job, state, first_tile):
    """Adds one split to a state without keys, from the chunk that begins with a tile of keys;
    returns the tile behind it."""
    split = first_tile * TILE_KEYS // SPLIT_KEYS
    last_key = min(job.tile.last_key, (split + 1) * SPLIT_KEYS - 1)
    while first_tile * TILE_KEYS <= last_key:
        find_chunk(job, first_tile)
        _score_rows(job, first_tile * TILE_KEYS)
        _weigh_rows(job, state, first_tile * TILE_KEYS)
        _add_values(job, state, first_tile * TILE_KEYS)
        first_tile += CHUNK_TILES
    return first_tile


@compiled
def _attend_tile(job, own, first_tile):
    """Computes the state of a piece. own: the address for that of a split, if it is one."""
    rows, padded = job.rows, job.padded
    split, last_split = first_tile * TILE_KEYS // SPLIT_KEYS, job.tile.last_key // SPLIT_KEYS
    total = state_at(job.scratch.total, rows, padded)
    address = job.scratch.total if split == last_split else job.scratch.state
    state = state_at(own if job.tile.split >= 0 else address, rows, padded)
    clear(state, rows, padded)  # it stays so if a window hides all of the piece's keys
    if split < last_split:
        clear(total, rows, padded)
    while first_tile * TILE_KEYS <= job.tile.last_key:
        first_tile = _attend_split(job, state, first_tile)
        if split < last_split:
            merge(total, state, rows, padded)
            clear(state, rows, padded)


@compiled
def attend_by(tiles, operands, piece, thread, num_threads, kind):
    """Does one piece with these instructions on tiles. The operands are those of
    `attention.ATTEND`."""
    requests, heads, window = word(operands, 1), word(operands, 2), word(operands, 8)
    step, ends, last = word(operands, 0), word(operands, 14), num_pieces(operands, 0, 0, 0) - 1
    tile = find_tile(step, requests, heads, window, ends, piece)
    following = find_tile(step, requests, heads, window, ends, min(piece + num_threads, last))
    head_dim, num_kv_heads = word(heads, at.HEAD_DIM), word(heads, at.NUM_KV_HEADS)
    per_kv = word(heads, at.NUM_HEADS) // num_kv_heads
    rows, padded = tile.num_queries * per_kv, word(heads, at.VALUE_ROW_BYTES) // 2
    num_steps = (head_dim + TILE_DIMS - 1) // TILE_DIMS
    address = word(operands, 9) + thread * word(operands, 10)
    scratch = divide_scratch(address, rows, padded, whole_rows(rows) * num_steps * LINE_BYTES)
    job = Job(
        tiles, tile, following, scratch, heads, word(operands, 7), rows, per_kv, padded,
        2 * word(heads, at.DIMENSION_BYTES), 4 * padded, num_steps, window,
        float_of_word(word(operands, 11)), biases_of(operands, tile, per_kv), word(operands, 16),
        biases_step(operands),
    )  # fmt: skip
    _load_queries(job, word(operands, 3), word(operands, 4))
    configure_attention(tiles, scratch.sizes, min(rows, ROWS))
    own = (tile.split * num_kv_heads + tile.kv_head) * state_bytes(rows, padded)
    first_tile = tile.first_key // CHUNK_KEYS * CHUNK_TILES
    _attend_tile(job, word(operands, 13) + own, first_tile)
    tiles.release()
    if tile.split < 0:
        store_output(
            state_at(scratch.total, rows, padded), rows, padded, word(heads, at.VALUE_DIM), per_kv,
            tile.kv_head * per_kv, word(operands, 12), kind,
            word(operands, 5) + tile.first_token * word(operands, 6), word(operands, 6),
        )  # fmt: skip


@compiled
def _attend(operands, piece, thread, num_threads, kind):
    attend_by(AMX, operands, piece, thread, num_threads, kind)


ATTEND_IN_TILES = {kinds: Kernel(num_pieces, _attend, kinds[1]) for kinds in at.TILE_KINDS}
"""As `attention.ATTEND`, for a process that has `amx.HAS_AMX`. AMX takes subnormal numbers for
zero, in operands and sums."""
