"""Mixtures of experts: the choice of experts for each token, and the sum of what they return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm_kernels.reference.activation import activate, activate_bounded

GATE_LIMIT = 7.0
"""gpt-oss bounds gate from above, and up on both sides."""

SMALLEST_SHARE = 1e-12
"""ERNIE 4.5 divides the scores of a softmax by no smaller sum of chosen ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a token's experts are chosen and weighted.

    Attributes:
        divides_by_all: whether the weights of all experts, and not those of the chosen ones, add up
            to 1. With sigmoids: whether the weights are not divided.
        is_sigmoid: whether ``score = sigmoid(logit)``, and not ``exp(logit) / sum(exp(logits))``.
        is_sqrt_softplus: with sigmoids: whether the root of softplus takes the place of each.
        ranks_logits: with sigmoids: whether logits, and not scores, rank the experts, also where
            there are groups or a bias, which is added to them.
        total_eps: with sigmoids: added to the sum by which the weights are divided.
        num_groups: the number of groups of consecutive experts.
        top_groups: the number of groups that the experts are chosen from.
        num_best: how many of a group's largest scores make the group's score, 1 or 2.
        scale: the factor of the weights.
        mixer_limit: if not 0, the weight of each chosen expert is that of a softmax by itself, over
            the experts that are not chosen before it and whose logits are near to its own, as
            SparseMixer has it (Liu et al., 2024): ``(own - logit) / max(abs(logit), own)`` is at
            most this number. There are neither sigmoids nor groups nor a bias then.
    """

    divides_by_all: bool
    is_sigmoid: bool = False
    is_sqrt_softplus: bool = False
    ranks_logits: bool = False
    total_eps: float = 1e-20
    num_groups: int = 1
    top_groups: int = 1
    num_best: int = 1
    scale: float = 1.0
    mixer_limit: float = 0.0


def route(
    logits: Tensor, top_k: int, choice: Choice, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Chooses the experts with the largest scores; of equal ones the lower expert.

    A softmax divided by its sum over the chosen experts is also the softmax of their logits. A NaN
    is chosen last, and makes all weights of its token NaN.

    Args:
        logits: [tokens, experts].
        top_k: the number of experts for each token.
        choice: how they are chosen.
        bias: [experts], added to what ranks experts for the choice alone; None: there is none. With
            a softmax, scores that are NaN do not count in the sum of all then.

    Returns:
        The experts [tokens, top_k] int64, in ascending order, and their weights [tokens, top_k] in
        the dtype of the logits.
    """
    if choice.is_sigmoid:  # logits differ where their sigmoids are both 1
        shares = _independent_scores(logits, choice)
        is_plain = choice.ranks_logits or (bias is None and choice.num_groups == 1)
        ranks = logits if is_plain else shares
    else:
        shares = (logits - _ordered(logits).amax(-1, keepdim=True)).exp()
        ranks = logits if bias is None else shares / shares.nansum(-1, keepdim=True)
    ranks = _ordered(ranks if bias is None else ranks + bias)
    if choice.num_groups > 1:
        groups = ranks.unflatten(-1, (choice.num_groups, -1))
        scores = groups.sort(-1, descending=True).values[..., : choice.num_best].sum(-1)
        left_out = _order(_ordered(scores))[:, choice.top_groups :, None].expand(
            -1, -1, groups.shape[2]
        )
        ranks = groups.scatter(1, left_out, -torch.inf).flatten(1)
    ids = _order(ranks)[:, :top_k].sort(-1).values
    has_nan = logits.isnan().any(-1, keepdim=True)
    if choice.mixer_limit:
        weights = _mixed(logits, ids, choice.mixer_limit) * choice.scale
        return ids, weights.masked_fill(has_nan, torch.nan)
    chosen, every = shares.gather(-1, ids), shares.sum(-1, keepdim=True)
    total = every if choice.divides_by_all else chosen.sum(-1, keepdim=True)
    if choice.is_sigmoid:
        total = torch.ones_like(total) if choice.divides_by_all else total + choice.total_eps
    else:
        total = total.maximum(SMALLEST_SHARE * every)
    weights = chosen / total * choice.scale
    return ids, weights.masked_fill(has_nan, torch.nan)


def route_by_token(
    logits: Tensor, token_ids: Tensor, table: Tensor, choice: Choice
) -> tuple[Tensor, Tensor]:
    """Returns the experts that the ids of tokens choose (hash layers; Roller et al., 2021), and
    their weights, as `route` does: scores over their sum.

    Args:
        logits: [tokens, experts].
        token_ids: [tokens]; negative ones count as 0.
        table: [ids, top_k], the experts of each id, in any order. Numbers of no expert, which only
            a damaged file has, count as the nearest one, and NaN as 0.
        choice: with sigmoids.
    """
    own = table[token_ids.clamp(min=0)].nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    ids = own.clamp(0, logits.shape[1] - 1).long().sort(-1).values
    chosen = _independent_scores(logits.gather(-1, ids), choice)
    return ids, chosen / (chosen.sum(-1, keepdim=True) + choice.total_eps) * choice.scale


def _independent_scores(logits: Tensor, choice: Choice) -> Tensor:
    return F.softplus(logits).sqrt() if choice.is_sqrt_softplus else logits.sigmoid()


def _mixed(logits: Tensor, ids: Tensor, limit: float) -> Tensor:
    """Returns the weights of the chosen experts [tokens, top_k] as SparseMixer has them."""
    places = _order(_ordered(logits)).argsort(-1)
    own, every = logits.gather(-1, ids)[..., None], logits[:, None]
    is_left = places[:, None] >= places.gather(-1, ids)[..., None]
    is_near = ~((own - every) / every.abs().maximum(own) > limit)
    return 1 / torch.where(is_left & is_near, (every - own).exp(), 0.0).sum(-1)


def _ordered(ranks: Tensor) -> Tensor:
    return ranks.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _order(ranks: Tensor) -> Tensor:
    return ranks.sort(dim=-1, descending=True, stable=True).indices


def take_identities(
    x: Tensor, ids: Tensor, weights: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the part of the choices that are no experts, but return what experts read.

    Args:
        x: [tokens, hidden], what experts read.
        ids: [tokens, top_k], in ascending order, or -1 in all of a row; those from ``num_experts``
            on are no experts.
        weights: [tokens, top_k].
        num_experts: the number of experts.

    Returns:
        The sum of their weights times ``x``, [tokens, hidden] in the dtype of ``x``; ids, where
        theirs are that of the token's last expert, or 0; weights, where theirs are 0.
    """
    is_expert = ids < num_experts
    last = ids.where(is_expert, 0).amax(-1, keepdim=True)
    total = weights.masked_fill(is_expert, 0).sum(-1, keepdim=True)
    out = (total * x.to(weights.dtype)).to(x.dtype)
    return out, ids.where(is_expert, last), weights.masked_fill(~is_expert, 0)


def leave_out(
    ids: Tensor, weights: Tensor, token_ids: Tensor, listed: Sequence[int], are_listed: bool
) -> tuple[Tensor, Tensor]:
    """Leaves the tokens of one of two kinds out of a mixture.

    Args:
        ids, weights: [tokens, top_k], the choices of experts.
        token_ids: [tokens]; a negative one counts as listed.
        listed: the ids that tell the kinds apart.
        are_listed: whether the tokens with these ids stay, or the others.

    Returns:
        ids, which are -1 for tokens that do not stay, and weights, which are 0 for these.
    """
    kind = torch.tensor([*listed], device=token_ids.device)
    is_listed = torch.isin(token_ids, kind) | (token_ids < 0)
    is_out = (is_listed != are_listed)[:, None]
    return ids.masked_fill(is_out, -1), weights.masked_fill(is_out, 0)


def gpt_oss_activation(gate_up: Tensor) -> Tensor:
    """Returns ``(up + 1) * gate * sigmoid(1.702 * gate)`` with bounded gate and up.

    Args:
        gate_up: [..., 2 * inner], whose columns are gate and up in turn.

    Returns:
        [..., inner].
    """
    gate_and_up = torch.cat([gate_up[..., ::2], gate_up[..., 1::2]], -1)
    return activate_bounded(gate_and_up, "silu_shifted", GATE_LIMIT)


def activated(
    x: Tensor, gate_up: Tensor, bias: Tensor | None, activation: str, bound: float = 0.0
) -> Tensor:
    """Returns what one expert's last product reads, [tokens, inner]; see `experts`."""
    inner = x @ gate_up.T
    if bias is not None:
        inner = inner + bias
    if activation == "gpt_oss":
        return gpt_oss_activation(inner)
    if activation == "silu_bounded":
        return activate_bounded(inner, "silu", bound)
    if activation in ("silu_clamped", "silu_shifted"):
        return activate_bounded(inner, activation, bound)
    return activate(inner, activation, is_gated=activation not in ("relu_squared", "gelu"))


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    weighs_inputs: bool = False,
    bound: float = 0.0,
) -> Tensor:
    """Returns the weighted sum of each token's experts, added in ascending order.

    Args:
        x: [tokens, hidden].
        ids: [tokens, top_k], in ascending order.
        weights: [tokens, top_k].
        gate_up: [experts, 2 * inner, hidden], or up alone, [experts, inner, hidden].
        down: [experts, hidden, inner].
        gate_up_bias: [experts, rows of gate_up] or None.
        down_bias: [experts, hidden] or None.
        activation: "silu" or "gelu_tanh", with all columns of gate before those of up, "gpt_oss",
            or "relu_squared" or "gelu" of up alone; or "silu_bounded", or
            "silu_clamped": ``silu(min(gate, bound)) * min(max(up, -bound), bound)``; or
            "silu_shifted", what "gpt_oss" is, with this order of columns and this bound.
        weighs_inputs: whether weights multiply what experts read, and not what they return.
        bound: of these three; see `activation.activate_bounded` for the first and the last.

    Returns:
        [tokens, hidden].
    """
    out = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        tokens, choices = torch.nonzero(ids == expert, as_tuple=True)
        own = weights[tokens, choices, None]
        read = x[tokens] * own if weighs_inputs else x[tokens]
        bias = None if gate_up_bias is None else gate_up_bias[expert]
        rows = activated(read, gate_up[expert], bias, activation, bound) @ down[expert].T
        if down_bias is not None:
            rows = rows + down_bias[expert]
        out[tokens] += rows if weighs_inputs else own * rows
    return out
