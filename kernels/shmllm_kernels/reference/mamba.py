"""Mamba (Gu and Dao, 2023) and Mamba 2 (Dao and Gu, 2024) behind their convolution, one token after
the other, for the tokens of one request."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def time_steps(
    steps: Tensor, biases: Tensor, limits: tuple[float, float] = (0.0, float("inf"))
) -> Tensor:
    """Returns ``softplus(step + bias)`` between the limits, in float32, for steps [tokens, n]."""
    return F.softplus(steps.float() + biases.float()).clamp(*limits)


def scan(
    x: Tensor, keys: Tensor, queries: Tensor, steps: Tensor, logs: Tensor, skips: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the outputs of Mamba 2, [tokens, heads, head_dim] of x's dtype, and the state behind
    them.

    Args:
        x: [tokens, heads, head_dim].
        keys, queries: B and C, [tokens, groups, state_size].
        steps: [tokens, heads] float32, the result of `time_steps`.
        logs, skips: [heads], the logarithms of -A, and D.
        state: [heads, state_size, head_dim] float32.
    """
    repeats = x.shape[1] // keys.shape[1]
    keys, queries = (each.float().repeat_interleave(repeats, 1) for each in (keys, queries))
    factors = torch.exp(-logs.float().exp() * steps)
    out = []
    for token in range(len(x)):
        given = x[token].float() * steps[token, :, None]
        state = state * factors[token, :, None, None] + keys[token, :, :, None] * given[:, None]
        out.append(torch.einsum("hnp,hn->hp", state, queries[token]))
    total = torch.stack(out) + x.float() * skips.float()[:, None]
    return total.to(x.dtype), state


def selective_scan(
    x: Tensor, keys: Tensor, queries: Tensor, steps: Tensor, logs: Tensor, skips: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the outputs of Mamba, [tokens, channels] of x's dtype, and the state behind them.

    Args:
        x: [tokens, channels].
        keys, queries: B and C, [tokens, state_size].
        steps: [tokens, channels] float32, the result of `time_steps`.
        logs: [state_size, channels], the logarithms of -A.
        skips: [channels], D.
        state: [state_size, channels] float32.
    """
    rates, out = -logs.float().exp(), []
    for token in range(len(x)):
        given = x[token].float() * steps[token]
        state = state * torch.exp(rates * steps[token]) + keys[token].float()[:, None] * given
        out.append((state * queries[token].float()[:, None]).sum(0))
    return (torch.stack(out) + x.float() * skips.float()).to(x.dtype), state


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    groups: int,
    eps: float,
    gates_first: bool = True,
) -> Tensor:
    """Returns ``rms_norm(x * silu(gate)) * weight`` for rows [rows, width], with a norm over each
    group of columns; or ``rms_norm(x) * weight * silu(gate)``; without a weight, no norm."""
    gates, values = F.silu(gate.float()), x.float()
    if gates_first:
        values = values * gates
    if weight is not None:
        parts = values.unflatten(-1, (groups, -1))
        scale = torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + eps)
        values = (parts * scale).flatten(-2) * weight.float()
    return (values if gates_first else values * gates).to(x.dtype)
