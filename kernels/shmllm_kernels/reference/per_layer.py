"""The inputs that each layer has of its own (Gemma 3n and 4), in torch."""

from __future__ import annotations

import math

from torch import Tensor

from shmllm_kernels.reference.activation import activate
from shmllm_kernels.reference.norm import rms_norm


def embed_per_layer(
    projected: Tensor,
    table: Tensor,
    token_ids: Tensor,
    weight: Tensor,
    eps: float,
    scale: float,
    table_scale: float,
    padding: int,
) -> Tensor:
    """Returns ``(rms_norm(scale * projected) + table_scale * table[token_ids]) / sqrt(2)``.

    Args:
        projected: [tokens, layers * width], the projections of the tokens' embeddings.
        table: [vocabulary, layers * width].
        token_ids: [tokens]; `padding` replaces those that the table lacks.
        weight: [width], the weight of the norm of each layer's part.
        eps: the eps of that norm.
        scale: the factor of the projections.
        table_scale: the factor of the table's entries.
        padding: a token.

    Returns:
        [tokens, layers * width].
    """
    of_layers = (projected * scale).unflatten(-1, (-1, len(weight)))
    normed = rms_norm(of_layers, weight, eps).flatten(-2)
    has_row = (token_ids >= 0) & (token_ids < len(table))
    found = table[token_ids.where(has_row, padding)] * table_scale
    return (normed + found) * math.sqrt(0.5)


def gate_layer_input(x: Tensor, inputs: Tensor, name: str) -> Tensor:
    """Returns ``f(x) * inputs`` of the same shape; `name` is that of an activation."""
    return activate(x, name, is_gated=False) * inputs
