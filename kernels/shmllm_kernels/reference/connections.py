"""Several residual streams that layers read the weighted sum of (hyper-connections; Zhu et al.,
2024), in torch, in the form that Tencent's HY V4 has, and in that of DeepSeek V4, which mixes
streams, too (manifold-constrained hyper-connections; Xie et al., 2026).

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
    eps_of_added: float | None = None,
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
        eps_of_added: added to the second kind instead; None: the same.
    """
    flat = streams.flatten(1)
    norm = flat.square().mean(-1, keepdim=True).add(norm_eps).rsqrt()
    of_kinds = (flat @ weight.t() * norm).unflatten(-1, (len(scale), -1)) * scale[:, None]
    opened = torch.sigmoid(of_kinds.flatten(1) + bias)
    opened[:, streams.shape[1] :] *= magnitude
    opened[:, : streams.shape[1]] += eps
    opened[:, streams.shape[1] :] += eps if eps_of_added is None else eps_of_added
    return opened


def mixture_of(
    streams: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> Tensor:
    """Returns a mixture of the streams of each row, [rows, streams, streams], whose rows and
    columns add up to about 1: a softmax of each row's logits, plus ``eps``, whose columns, and then
    again and again rows and columns, are divided by their sums (Sinkhorn and Knopp, 1967).

    Args:
        streams: [rows, streams, width].
        weight: [streams * streams, streams * width].
        scale: [1], the factor of the logits.
        bias: [streams * streams], added to them.
        norm_eps: added to the mean square of a row's streams.
        eps: added to the softmax, and to sums.
        iterations: how often columns are divided.
    """
    flat, count = streams.flatten(1), streams.shape[1]
    norm = flat.square().mean(-1, keepdim=True).add(norm_eps).rsqrt()
    logits = flat @ weight.t() * norm * scale + bias
    mixture: Tensor = logits.unflatten(-1, (count, count)).softmax(-1) + eps
    mixture = mixture / (mixture.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mixture = mixture / (mixture.sum(-1, keepdim=True) + eps)
        mixture = mixture / (mixture.sum(-2, keepdim=True) + eps)
    return mixture


def fold(streams: Tensor, gates: Tensor) -> Tensor:
    """Returns ``sum(gates[i] * streams[i])``, [rows, width]."""
    return torch.einsum("ri,riw->rw", gates[:, : streams.shape[1]], streams)


def spread(streams: Tensor, x: Tensor, gates: Tensor, mixture: Tensor | None = None) -> Tensor:
    """Returns ``streams[i] + gates[streams + i] * x``, where ``x`` is [rows, width]; with a mixture
    [rows, streams, streams] that of the streams takes their place."""
    if mixture is not None:
        streams = torch.einsum("rji,rjw->riw", mixture, streams)
    return streams + gates[:, streams.shape[1] : 2 * streams.shape[1], None] * x[:, None]
