"""Attention over a paged cache, computed one request after the other."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from shmllm_kernels.windows import Chunk, Window


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    window: Window | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    ends: Tensor | None = None,
    biases: Tensor | None = None,
) -> Tensor:
    """Computes the attention of each request's last tokens over its tokens so far.

    A token at position p attends to the keys of positions max(0, p - window + 1) to p, or to its
    end; with chunks, from the multiple of their size at or before p on. Scores are ``scale * query
    . key``. Cache slots without a token are not read.

    Args:
        query: [tokens, num_heads, dim]; head h reads kv head h // (num_heads / num_kv_heads).
        key_cache: [blocks, block_size, num_kv_heads, dim], in any dtype.
        value_cache: [blocks, block_size, num_kv_heads, value_dim], in any dtype.
        block_table: [requests, max_blocks], the blocks of each request in order.
        query_starts: [requests + 1], the index of each request's first token in ``query``.
        context_lens: [requests], the number of each request's tokens so far, those of ``query``
            included.
        scale: the factor of the scores.
        window: the number of positions up to its own that a token attends to, or the chunk that
            they are in; None: all of them.
        soft_cap: scaled scores become ``soft_cap * tanh(score / soft_cap)``; None: they stay.
        sinks: [num_heads], scores without a value, which join the softmax's denominator; None:
            there are none.
        ends: [tokens], the end of the keys that each token attends to: behind its own position, and
            at most its request's context length; None: the attention is causal.
        biases: [num_heads, 2 * n - 1], which are added to scores, with n above every position: that
            of a key d positions behind its token, or ahead of it if d is negative, is at n - 1 + d;
            or [tokens, num_heads, n], by the position of the key; None: there are none.

    Returns:
        [tokens, num_heads, value_dim] in query's dtype, computed in float64; zero for tokens of no
        request.
    """
    out = query.new_zeros(*query.shape[:2], value_cache.shape[3])
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
        if biases is not None:
            own = biases[begin:end] if biases.dim() == 3 else biases
            scores += _biases(own, end - begin, context)
        key_ends = None if ends is None else ends[begin:end]
        hidden = _hidden(end - begin, context, window, key_ends).to(scores.device)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            extra = sinks.double()[:, None, None].expand(-1, end - begin, 1)
            scores = torch.cat((scores, extra), -1)
        weights = scores.softmax(-1)[..., :context]
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
    return out


def _biases(biases: Tensor, query_len: int, context: int) -> Tensor:
    """Returns those of each head, token and key, [num_heads, query_len, context]."""
    if biases.dim() == 3:
        return biases.double()[..., :context].transpose(0, 1)
    tokens = torch.arange(context - query_len, context)[:, None]
    distances = torch.arange(context)[None, :] - tokens
    return biases.double()[:, biases.shape[1] // 2 + distances.to(biases.device)]


def _hidden(query_len: int, context: int, window: Window | None, ends: Tensor | None) -> Tensor:
    """Returns [query_len, context] bool: the keys that each token must not attend to."""
    tokens = torch.arange(context - query_len, context)[:, None]
    keys = torch.arange(context)[None, :]
    hidden = keys > tokens if ends is None else keys >= ends.cpu()[:, None]
    if window is None:
        return hidden
    if isinstance(window, Chunk):
        return hidden | (keys < tokens // window.size * window.size)
    return hidden | (keys <= tokens - window)
