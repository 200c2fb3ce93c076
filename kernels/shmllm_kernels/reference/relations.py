"""What disentangled attention adds to scores (He et al., "DeBERTa", 2021, section 3.1)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def relate(
    query: Tensor,
    key: Tensor,
    to_keys: Tensor | None,
    to_queries: Tensor | None,
    rows: Tensor,
    starts: Tensor,
    scale: float,
) -> list[Tensor]:
    """Returns ``scale * (query . to_keys[row] + key . to_queries[row])`` for all pairs of tokens of
    each text, [tokens, num_heads, tokens] float64, with the row of their distance.

    Args:
        query, key: [tokens, num_heads, dim].
        to_keys, to_queries: [rows, num_heads, dim], projections of embeddings of distances, or
            None: that product is left out.
        rows: [2 * n - 1], the row of each distance of a query from a key, from 1 - n on.
        starts: [texts + 1], the index of each text's first token.
        scale: the factor.
    """
    found = []
    for begin, end in pairwise(starts.tolist()):
        places = torch.arange(end - begin, device=query.device)
        row = rows[len(rows) // 2 + places[:, None] - places].long()
        total = query.new_zeros((end - begin, query.shape[1], end - begin), dtype=torch.float64)
        if to_keys is not None:
            product = torch.einsum(
                "qhd,qkhd->qhk", query[begin:end].double(), to_keys[row].double()
            )
            total += product
        if to_queries is not None:
            product = torch.einsum(
                "khd,qkhd->qhk", key[begin:end].double(), to_queries[row].double()
            )
            total += product
        found.append(scale * total)
    return found
