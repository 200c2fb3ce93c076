"""What disentangled attention adds to scores: products of queries and keys with projections of
embeddings of their distance (He et al., "DeBERTa", 2021).

It computes the same as `reference.relations`, in float32. What is added to a token's scores depends
on its own text alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import next_power_of_two

BLOCK_KEYS = 32


@triton.jit
def _relate(
    out_ptr,
    query_ptr,
    key_ptr,
    to_keys_ptr,
    to_queries_ptr,
    rows_ptr,
    positions_ptr,
    ends_ptr,
    token_stride,
    row_stride,
    width,
    scale,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions_ptr + token).to(tl.int64)
    end = tl.load(ends_ptr + token)
    dims = tl.arange(0, DIM_PADDED)
    inside = (dims < DIM)[None, :]
    column = head * DIM + dims
    first = token - position
    query = tl.load(query_ptr + token * token_stride + column, mask=dims < DIM, other=0.0)
    query = query.to(tl.float32)[None, :]
    out_ptr += (token * tl.num_programs(1) + head) * width
    for begin in range(0, end, BLOCK):
        keys = begin + tl.arange(0, BLOCK)
        present = keys < end
        mask = present[:, None] & inside
        row = tl.load(rows_ptr + (position - keys) + width - 1, mask=present, other=0)
        places = row.to(tl.int64)[:, None] * row_stride + column[None, :]
        total = tl.zeros((BLOCK,), tl.float32)
        if to_keys_ptr is not None:
            projected = tl.load(to_keys_ptr + places, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(query * projected, axis=1)
        if to_queries_ptr is not None:
            of_keys = (first + keys)[:, None] * token_stride + column[None, :]
            key = tl.load(key_ptr + of_keys, mask=mask, other=0.0).to(tl.float32)
            projected = tl.load(to_queries_ptr + places, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(key * projected, axis=1)
        tl.store(out_ptr + keys, total * scale, mask=present)


def relate(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    to_keys: Tensor | None,
    to_queries: Tensor | None,
    rows: Tensor,
    positions: Tensor,
    ends: Tensor,
    scale: float,
) -> None:
    """Computes `reference.relations.relate` for a step that has all tokens of its texts.

    Tokens may be padded: nothing is written for those whose end is 0.

    Args:
        out: [tokens, num_heads, n] float32, contiguous: for each token and head the sums for the
            keys of the token's text; the rest of a row stays.
        query, key: [tokens, num_heads * dim], rows of the same tensor.
        to_keys, to_queries: [rows, num_heads * dim], likewise, or None.
        rows: [2 * n - 1] int32, contiguous.
        positions: [tokens] int64, contiguous, a token's place in its text.
        ends: [tokens] int32, contiguous, the number of tokens of its text.
        scale: the factor.

    One launch a layer. A program computes the scores of one head of a token: for each key it reads
    a row of ``to_keys``, a key and a row of ``to_queries``, 384 bytes for heads of 64 in bfloat16,
    from the L2 cache. A text of 512 tokens with 16 heads reads 1.6 GB there.
    """
    tokens, num_heads, width = out.shape
    assert out.is_contiguous(), "out must be contiguous"
    assert rows.shape[0] == 2 * width - 1, "rows: one for each distance"
    assert query.stride() == key.stride(), "queries and keys are rows of one tensor"
    assert query.stride(1) == 1, "rows must be contiguous"
    given = [each for each in (to_keys, to_queries) if each is not None]
    assert len({each.stride() for each in given}) == 1, "projections are rows of one tensor"
    assert given[0].stride(1) == 1, "rows must be contiguous"
    if tokens == 0:
        return
    dim = query.shape[1] // num_heads
    _relate[(tokens, num_heads)](
        out,
        query,
        key,
        to_keys,
        to_queries,
        rows,
        positions,
        ends,
        query.stride(0),
        given[0].stride(0),
        width,
        scale,
        DIM=dim,
        DIM_PADDED=max(next_power_of_two(dim), 16),
        BLOCK=BLOCK_KEYS,
        num_warps=4,
    )
