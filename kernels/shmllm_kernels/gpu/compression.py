"""The kernel that makes entries, each of which stands for several tokens (DeepSeek-AI,
"DeepSeek-V4", 2026, section 2.3).

The program of a token that is the last one of a window reads what all tokens of the window have
contributed, from the cache, whether they belong to this step or to earlier ones: an entry's bits
depend on its tokens alone. Programs of other tokens return. `reference.compression` has the
formulas; the kernel computes them in float32, with a softmax that passes once over the tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.choices import entry_place, place_of
from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.last_rotated import last_rotated, normed
from shmllm_kernels.gpu.rope_write import stored

AT_ONCE = 8
"""The most tokens of a window that a program reads at a time."""


class Made(NamedTuple):
    """What entries are made of.

    Attributes:
        rate: the number of tokens of an entry.
        overlaps: whether an entry is made of the tokens of the entry before it, too.
        first: the first column of a token's row that its values begin with; gates are behind.
    """

    rate: int
    overlaps: bool
    first: int = 0


class CacheRows(NamedTuple):
    """Rows of a layer, and where those of requests are.

    Attributes:
        rows: [blocks, rows of a block, width], each row contiguous.
        block_table: [requests, blocks] int32, rows contiguous.
    """

    rows: Tensor
    block_table: Tensor


@triton.jit(do_not_specialize=["num_requests"])
def _compress(
    entries_ptr, parts_ptr, bias_ptr, weight_ptr, cos_ptr, sin_ptr, table_ptr, entry_table_ptr,
    starts_ptr, contexts_ptr, num_requests, entry_block_stride, entry_stride, block_stride,
    token_stride, table_stride, entry_table_stride, cos_stride, sin_stride, eps,
    RATE: tl.constexpr, OVERLAPS: tl.constexpr, FIRST: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    request, count = place_of(token, starts_ptr, contexts_ptr, num_requests)
    if (count <= 0) | (count % RATE != 0):
        return
    WIDTH: tl.constexpr = 2 * DIM if OVERLAPS else DIM
    REACH: tl.constexpr = 2 * RATE if OVERLAPS else RATE
    dims = tl.arange(0, DIM_PADDED)
    inside = (dims < DIM)[None, :]
    table_ptr += request.to(tl.int64) * table_stride
    most = tl.full((DIM_PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((DIM_PADDED,), tl.float32)
    sums = tl.zeros((DIM_PADDED,), tl.float32)
    for begin in range(0, REACH, AT_ONCE):
        place = begin + tl.arange(0, AT_ONCE)
        positions = count - REACH + place
        present = (place < REACH) & (positions >= 0)
        # The second half of what a token contributes belongs to its own window.
        half = tl.where(place >= REACH - RATE, WIDTH - DIM, 0)
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=present, other=0)
        rows = blocks.to(tl.int64) * block_stride + positions % BLOCK_SIZE * token_stride
        sources = parts_ptr + (rows + FIRST + half)[:, None] + dims[None, :]
        wanted = present[:, None] & inside
        values = tl.load(sources, mask=wanted, other=0.0).to(tl.float32)
        gates = tl.load(sources + WIDTH, mask=wanted, other=0.0).to(tl.float32)
        biases = bias_ptr + (positions % RATE * WIDTH + half)[:, None] + dims[None, :]
        gates += tl.load(biases, mask=wanted, other=0.0)
        gates = tl.where(present[:, None], gates, float("-inf"))
        new_most = tl.maximum(most, tl.max(gates, axis=0))
        # While no token was present, subtract 0 from minus infinity.
        base = tl.where(new_most == float("-inf"), 0.0, new_most)
        shares, shrink = tl.exp(gates - base[None, :]), tl.exp(most - base)
        total = total * shrink + tl.sum(shares, axis=0)
        sums = sums * shrink + tl.sum(shares * values, axis=0)
        most = new_most

    dtype: tl.constexpr = parts_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    made = tl.where(inside, (sums / total)[None, :], 0.0)
    made = normed(made, weight, eps, dtype, DIM)
    cos_ptr += token.to(tl.int64) * cos_stride
    sin_ptr += token.to(tl.int64) * sin_stride
    made = last_rotated(made, cos_ptr, sin_ptr, HALF, DIM, 1, DIM_PADDED, False)
    index, row = entry_place(count // RATE - 1, RATE, BLOCK_SIZE)
    block = tl.load(entry_table_ptr + request.to(tl.int64) * entry_table_stride + index)
    target = entries_ptr + block.to(tl.int64) * entry_block_stride + row * entry_stride
    tl.store(target + dims[None, :], stored(made, dtype, dtype), mask=inside)


def compress(
    entries: CacheRows,
    parts: CacheRows,
    made: Made,
    bias: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
) -> None:
    """Computes ``reference.compression.make_entries`` for each token of a step that is the last one
    of a window, and writes the entries to the cache.

    Args:
        entries: those of the layer, [blocks, ceil(block_size / rate), dim].
        parts: what tokens have contributed, [blocks, block_size, columns], in the dtype of all
            tensors but ``bias``: float32, float16 or bfloat16.
        made: what entries are made of.
        bias: [rate, dim, or 2 * dim if windows overlap] float32, contiguous.
        weight: [dim], contiguous, of the norm.
        eps: its eps.
        cos: [tokens, rope_dim], rows contiguous, of the first position of the window that a token
            is the last one of; only the second half is read.
        sin: as ``cos``.
        query_starts, context_lens: see `attention.paged_attention`.

    One launch a layer, and one for the keys of an indexer. An entry of 8 overlapping tokens of 512
    elements reads 16 KiB in bfloat16, one of 128 tokens 256 KiB by one program, about 3 us, for
    each 128 decodes of a request. Programs of other tokens return after a search of log2(requests)
    loads.
    """
    tokens, dim = len(cos), len(weight)
    width, block_size = bias.shape[1], parts.rows.shape[1]
    requests, per_block = len(context_lens), -(-block_size // made.rate)
    assert dim % 2 == 0, "entries are pairs"
    assert bias.shape == (made.rate, dim * (1 + made.overlaps)), "bias: a row for each token"
    assert bias.dtype is torch.float32, "biases are float32"
    assert bias.is_contiguous(), "bias must be contiguous"
    assert entries.rows.shape[1:] == (per_block, dim), "entries: a row for each in a block"
    assert made.first + 2 * width <= parts.rows.shape[2], "a token contributes values and gates"
    assert cos.shape == sin.shape, "sin must have cos' shape"
    floats = entries.rows, parts.rows, weight, cos, sin
    assert all(each.dtype is weight.dtype for each in floats), "all have one dtype"
    assert all(each.stride(-1) == 1 for each in floats), "the last dimension must be contiguous"
    if tokens == 0 or requests == 0:
        return
    _compress[(tokens,)](
        entries.rows, parts.rows, bias, weight, cos, sin, parts.block_table, entries.block_table,
        query_starts, context_lens, requests, *entries.rows.stride()[:2], *parts.rows.stride()[:2],
        parts.block_table.stride(0), entries.block_table.stride(0), cos.stride(0), sin.stride(0),
        eps, RATE=made.rate, OVERLAPS=made.overlaps, FIRST=made.first, HALF=cos.shape[1] // 2,
        BLOCK_SIZE=block_size, DIM=dim, DIM_PADDED=next_power_of_two(dim),
        AT_ONCE=min(next_power_of_two(made.rate), AT_ONCE), num_warps=8,
    )  # fmt: skip
