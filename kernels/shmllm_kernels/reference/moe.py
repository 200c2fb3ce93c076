"""Mixtures of experts: the choice of experts for each token, and the sum of what they return."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm_kernels.reference.activation import activate

GATE_LIMIT = 7.0
"""gpt-oss bounds gate from above, and up on both sides."""

_SLOPE = 1.702


def route(logits: Tensor, top_k: int, divides_by_all: bool) -> tuple[Tensor, Tensor]:
    """Chooses the experts with the largest logits; of equal ones the lower expert.

    ``weight = exp(logit) / sum(exp(logits))``. A sum over the chosen experts is both the softmax of
    their logits, and the softmax of all logits divided by the sum over the chosen ones. A NaN is
    chosen last, and makes all weights of its token NaN.

    Args:
        logits: [tokens, experts].
        top_k: the number of experts for each token.
        divides_by_all: whether the sum is over all experts.

    Returns:
        The experts [tokens, top_k] int64, in ascending order, and their weights [tokens, top_k] in
        the dtype of the logits.
    """
    ranks = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = ranks.sort(dim=-1, descending=True, stable=True).indices
    ids = order[:, :top_k].sort(-1).values
    shares = (logits - ranks.amax(-1, keepdim=True)).exp()
    chosen = shares.gather(-1, ids)
    total = (shares if divides_by_all else chosen).sum(-1, keepdim=True)
    weights = chosen / total
    return ids, weights.masked_fill(logits.isnan().any(-1, keepdim=True), torch.nan)


def gpt_oss_activation(gate_up: Tensor) -> Tensor:
    """Returns ``(up + 1) * gate * sigmoid(1.702 * gate)`` with bounded gate and up.

    Args:
        gate_up: [..., 2 * inner], whose columns are gate and up in turn.

    Returns:
        [..., inner].
    """
    gate = gate_up[..., ::2].clamp(max=GATE_LIMIT)
    up = gate_up[..., 1::2].clamp(-GATE_LIMIT, GATE_LIMIT)
    return (up + 1) * gate * torch.sigmoid(_SLOPE * gate)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """Returns the weighted sum of each token's experts, added in ascending order.

    Args:
        x: [tokens, hidden].
        ids: [tokens, top_k], in ascending order.
        weights: [tokens, top_k].
        gate_up: [experts, 2 * inner, hidden].
        down: [experts, hidden, inner].
        gate_up_bias: [experts, 2 * inner] or None.
        down_bias: [experts, hidden] or None.
        activation: "silu" or "gelu_tanh", with all columns of gate before those of up, or
            "gpt_oss".

    Returns:
        [tokens, hidden].
    """
    out = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        tokens, choices = torch.nonzero(ids == expert, as_tuple=True)
        inner = x[tokens] @ gate_up[expert].T
        if gate_up_bias is not None:
            inner = inner + gate_up_bias[expert]
        is_plain = activation != "gpt_oss"
        active = activate(inner, activation, True) if is_plain else gpt_oss_activation(inner)
        rows = active @ down[expert].T
        if down_bias is not None:
            rows = rows + down_bias[expert]
        out[tokens] += weights[tokens, choices, None] * rows
    return out
