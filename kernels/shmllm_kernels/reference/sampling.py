"""The next token of each row from its logits, step by step and by sorting.

The order: bias, mask, penalties; then, in the rows that are not greedy, temperature, min_p,
top_k, top_p, and the Gumbel-max draw. Log-probabilities are those of the logits given.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shmllm_kernels.reference.philox import gumbel_noise


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Each row's parameters, one tensor per parameter, all on one device.

    Attributes:
        temperature: (R,) float32, 0 for greedy.
        top_k: (R,) int32, 0 keeps all.
        top_p: (R,) float32 in (0, 1].
        min_p: (R,) float32, 0 keeps all.
        seeds: (R,) int64.
        repetition: (R,) float32, 1 for none.
        frequency: (R,) float32, 0 for none.
        presence: (R,) float32, 0 for none.
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
        """Greedy rows without any filter or penalty, to be overwritten in place."""

        def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((num_rows,), value, dtype=dtype, device=device)

        top_k, seeds = column(0, torch.int32), column(0, torch.int64)
        penalties = column(1.0), column(0.0), column(0.0)
        return cls(column(0.0), top_k, column(1.0), column(0.0), seeds, *penalties)


def penalise(logits: Tensor, uses: Tensor, columns: SamplingColumns) -> Tensor:
    """Repetition, then frequency, then presence.

    Args:
        logits: (N, V) float32.
        uses: (N, V) int32: twice the times that the output has the token, and 1 if the prompt
            has it. Repetition looks at both, the others at the output alone.
        columns: of the N rows.
    """
    repetition = columns.repetition[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    times = uses // 2
    logits = torch.where(uses > 0, repeated, logits)
    logits = logits - columns.frequency[:, None] * times
    return logits - columns.presence[:, None] * (times > 0)


def filtered(logits: Tensor, columns: SamplingColumns) -> Tensor:
    """Temperature, min_p, top_k and top_p of rows that are not greedy.

    Entries equal to the last one of the top-k stay; of such in the nucleus the first ones do.

    Args:
        logits: (N, V) float32.
        columns: of the N rows.

    Returns:
        (N, V) float32, minus infinity for what must not be drawn.
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
    """The entry of the largest sum of logit and noise; (N,) int64."""
    noise = gumbel_noise(np.asarray(seeds.cpu()), np.asarray(positions.cpu()), logits.shape[1])
    return (logits.cpu() + torch.from_numpy(noise)).argmax(dim=1).to(logits.device)


def sample(logits: Tensor, positions: Tensor, columns: SamplingColumns) -> Tensor:
    """The next tokens, (N,) int64, of logits that were masked and penalised.

    Args:
        logits: (N, V) float32.
        positions: (N,) int64 that the tokens will have.
        columns: of the N rows.
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
    """Log-probability and rank of a token of each row, and the best k beside it.

    Args:
        logits: (N, V) float32.
        tokens: (N,) int64.
        k: alternatives.
        normalise: log-probabilities; False takes the logits as they are.

    Returns:
        (N,) float32 of the tokens; their (N,) int64 ranks, from 1; (N, k) float32, best first,
        and (N, k) int64, which tokens these are: of equal ones the first.
    """
    scores = logits.log_softmax(dim=1) if normalise else logits
    chosen = logits.gather(1, tokens[:, None])
    ranks = 1 + (logits > chosen).sum(dim=1)
    ids = logits.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return scores.gather(1, tokens[:, None])[:, 0], ranks, scores.gather(1, ids), ids
