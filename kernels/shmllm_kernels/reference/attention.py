"""Causal attention over keys and values that lie in blocks, one request after the other."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attends from each request's last tokens to all of its tokens up to each.

    A token at position p sees the keys of positions max(0, p - window + 1) to p. Scores are
    ``scale * query . key``, with a soft cap ``soft_cap * tanh(score / soft_cap)``. What lies
    in slots of no token is not read.

    Args:
        query: [tokens, num_heads, dim]; head h reads kv head h // (num_heads / num_kv_heads).
        key_cache: [blocks, block_size, num_kv_heads, dim], like ``value_cache``.
        value_cache: the values.
        block_table: [requests, max_blocks], the blocks of each request in order.
        query_starts: [requests + 1], where each request's tokens begin in ``query``.
        context_lens: [requests], tokens of each request, those of ``query`` included.
        scale: of the scores.
        window: positions that a token sees, itself included; None: all before it.
        soft_cap: bound of the scores; None: none.

    Returns:
        [tokens, num_heads, dim] in query's dtype, computed in float64; zero where no request is.
    """
    out = torch.zeros_like(query)
    heads_per_kv = query.shape[1] // key_cache.shape[2]
    starts, contexts = query_starts.tolist(), context_lens.tolist()
    for request, (begin, end) in enumerate(pairwise(starts)):
        if begin == end:
            continue
        context = contexts[request]
        blocks = block_table[request, : -(-context // key_cache.shape[1])].long()
        key, value = (
            cache[blocks].flatten(0, 1)[:context].double() for cache in (key_cache, value_cache)
        )
        key, value = (part.repeat_interleave(heads_per_kv, dim=1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].double(), key) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        hidden = _hidden(end - begin, context, window).to(scores.device)
        scores = scores.masked_fill(hidden, -torch.inf)
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(query.dtype)
    return out


def _hidden(query_len: int, context: int, window: int | None) -> Tensor:
    """[query_len, context], where a token must not look."""
    tokens = torch.arange(context - query_len, context)[:, None]
    keys = torch.arange(context)[None, :]
    hidden = keys > tokens
    return hidden if window is None else hidden | (keys <= tokens - window)
