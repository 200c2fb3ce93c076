"""A residual stream that consists of several (AltUp; Baykal et al., 2023), in torch.

The streams are [streams, rows, width]. Each row has its own mixture of them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def predict(streams: Tensor, routed: Tensor, weight: Tensor, factor: float) -> Tensor:
    """Returns ``streams[i] + sum(c[i, j] * streams[j])`` for each stream i, with the coefficients
    ``c = weight @ tanh(factor * routed)`` of each row.

    Args:
        streams: [streams, rows, width].
        routed: [rows, streams].
        weight: [streams * streams, streams].
        factor: the factor of `routed`.
    """
    mixed = torch.tanh(factor * routed) @ weight.t()
    of_rows = mixed.unflatten(-1, (len(streams), len(streams)))
    return streams + torch.einsum("rij,jrw->irw", of_rows, streams)


def correct(
    streams: Tensor, x: Tensor, routed: Tensor, weight: Tensor, factor: float, active: int
) -> Tensor:
    """Returns ``streams[i] + c[i] * (x - streams[active])`` for each stream i, with the
    coefficients ``c = weight @ tanh(factor * routed) + 1`` of each row.

    Args:
        streams: [streams, rows, width], predictions.
        x: [rows, width], what the predicted stream `active` has become.
        routed: [rows, streams].
        weight: [streams, streams].
        factor: the factor of `routed`.
        active: a stream.
    """
    mixed = torch.tanh(factor * routed) @ weight.t() + 1
    return streams + mixed.t()[..., None] * (x - streams[active])


def match_magnitude(x: Tensor, like: Tensor) -> Tensor:
    """Returns ``x * rms(like) / rms(x)``, with roots of the mean squares of rows, of which that of
    x is at least 1e-5. Both are [rows, width]."""
    own, wanted = (each.square().mean(-1, keepdim=True) for each in (x, like))
    return x * (wanted.sqrt() / own.clamp(min=1e-5).sqrt())
