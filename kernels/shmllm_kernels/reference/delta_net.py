"""Gated delta nets (Yang, Kautz and Hatamizadeh, 2024) behind their convolution, one token after
the other, for the tokens of one request."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPS = 1e-6


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rates: Tensor,
    decays: Tensor,
    logs: Tensor,
    biases: Tensor,
    state: Tensor,
    is_tiled: bool = False,
    most: float = 1.0,
    least: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the outputs, [tokens, value_heads, value_dim] of value's dtype, and the state behind
    them.

    Args:
        query, key: [tokens, key_heads, key_dim].
        value: [tokens, value_heads, value_dim].
        rates: [tokens, value_heads], before the sigmoid.
        decays: [tokens, value_heads], or, with one for each channel of the key, [tokens,
            value_heads, key_dim], before the exponential.
        logs: [value_heads].
        biases: as decays of a token.
        state: [value_heads, key_dim, value_dim] float32.
        is_tiled: whether value head i has the key head i modulo key_heads; else value heads that
            follow each other share one.
        most: the factor of the rates' sigmoids; above 1, what a token changes may more than replace
            what the state had for its key.
        least: the bound of the logarithms of decays by channel, ``least * sigmoid(exp(log) * (decay
            + bias))``; None: they are ``-exp(log) * softplus(decay + bias)``.
    """
    key_heads, dim = key.shape[1:]
    heads = torch.arange(value.shape[1], device=key.device)
    own = heads % key_heads if is_tiled else heads // (value.shape[1] // key_heads)
    query, key = (_unit(each)[:, own] for each in (query, key))
    times = decays.float() + biases.float()
    times = times.reshape(*times.shape[:2], -1)  # one for each channel, or for all of them
    growth = logs.float().exp()[:, None]
    if least is None:
        factors = torch.exp(-growth * F.softplus(times))
    else:
        factors = torch.exp(least * torch.sigmoid(growth * times))
    strengths = most * rates.float().sigmoid()
    out = []
    for token in range(len(value)):
        state = state * factors[token, :, :, None]
        known = torch.einsum("hkv,hk->hv", state, key[token])
        change = (value[token].float() - known) * strengths[token, :, None]
        state = state + key[token, :, :, None] * change[:, None]
        out.append(torch.einsum("hkv,hk->hv", state, query[token] * dim**-0.5))
    return torch.stack(out).to(value.dtype), state


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, is_sigmoid: bool = False
) -> Tensor:
    """Returns ``rms_norm(x) * weight * silu(gate)``, all [rows, width] but the weight, [width]; or
    with the sigmoid of the gate."""
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    gates = gate.float().sigmoid() if is_sigmoid else F.silu(gate.float())
    return (x.float() * scale * weight.float() * gates).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    return x.float() * torch.rsqrt(x.float().pow(2).sum(-1, keepdim=True) + NORM_EPS)
