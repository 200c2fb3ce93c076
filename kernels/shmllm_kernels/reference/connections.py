"""Several residual streams that layers read the weighted sum of (hyper-connections; Zhu et al.,
2024), in torch, in the form that Tencent's HY V4 has.

The streams are [rows, streams, width]. Each row has its own gates.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gates_of(
    streams: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_eps: float,
    magnitude: float,
    eps: float,
) -> Tensor:
    """Returns the gates ``sigmoid(scale * logits / rms + bias) + eps``, [rows, gates], where the
    factor ``magnitude`` precedes the sigmoids of those behind the first, one for each stream.

    Args:
        streams: [rows, streams, width].
        weight: [gates, streams * width]; there is a gate for each stream, or two.
        scale: [1 or 2], the factor of each kind of gates.
        bias: [gates].
        norm_eps: added to the mean square of a row's streams.
        magnitude: the factor of the second kind.
        eps: added to all gates.
    """
    flat = streams.flatten(1)
    norm = flat.square().mean(-1, keepdim=True).add(norm_eps).rsqrt()
    of_kinds = (flat @ weight.t() * norm).unflatten(-1, (len(scale), -1)) * scale[:, None]
    opened = torch.sigmoid(of_kinds.flatten(1) + bias)
    opened[:, streams.shape[1] :] *= magnitude
    return opened + eps


def fold(streams: Tensor, gates: Tensor) -> Tensor:
    """Returns ``sum(gates[i] * streams[i])``, [rows, width]."""
    return torch.einsum("ri,riw->rw", gates[:, : streams.shape[1]], streams)


def spread(streams: Tensor, x: Tensor, gates: Tensor) -> Tensor:
    """Returns ``streams[i] + gates[streams + i] * x``, where ``x`` is [rows, width]."""
    return streams + gates[:, streams.shape[1] :, None] * x[:, None]
