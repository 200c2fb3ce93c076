"""Kernel functions of the attention of decodes whose contexts are split into parts.

A part has a program of its own, which stores its sums to scratch memory, [rows, DIM] with two
numbers for each row. The program that ends last joins the parts of all rows, in their order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from shmllm_kernels.gpu.attention_kernels import first_visible
from shmllm_kernels.gpu.decode_rows import places_of
from shmllm_kernels.gpu.functions import sigmoid


class Gates(NamedTuple):
    """The gates of the output: a pointer to those of the first token, and the elements from a token
    to the next one."""

    first: Any
    stride: Any


class GateRows(NamedTuple):
    """Where the gates of rows lie.

    Attributes:
        first: pointer to those of the first row.
        places: where those of each row begin behind it, [rows].
    """

    first: Any
    places: Any


class OutputRows(NamedTuple):
    """Where rows of the output lie.

    Attributes:
        first: pointer to the first row.
        places: where each row begins behind it, [rows].
        gates: `GateRows`, by whose sigmoids they are multiplied; None: there are none.
    """

    first: Any
    places: Any
    gates: Any


@triton.jit
def gates_of(
    part, gates, rows, HEADS_PER_KV: tl.constexpr, DIM: tl.constexpr, MAX_TOKENS: tl.constexpr
):
    """Returns the gates of a part's rows; None: there are none."""
    own = None
    if gates is not None:
        first = gates.first + part.token * gates.stride + part.kv_head * HEADS_PER_KV * DIM
        own = GateRows(first, places_of(rows, gates.stride, HEADS_PER_KV, DIM, MAX_TOKENS))
    return own


@triton.jit
def tiles_of(
    position, window, split, HAS_WINDOW: tl.constexpr, NUM_SPLITS: tl.constexpr,
    FEWEST_KEYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Returns the first key that a request's first token, at `position`, attends to, the tiles of
    one part of the keys before that position, and the number of parts that have keys: at least one.
    A part has at least FEWEST_KEYS, but for the last one."""
    keys_begin = position * 0
    if HAS_WINDOW:
        keys_begin = first_visible(position, window)
    lowest = keys_begin // TILE
    highest = tl.cdiv(position, TILE)
    num_parts = position * 0 + 1
    if NUM_SPLITS > 1:
        fewest: tl.constexpr = max(FEWEST_KEYS // TILE, 1)
        per_split = tl.maximum(tl.cdiv(highest - lowest, NUM_SPLITS), fewest)
        num_parts = tl.maximum(tl.cdiv(highest - lowest, per_split), 1)
        lowest += split * per_split
        highest = tl.minimum(lowest + per_split, highest)
    return keys_begin, lowest, highest, num_parts


@triton.jit
def load_gates(gates, is_row, DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Returns the gates of rows, [rows, DIM_PADDED]; None: there are none."""
    loaded = None
    if gates is not None:
        dims = tl.arange(0, DIM_PADDED)
        places = gates.first + gates.places[:, None] + dims[None, :]
        loaded = tl.load(places, mask=is_row[:, None] & (dims < DIM)[None, :], other=0.0)
    return loaded


@triton.jit
def _gates_at(gates, places):
    """Returns the gates of other rows; None: there are none."""
    others = None
    if gates is not None:
        others = GateRows(gates.first, places)
    return others


@triton.jit
def _gated(x, gates, dtype: tl.constexpr):
    """Returns rows times the sigmoids of their gates. The rows, the sigmoids and the products are
    rounded to the dtype."""
    x = x.to(dtype)
    if gates is not None:
        shares = sigmoid(gates.to(tl.float32)).to(dtype)
        x = (x.to(tl.float32) * shares.to(tl.float32)).to(dtype)
    return x


@triton.jit
def store_rows(output, x, gates, is_row, DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Stores rows, [rows, DIM_PADDED], times the sigmoids of their gates."""
    dims = tl.arange(0, DIM_PADDED)
    places = output.first + output.places[:, None] + dims[None, :]
    mask = is_row[:, None] & (dims < DIM)[None, :]
    tl.store(places, _gated(x, gates, output.first.dtype.element_ty), mask=mask)


@triton.jit
def _store_part(
    sums, peak, total, part_sums_ptr, part_stats_ptr, part, is_row,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """Stores what a program has summed up: a part is [rows, DIM]."""
    rows, dims = tl.arange(0, sums.shape[0]), tl.arange(0, DIM_PADDED)
    place = part + rows
    tl.store(part_stats_ptr + 2 * place, peak, mask=is_row)
    tl.store(part_stats_ptr + 2 * place + 1, total, mask=is_row)
    places = part_sums_ptr + place[:, None] * DIM + dims[None, :]
    tl.store(places, sums, mask=is_row[:, None] & (dims < DIM)[None, :])


@triton.jit
def is_last_part(counter_ptr, num_parts):
    """Counts this program's part, and returns whether the others are there. Then the counter is 0
    again."""
    tl.debug_barrier()  # all of this program's part is written before it counts itself
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == num_parts - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def _join_heads(
    output, part_sums_ptr, part_stats_ptr, first_part, num_parts,
    NUM_SPLITS: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """Joins the parts of the heads that share a kv head, of one token, some heads at a time."""
    splits, heads, dims = tl.arange(0, NUM_SPLITS), tl.arange(0, HEADS), tl.arange(0, DIM_PADDED)
    is_part, is_dim = splits < num_parts, dims < DIM
    for first in tl.static_range(0, HEADS_PER_KV, HEADS):
        head = first + heads
        is_head = head < HEADS_PER_KV
        place = first_part + splits[:, None] * HEADS_PER_KV + head[None, :]
        is_wanted = is_part[:, None] & is_head[None, :]
        peaks = tl.load(part_stats_ptr + 2 * place, mask=is_wanted, other=float("-inf"))
        totals = tl.load(part_stats_ptr + 2 * place + 1, mask=is_wanted, other=0.0)
        places = part_sums_ptr + place[:, :, None] * DIM + dims[None, None, :]
        wanted = is_wanted[:, :, None] & is_dim[None, None, :]
        sums = tl.load(places, mask=wanted, other=0.0)
        own = OutputRows(output.first, head * DIM, _gates_at(output.gates, head * DIM))
        gates = load_gates(own.gates, is_head, DIM, DIM_PADDED)
        highest = tl.where(is_head, tl.max(peaks, axis=0), 0.0)
        shares = tl.exp2(peaks - highest[None, :])
        total = tl.where(is_head, tl.sum(totals * shares, axis=0), 1.0)
        joined = tl.sum(sums * shares[:, :, None], axis=0) / total[:, None]
        store_rows(own, joined, gates, is_head, DIM, DIM_PADDED)


@triton.jit
def _join_rows(
    rows, is_row, part_sums_ptr, part_stats_ptr, first_part, num_parts, num_rows,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """Returns all rows, joined, [rows, DIM_PADDED]: it adds one part after the other, and loads
    some parts ahead, since no store comes between them."""
    dims = tl.arange(0, DIM_PADDED)
    is_element = is_row[:, None] & (dims < DIM)[None, :]
    joined = tl.zeros((rows.shape[0], DIM_PADDED), tl.float32)
    highest = tl.full((rows.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((rows.shape[0],), tl.float32)
    for part in tl.range(0, num_parts, loop_unroll_factor=4):
        place = first_part + part * num_rows + rows
        peak = tl.load(part_stats_ptr + 2 * place, mask=is_row, other=0.0)
        weight = tl.load(part_stats_ptr + 2 * place + 1, mask=is_row, other=1.0)
        places = part_sums_ptr + place[:, None] * DIM + dims[None, :]
        sums = tl.load(places, mask=is_element, other=0.0)
        new_highest = tl.maximum(highest, peak)
        shrink, share = tl.exp2(highest - new_highest), tl.exp2(peak - new_highest)
        joined = joined * shrink[:, None] + sums * share[:, None]
        total = total * shrink + weight * share
        highest = new_highest
    return joined / total[:, None]


@triton.jit
def _join(
    output, rows, is_row, part_sums_ptr, part_stats_ptr, first_part, num_parts, num_rows,
    NUM_SPLITS: tl.constexpr, HEADS_PER_KV: tl.constexpr, MAX_TOKENS: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """Stores the joined rows of a request and a kv head."""
    if MAX_TOKENS == 1:
        _join_heads(
            output, part_sums_ptr, part_stats_ptr, first_part, num_parts, NUM_SPLITS, HEADS_PER_KV,
            HEADS_AT_ONCE, DIM, DIM_PADDED,
        )  # fmt: skip
    else:
        joined = _join_rows(
            rows, is_row, part_sums_ptr, part_stats_ptr, first_part, num_parts, num_rows, DIM,
            DIM_PADDED,
        )  # fmt: skip
        # Beside the loop's rows they would not fit into registers.
        gates = load_gates(output.gates, is_row, DIM, DIM_PADDED)
        store_rows(output, joined, gates, is_row, DIM, DIM_PADDED)


@triton.jit
def finish_part(
    output, sums, peak, total, rows, is_row, part_sums_ptr, part_stats_ptr, counter_ptr, first_part,
    split, num_parts, num_rows,
    NUM_SPLITS: tl.constexpr, HEADS_PER_KV: tl.constexpr, MAX_TOKENS: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """Stores what a program has summed up. The program that is last joins all parts."""
    place = first_part + split * num_rows
    _store_part(sums, peak, total, part_sums_ptr, part_stats_ptr, place, is_row, DIM, DIM_PADDED)
    if is_last_part(counter_ptr, num_parts):
        _join(
            output, rows, is_row, part_sums_ptr, part_stats_ptr, first_part, num_parts, num_rows,
            NUM_SPLITS, HEADS_PER_KV, MAX_TOKENS, HEADS_AT_ONCE, DIM, DIM_PADDED,
        )  # fmt: skip
