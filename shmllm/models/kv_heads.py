"""What the KV cache holds of tokens. This module must not import torch: front ends import it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVHeads:
    """What the KV cache holds of a token in one layer.

    Attributes:
        count: the number of key heads, and of value heads.
        key_dim: the width of a key.
        value_dim: the width of a value; 0: a value is the first elements of its key.
        index_dim: the width of the key of an indexer, see `IndexerSpec`, or of what a token
            contributes to entries, see `CompressionSpec`; 0: there is none.
        rate: the number of tokens that it stands for.
    """

    count: int
    key_dim: int
    value_dim: int
    index_dim: int = 0
    rate: int = 1
