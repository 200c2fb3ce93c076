"""The operations before and after a step's layers: inputs, embeddings, rotary tables, gathers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class StepSizes(NamedTuple):
    """The sizes of a step."""

    num_tokens: int
    num_requests: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's inputs, at fixed addresses. `unpack_step` pads them to the sizes of a graph.

    Attributes:
        token_ids: [tokens] int64, see `embed`. Padding: -1.
        positions: [tokens] int64. Padding: 0.
        slots: [groups, tokens] int64, the cache slot of each token in each group of layers.
            Padding: -1.
        token_types: [1, tokens] int64, the type of each token; [0, tokens]: the model has none.
            Padding: 0.
        rope_positions: [axes, tokens] int64, the position of each token on several axes, by which
            queries and keys are rotated; [0, tokens]: it is `positions`. Padding: 0.
        ends: [kinds, tokens] int32, the end of the keys that each token attends to, for each kind
            of layer whose attention is not causal. Padding: 0.
        query_starts: [requests + 1] int32, the index of each request's first token. Padding: the
            number of tokens, so that padded requests have no tokens.
        context_lens: [requests] int32, the number of each request's tokens so far. Padding: 0.
        rows: [requests] int64, each request's row of the block table. Padding: 0.
        sample_tokens: [samples] int64, the indices of the tokens whose next token is sampled.
            Padding: 0.
        sample_rows: [samples] int32, the row of the request of each sample. Padding: -1.
        sample_positions: [samples] int64, the position of the token that is sampled. Padding: 0.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    token_types: Tensor
    rope_positions: Tensor
    ends: Tensor
    query_starts: Tensor
    context_lens: Tensor
    rows: Tensor
    sample_tokens: Tensor
    sample_rows: Tensor
    sample_positions: Tensor

    @classmethod
    def allocate(
        cls,
        sizes: StepSizes,
        device: torch.device | str,
        num_groups: int = 1,
        num_ends: int = 0,
        has_types: bool = False,
        num_axes: int = 0,
    ) -> StepTensors:
        """Allocates tensors for steps of up to these sizes, filled with padding."""
        tokens, requests, samples = sizes

        def full(
            size: int | tuple[int, int], value: int, dtype: torch.dtype = torch.int64
        ) -> Tensor:
            shape = (size,) if isinstance(size, int) else size
            return torch.full(shape, value, dtype=dtype, device=device)

        return cls(
            token_ids=full(tokens, -1),
            positions=full(tokens, 0),
            slots=full((num_groups, tokens), -1),
            token_types=full((int(has_types), tokens), 0),
            rope_positions=full((num_axes, tokens), 0),
            ends=full((num_ends, tokens), 0, torch.int32),
            query_starts=full(requests + 1, 0, torch.int32),
            context_lens=full(requests, 0, torch.int32),
            rows=full(requests, 0),
            sample_tokens=full(samples, 0),
            sample_rows=full(samples, -1, torch.int32),
            sample_positions=full(samples, 0),
        )

    @property
    def num_per_token(self) -> int:
        """The number of packed numbers for each token; see `unpack_step`."""
        optional = self.token_types, self.rope_positions, self.ends
        return 2 + len(self.slots) + sum(map(len, optional))

    def num_packed(self, sizes: StepSizes) -> int:
        """Returns the number of packed numbers of a step of these sizes; see `unpack_step`."""
        tokens, requests, samples = sizes
        return self.num_per_token * tokens + 3 * requests + 3 * samples


@dataclass(frozen=True, slots=True)
class LearnedRows:
    """Embeddings of the tokens' positions or types, which are added to those of the tokens.

    Attributes:
        table: [rows, hidden], the dtype of the tokens' table, rows contiguous.
        indices: [tokens] int64, indices of the table.
    """

    table: Tensor
    indices: Tensor


def embed(
    out: Tensor,
    table: Tensor,
    token_ids: Tensor,
    last_tokens: Tensor,
    scale: float = 1.0,
    learned: Sequence[LearnedRows] = (),
) -> None:
    """Writes the embeddings of a step's tokens, multiplied by a factor, plus learned ones. The sum
    is float32 and rounded once.

    Args:
        out: [tokens, hidden].
        table: [vocab, hidden], out's dtype.
        token_ids: [tokens] int64: an index of the table, or ``-2 - row`` for the token that was
            last sampled for that row. -1: the row of ``out`` is an embedding that a prompt gave,
            and only learned ones are added. Ids that are not in the table leave the row unchanged.
        last_tokens: [rows] int64, the token that was last sampled for each row.
        scale: the factor, applied in float32.
        learned: the embeddings of positions, of token types, or of both.
    """
    sampled = last_tokens[(-2 - token_ids).clamp(0)]
    tokens = torch.where(token_ids < -1, sampled, token_ids)
    found = (tokens >= 0) & (tokens < len(table))
    out[found] = (table[tokens[found]].float() * scale).to(out.dtype)
    added = found | (tokens == -1)
    total = out[added].float()
    for each in learned:
        total += each.table[each.indices[added]].float()
    out[added] = total.to(out.dtype)


def gather_rows(out: Tensor, source: Tensor, indices: Tensor) -> None:
    """Writes ``out[i] = source[indices[i]]``.

    Args:
        out: [count, dim].
        source: [rows, dim], out's dtype.
        indices: [count] int64; -1 leaves the row of ``out`` unchanged.
    """
    found = indices >= 0
    out[found] = source[indices[found]]


def rope_tables(
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    scale: float,
    axes: Tensor | None = None,
    rate: int = 1,
) -> None:
    """Writes the tables that ``reference.rope`` takes, computed in float32.

    Args:
        cos: [tokens, dim], any floating dtype; gets the cosines twice.
        sin: [tokens, dim], cos' dtype; gets the negated sines, then the sines.
        positions: [tokens] int64, or with ``axes`` [axes, tokens].
        frequencies: [dim / 2] float32, in radians per position.
        scale: the factor of cosines and sines.
        axes: [dim / 2] int64, the axis of the position that belongs to each frequency; None: a
            position is one number.
        rate: positions are rounded down to multiples of this number.
    """
    positions = positions // rate * rate
    of_pairs = positions[:, None] if axes is None else positions[axes].t()
    angles = of_pairs.float() * frequencies
    cosines, sines = angles.cos() * scale, angles.sin() * scale
    cos.copy_(torch.cat((cosines, cosines), -1))
    sin.copy_(torch.cat((-sines, sines), -1))


def unpack_step(step: StepTensors, packed: Tensor, sizes: StepSizes, padded: StepSizes) -> None:
    """Copies the inputs of a step to the tensors that its kernels read, and pads them.

    Args:
        step: the tensors that are written.
        packed: int64: the token ids and positions of all tokens, their slots in each group, their
            types if the model has them, their positions on each axis of a rotation by several, and
            their ends of each kind; the first token, context
            length and row of all requests; the token, row and position of all samples.
        sizes: the numbers of tokens, requests and samples.
        padded: the sizes up to which ``step`` is written, at least ``sizes``; see `StepTensors`.
    """
    tokens, requests, samples = sizes
    lengths = [tokens] * step.num_per_token + [requests] * 3 + [samples] * 3
    parts = torch.split(packed, lengths)
    optional = *step.token_types, *step.rope_positions, *step.ends
    fields = (
        (step.token_ids, padded.num_tokens, -1),
        (step.positions, padded.num_tokens, 0),
        *((slots, padded.num_tokens, -1) for slots in step.slots),
        *((numbers, padded.num_tokens, 0) for numbers in optional),
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
