"""The activations of MLPs and heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

_SLOPE = 1.702  # of x in the sigmoid of "quick_gelu" and "silu_shifted"


def _sloped_silu(x: Tensor) -> Tensor:
    """Returns ``x * sigmoid(1.702 * x)``; 16-bit numbers as float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.sigmoid(_SLOPE * x)


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: _sloped_silu(x).to(x.dtype),
    "relu_squared": lambda x: F.relu(x).square(),
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def activate(x: Tensor, name: str, is_gated: bool) -> Tensor:
    """Returns ``f(gate) * up``, or ``f(x)``.

    Args:
        x: [..., 2 * dim] if it is gated, the gate in the first half and up in the second; or [...,
            dim].
        name: "silu", "gelu" (with the error function), "gelu_tanh", "quick_gelu", "relu_squared",
            "relu", "tanh" or "sigmoid".
        is_gated: whether it is gated.

    Returns:
        [..., dim], in x's dtype.
    """
    function = _FUNCTIONS[name]
    if not is_gated:
        return function(x)
    gate, up = x.chunk(2, -1)
    return function(gate) * up


def activate_bounded(x: Tensor, name: str, bound: float) -> Tensor:
    """Returns ``min(f(gate), bound) * min(max(up, -bound), bound)``, or with "silu_shifted"
    ``g * sigmoid(1.702 * g) * (min(max(up, -bound), bound) + 1)`` with ``g = min(gate, bound)``,
    with "silu_clamped" ``silu(g) * min(max(up, -bound), bound)``.

    Args:
        x: [..., 2 * dim], gates and ups side by side.
        name: see `activate`; or "silu_shifted" or "silu_clamped".
        bound: the bound, above 0.

    Returns:
        [..., dim], in x's dtype.
    """
    gate, up = x.chunk(2, -1)
    up = up.clamp(-bound, bound)
    if name == "silu_shifted":
        opened = _sloped_silu(gate.clamp(max=bound))
        return ((up.to(opened.dtype) + 1) * opened).to(x.dtype)
    if name == "silu_clamped":
        return F.silu(gate.clamp(max=bound)) * up
    return _FUNCTIONS[name](gate).clamp(max=bound) * up


def activate_sparse(x: Tensor, name: str, deviations: float) -> Tensor:
    """Returns ``f(max(gate - cut, 0)) * up``, where a row's cut lies so many standard deviations of
    its gates above their mean.

    Args:
        x: [..., 2 * dim], gates and ups side by side.
        name: see `activate`.
        deviations: how many.

    Returns:
        [..., dim], in x's dtype.
    """
    gate, up = x.chunk(2, -1)
    centred = gate - gate.mean(-1, keepdim=True)
    deviation = centred.square().mean(-1, keepdim=True).sqrt()
    return _FUNCTIONS[name](F.relu(centred - deviations * deviation)) * up


def xielu(x: Tensor, numbers: Tensor) -> Tensor:
    """Returns xIELU (Huang and Schlag, 2024).

    Args:
        x: any shape.
        numbers: [4]: softplus of the first is the factor of squares above 0; softplus of the second
            plus the third is that of ``exp(x) - 1 - x`` below 0; the third is the factor of x; x
            counts as the fourth, which is below 0, where it is larger, in the exponent alone.

    Returns:
        As x.
    """
    p, n, linear, bound = numbers.to(x.dtype) if x.dtype == torch.float64 else numbers.float()
    y = x if x.dtype == torch.float64 else x.float()
    negative = (torch.expm1(torch.minimum(y, bound)) - y) * (F.softplus(n) + linear)
    positive = F.softplus(p) * y * y
    result: Tensor = torch.where(y > 0, positive, negative) + linear * y
    return result.to(x.dtype)
