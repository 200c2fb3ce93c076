"""What a step does before and behind its layers: inputs spread, embeddings, angles, rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class StepSizes(NamedTuple):
    num_tokens: int
    num_requests: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's inputs, at fixed addresses. `unpack_step` pads them to the sizes of a graph.

    Attributes:
        token_ids: [tokens] int64, see `embed`. Padding: -1.
        positions: [tokens] int64. Padding: 0.
        slots: [tokens] int64, where each token's key and value go. Padding: -1.
        query_starts: [requests + 1] int32, where each request's tokens begin. Padding: the
            number of tokens, so that requests behind the last have none.
        context_lens: [requests] int32. Padding: 0.
        rows: [requests] int64, each request's row of the block table. Padding: 0.
        sample_tokens: [samples] int64, which tokens get a successor. Padding: 0.
        sample_rows: [samples] int32. Padding: -1.
        sample_positions: [samples] int64, the position of the successor. Padding: 0.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    context_lens: Tensor
    rows: Tensor
    sample_tokens: Tensor
    sample_rows: Tensor
    sample_positions: Tensor

    @classmethod
    def allocate(cls, sizes: StepSizes, device: torch.device | str) -> StepTensors:
        """For steps up to those sizes; as that of no token."""
        tokens, requests, samples = sizes

        def full(size: int, value: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((size,), value, dtype=dtype, device=device)

        return cls(
            token_ids=full(tokens, -1),
            positions=full(tokens, 0),
            slots=full(tokens, -1),
            query_starts=full(requests + 1, 0, torch.int32),
            context_lens=full(requests, 0, torch.int32),
            rows=full(requests, 0),
            sample_tokens=full(samples, 0),
            sample_rows=full(samples, -1, torch.int32),
            sample_positions=full(samples, 0),
        )


def embed(out: Tensor, table: Tensor, token_ids: Tensor, last_tokens: Tensor) -> None:
    """Writes the embeddings of a step's tokens.

    Args:
        out: [tokens, hidden].
        table: [vocab, hidden], out's dtype.
        token_ids: [tokens] int64: an entry of the table; ``-2 - row`` for the token that was
            sampled for that row last; -1, or what has no entry, leaves ``out`` as it is.
        last_tokens: [rows] int64, the tokens sampled last.
    """
    sampled = last_tokens[(-2 - token_ids).clamp(0)]
    tokens = torch.where(token_ids < -1, sampled, token_ids)
    found = (tokens >= 0) & (tokens < len(table))
    out[found] = table[tokens[found]]


def gather_rows(out: Tensor, source: Tensor, indices: Tensor) -> None:
    """Writes ``out[i] = source[indices[i]]``.

    Args:
        out: [count, dim].
        source: [rows, dim], out's dtype.
        indices: [count] int64; -1 leaves ``out`` as it is.
    """
    found = indices >= 0
    out[found] = source[indices[found]]


def rope_tables(
    cos: Tensor, sin: Tensor, positions: Tensor, frequencies: Tensor, scale: float
) -> None:
    """Writes the tables that ``reference.rope`` takes, computed in float32.

    Args:
        cos: [tokens, dim], any floating dtype: cosines twice.
        sin: [tokens, dim], cos' dtype: negated sines, then sines.
        positions: [tokens] int64.
        frequencies: [dim / 2] float32, radians from one position to the next.
        scale: what both are multiplied with.
    """
    angles = positions.float()[:, None] * frequencies
    cosines, sines = angles.cos() * scale, angles.sin() * scale
    cos.copy_(torch.cat((cosines, cosines), -1))
    sin.copy_(torch.cat((-sines, sines), -1))


def unpack_step(step: StepTensors, packed: Tensor, sizes: StepSizes, padded: StepSizes) -> None:
    """Spreads the numbers of a step over the tensors that its kernels read, and pads them.

    Args:
        step: where they go.
        packed: int64, side by side: token ids, positions and slots of each token; first token,
            context length and row of each request; token, row and position of each sample.
        sizes: how many of each there are.
        padded: up to where `step` is written, at least ``sizes``; see `StepTensors`.
    """
    tokens, requests, samples = sizes
    parts = torch.split(packed, [tokens] * 3 + [requests] * 3 + [samples] * 3)
    fields = (
        (step.token_ids, padded.num_tokens, -1),
        (step.positions, padded.num_tokens, 0),
        (step.slots, padded.num_tokens, -1),
        (step.query_starts, padded.num_requests + 1, tokens),
        (step.context_lens, padded.num_requests, 0),
        (step.rows, padded.num_requests, 0),
        (step.sample_tokens, padded.num_samples, 0),
        (step.sample_rows, padded.num_samples, -1),
        (step.sample_positions, padded.num_samples, 0),
    )
    for part, (field, length, padding) in zip(parts, fields, strict=True):
        field[:length] = padding
        field[: len(part)] = part
