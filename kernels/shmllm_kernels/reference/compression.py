"""Entries that stand for several tokens (DeepSeek-AI, "DeepSeek-V4", 2026, section 2.3), and what a
token attends to, of one request, computed one window after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm_kernels.reference.last_rotated import rotate_last


def make_entries(
    values: Tensor,
    gates: Tensor,
    bias: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Makes an entry of each complete window: the sum of the values of its tokens, each element
    weighted by a softmax of the gates over the tokens, then normalised (RMSNorm) and rotated.

    Args:
        values: [tokens, dim], those of all tokens of a request, or [tokens, 2 * dim]: the first
            half of these belongs to the window behind that of the token, the second one to its own.
        gates: likewise.
        bias: [rate, dim or 2 * dim], added to gates by the place in a window of `rate` tokens.
        weight: [dim], of the norm.
        eps: its eps.
        cos, sin: [windows, rope_dim], by which the last elements of entries are rotated, in pairs
            of neighbours.

    Returns:
        [windows, dim].
    """
    rate, dim, count = len(bias), len(weight), len(values) // len(bias)
    entries = []
    for window in range(count):
        own = slice(window * rate, (window + 1) * rate)
        parts = [(values[own, -dim:], gates[own, -dim:] + bias[:, -dim:])]
        if bias.shape[1] > dim and window:
            before = slice((window - 1) * rate, window * rate)
            parts.append((values[before, :dim], gates[before, :dim] + bias[:, :dim]))
        of_window, of_gates = (torch.cat(part) for part in zip(*parts, strict=True))
        entries.append((of_window * of_gates.softmax(0)).sum(0))
    made = torch.stack(entries) if entries else values.new_zeros(0, dim)
    made = made * made.square().mean(-1, keepdim=True).add(eps).rsqrt() * weight
    return rotate_last(made[:, None], cos, sin)[:, 0]


def list_keys(
    position: int, window: int, rate: int, scores: Tensor | None = None, top_k: int = 0
) -> tuple[list[int], list[int]]:
    """Returns the positions whose keys a token attends to, and the entries.

    Args:
        position: that of the token.
        window: how many positions it attends to at most, its own included.
        rate: the number of tokens of an entry; 0: there are none.
        scores: [entries], by which they are chosen, of equal ones the first; None: all are.
        top_k: how many are chosen at most.
    """
    positions = [*range(max(position + 1 - window, 0), position + 1)]
    entries = [*range((position + 1) // rate)] if rate else []
    if scores is not None:
        best = scores[: len(entries)].argsort(descending=True, stable=True)[:top_k]
        entries = sorted(best.tolist())
    return positions, entries
