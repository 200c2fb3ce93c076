"""What chooses the tokens that a latent attention reads.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """What chooses the tokens that each token attends to (DeepSeek-AI, "DeepSeek-V3.2", 2025,
    section 2.1): those with the largest ``sum over heads of weight * max(query . key, 0)``, where
    all heads share a token's key.

    Attributes:
        num_heads: the number of heads.
        head_dim: the width of a head's query, and of a key. Its first elements rotate, as many as
            those of the attention, by the same angles.
        top_k: how many tokens it chooses at most.
        interleaved: whether neighbouring elements rotate together; see `RopeConfig`.
        is_shared: whether it is that of a layer before this one, whose choice is read again. The
            cache has room for its keys in this layer, too: slots are the same in layers of one
            group, whose rows have one size.
        rotates_last: how many elements rotate that are the last ones of a query and a key in
            checkpoints; 0: those that rotate are the first ones there, too.
        norm_eps: the eps of the norm of keys.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool
    is_shared: bool = False
    rotates_last: int = 0
    norm_eps: float = 1e-6
