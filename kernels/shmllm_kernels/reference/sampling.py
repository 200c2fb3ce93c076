"""Samples the next token of each row from its logits, with a sort.

The order is: biases, masks, penalties; then, for rows that are not greedy, temperature, min_p,
top_k, top_p, and the Gumbel-max draw. Log-probabilities are those of the logits that are given.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shmllm_kernels.reference.philox import gumbel_noise


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The sampling parameters of R rows, one tensor for each parameter, all on one device.

    Attributes:
        temperature: (R,) float32; 0: greedy.
        top_k: (R,) int32; 0: no filter.
        top_p: (R,) float32 in (0, 1]; 1: no filter.
        min_p: (R,) float32; 0: no filter.
        seeds: (R,) int64.
        repetition: (R,) float32; 1: no penalty.
        frequency: (R,) float32; 0: no penalty.
        presence: (R,) float32; 0: no penalty.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor

    @classmethod
    def greedy(cls, num_rows: int, device: torch.device | str) -> SamplingColumns:
        """Allocates greedy rows without filters and penalties. The caller overwrites them."""

        def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((num_rows,), value, dtype=dtype, device=device)

        top_k, seeds = column(0, torch.int32), column(0, torch.int64)
        penalties = column(1.0), column(0.0), column(0.0)
        return cls(column(0.0), top_k, column(1.0), column(0.0), seeds, *penalties)


def penalise(logits: Tensor, token_counts: Tensor, columns: SamplingColumns) -> Tensor:
    """Applies the repetition penalty, then the frequency penalty, then the presence penalty.

    Args:
        logits: (N, V) float32.
        token_counts: (N, V) int32: twice the number of the token's occurrences in the output, plus
            1 if the prompt contains it. The repetition penalty depends on prompt and output, the
            others on the output alone.
        columns: the parameters of the N rows.
    """
    repetition = columns.repetition[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    times = token_counts // 2
    logits = torch.where(token_counts > 0, repeated, logits)
    logits = logits - columns.frequency[:, None] * times
    return logits - columns.presence[:, None] * (times > 0)


def filtered(logits: Tensor, columns: SamplingColumns) -> Tensor:
    """Applies temperature, min_p, top_k and top_p to rows that are not greedy.

    top_k keeps all entries equal to the k-th largest one. Of the entries equal to the smallest one
    that it keeps, top_p keeps the first ones only.

    Args:
        logits: (N, V) float32.
        columns: the parameters of the N rows.

    Returns:
        (N, V) float32, minus infinity for the entries that are dropped.
    """
    logits = logits / columns.temperature[:, None]
    floor = logits.amax(dim=1, keepdim=True) + columns.min_p.clamp(min=1e-37).log()[:, None]
    logits = logits.masked_fill((logits < floor) & (columns.min_p > 0)[:, None], -torch.inf)
    ordered, order = logits.sort(dim=1, descending=True, stable=True)
    size = logits.shape[1]
    k = torch.where(columns.top_k > 0, columns.top_k, size).clamp(max=size).long()
    ordered = ordered.masked_fill(ordered < ordered.gather(1, k[:, None] - 1), -torch.inf)
    probabilities = ordered.double().softmax(dim=1)
    before = probabilities.cumsum(dim=1) - probabilities
    outside = (before >= columns.top_p[:, None]) & (columns.top_p < 1)[:, None]
    outside[:, 0] = False
    ordered = ordered.masked_fill(outside, -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ordered)


def draw(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Returns the index of the largest sum of logit and noise in each row: (N,) int64."""
    noise = gumbel_noise(np.asarray(seeds.cpu()), np.asarray(positions.cpu()), logits.shape[1])
    return (logits.cpu() + torch.from_numpy(noise)).argmax(dim=1).to(logits.device)


def sample(logits: Tensor, positions: Tensor, columns: SamplingColumns) -> Tensor:
    """Returns the next tokens, (N,) int64.

    Args:
        logits: (N, V) float32, after masks and penalties.
        positions: (N,) int64, the positions of the tokens that are sampled.
        columns: the parameters of the N rows.
    """
    tokens = logits.argmax(dim=1)
    drawn = columns.temperature > 0
    if drawn.any():
        of_drawn = SamplingColumns(
            *(getattr(columns, name)[drawn] for name in SamplingColumns.__slots__)
        )
        tokens[drawn] = draw(filtered(logits[drawn], of_drawn), of_drawn.seeds, positions[drawn])
    return tokens


def score(logits: Tensor, tokens: Tensor, k: int, normalise: bool = True) -> tuple[Tensor, ...]:
    """Returns the log-probability and rank of a token of each row, and the k most likely tokens.

    Args:
        logits: (N, V) float32.
        tokens: (N,) int64.
        k: the number of alternatives.
        normalise: whether scores are log-probabilities; otherwise they are the logits.

    Returns:
        The scores of the tokens, (N,) float32; their ranks from 1, (N,) int64; the scores of the
        alternatives, (N, k) float32, best first; and the alternatives' token ids, (N, k) int64. Of
        tokens with equal scores the lower id comes first.
    """
    scores = logits.log_softmax(dim=1) if normalise else logits
    chosen = logits.gather(1, tokens[:, None])
    ranks = 1 + (logits > chosen).sum(dim=1)
    ids = logits.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return scores.gather(1, tokens[:, None])[:, 0], ranks, scores.gather(1, ids), ids
