"""Causal attention over paged latents, computed one request after the other.

DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1, in its absorbed form: the projection of latents to
keys is applied to the queries, and that to values to the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm_kernels.reference.attention import paged_attention


def paged_latent_attention(
    query: Tensor,
    rope_query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes the attention of each request's last tokens over its tokens so far.

    All heads share one key head: a token's latent and its rotated key part side by side. The values
    are the latents.

    Args:
        query: [tokens, num_heads, rank], projected to the width of a latent.
        rope_query: [tokens, num_heads, rope_dim], rotated.
        cache: [blocks, block_size, rank + rope_dim], in any dtype.
        block_table, query_starts, context_lens, scale, sinks: see `paged_attention`.

    Returns:
        [tokens, num_heads, rank] in query's dtype, computed in float64; zero for tokens of no
        request.
    """
    rank = query.shape[-1]
    queries = torch.cat([query, rope_query], -1)
    keys = cache[:, :, None].double()
    values = torch.nn.functional.pad(keys[..., :rank], (0, rope_query.shape[-1]))
    out = paged_attention(
        queries, keys, values, block_table, query_starts, context_lens, scale, sinks=sinks
    )
    return out[..., :rank]
