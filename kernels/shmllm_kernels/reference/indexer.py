"""An indexer (DeepSeek-AI, "DeepSeek-V3.2", 2025, section 2.1), without the positive factors of its
scores, computed one token after the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from shmllm_kernels.reference.rope import rotate


def store_index_keys(
    cache: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    interleaved: bool,
) -> None:
    """Normalises keys, rotates their first elements, and writes them to the cache.

    Args:
        cache: [blocks, block_size, dim].
        x: [tokens, dim].
        weight, bias: [dim], those of a LayerNorm.
        eps: its eps.
        cos, sin: [tokens, rope_dim].
        slots: [tokens] int64; a token whose slot is -1 is not written.
        interleaved: see `rope.rotate`.
    """
    normed = layer_norm(x.float(), x.shape[1:], weight.float(), bias.float(), eps).to(x.dtype)
    keys = rotate(normed[:, None], cos[:, None], sin[:, None], interleaved)[:, 0].to(cache.dtype)
    for key, slot in zip(keys, slots.tolist(), strict=True):
        if slot >= 0:
            cache[slot // cache.shape[1], slot % cache.shape[1]] = key


def choose_tokens(
    query: Tensor,
    weights: Tensor,
    cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    top_k: int,
    interleaved: bool,
) -> list[Tensor]:
    """Chooses the tokens that each token attends to: its own and those before it, or of these the
    ones with the largest ``sum over heads of weight * max(query . key, 0)``, of equal ones the
    first.

    Args:
        query: [tokens, num_heads, dim], not rotated.
        weights: [tokens, num_heads].
        cache: [blocks, block_size, dim], rotated keys.
        cos, sin: [tokens, rope_dim].
        block_table, query_starts, context_lens: see `attention.paged_attention`.
        top_k: how many at most.
        interleaved: see `rope.rotate`.

    Returns:
        For each token of a request the slots, block * block_size + offset, in the order of
        positions.
    """
    block_size, chosen = cache.shape[1], []
    rotated = rotate(query, cos[:, None], sin[:, None], interleaved).double()
    for request, context in enumerate(context_lens.tolist()):
        begin, end = query_starts[request : request + 2].tolist()
        positions = torch.arange(context)
        blocks = block_table[request].cpu().long()[positions // block_size]
        slots = blocks * block_size + positions % block_size
        keys = cache.cpu().double()[blocks, positions % block_size]
        for token in range(begin, end):
            count = context - (end - begin) + token - begin + 1
            products = (rotated[token].cpu() @ keys[:count].T).clamp(min=0)
            scores = weights[token].cpu().double() @ products
            best = scores.argsort(descending=True, stable=True)[:top_k]
            chosen.append(slots[best.sort().values])
    return chosen


def choose_blocks(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    size: int,
    top_k: int,
    num_local: int,
) -> list[Tensor]:
    """Chooses the blocks of keys that each token attends to, for each head: all up to its own, or
    the ``num_local`` last of these and those with the largest ``query . key`` of a key up to its
    own, of equal ones the first (`MiniMaxM3VLIndexer` of transformers).

    Args:
        query: [tokens, num_heads, dim], normalised and rotated.
        cache: [blocks, block_size, dim], keys, likewise.
        block_table, query_starts, context_lens: see `attention.paged_attention`.
        size: the number of keys of a block, a multiple of ``block_size``.
        top_k: how many blocks at most.
        num_local: from 1 to ``top_k``.

    Returns:
        For each token of a request [num_heads, entries], the entries of the block table that the
        chosen blocks have, in their order, up to that of the token.
    """
    block_size, chosen = cache.shape[1], []
    for request, context in enumerate(context_lens.tolist()):
        begin, end = query_starts[request : request + 2].tolist()
        positions = torch.arange(context)
        table = block_table[request].cpu().long()
        keys = cache.cpu().double()[table[positions // block_size], positions % block_size]
        for token in range(begin, end):
            count = context - (end - begin) + token - begin + 1
            entries = torch.arange((count - 1) // block_size + 1)
            rows = []
            for products in query[token].cpu().double() @ keys[:count].T:
                scores = torch.stack([part.max() for part in products.split(size)])
                scores[max(len(scores) - num_local, 0) :] = torch.inf
                best = scores.argsort(descending=True, stable=True)[:top_k]
                rows.append(table[entries[torch.isin(entries * block_size // size, best)]])
            chosen.append(torch.stack(rows))
    return chosen
