"""What a layer is that lies beside the residual stream. This module must not import torch: front
ends import it too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BranchSpec:
    """A layer beside the residual stream, whose weights others share (Glorioso et al., "Zamba2",
    2024, section 2). Its attention reads a norm of the stream and the tokens' embeddings side by
    side, its MLP a norm of what attention returns, without additions; only the norm of the layer
    behind it reads a projection of the result, added to the stream.

    Attributes:
        source: the layer whose weights it has, itself or an earlier one. Adapters and the last
            projection are its own.
        adapter_rank: the rank of the adapters of gates and ups.
        adapts_attention: whether queries, keys and values have adapters, too.
    """

    source: int
    adapter_rank: int
    adapts_attention: bool
