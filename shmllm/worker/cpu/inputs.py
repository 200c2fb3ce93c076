"""The inputs of a step at fixed addresses, where the recorded kernels read them in every step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from shmllm.models.indexer_specs import Chosen
from shmllm.models.mixer_specs import Ahead, AnyAttention, AttentionSpec, LatentAttentionSpec
from shmllm.worker.arrays import LongArray
from shmllm.worker.group import Alone, SharedArrays
from shmllm.worker.step_inputs import StepInputs
from shmllm_kernels.cpu import latent_attention
from shmllm_kernels.cpu.attention_pieces import count_pieces
from shmllm_kernels.cpu.attention_state import SPLIT_KEYS

COUNTS = ("num_tokens", "num_requests", "num_samples", "num_state_copies", "num_level_tokens")


MOST_SPLIT_TOKENS = 16
"""The largest number of tokens that are requests of their own whose contexts are split: more keep
all threads busy, and each split has a state in memory."""


class Listed(NamedTuple):
    """How many keys a list of a token has.

    window: the most of those that end with its own.
    rate: the number of tokens of one of the others, of which none stands for a token behind its
        own; 0: there are no others.
    top_k: the most of these; None: all.
    """

    window: int
    rate: int
    top_k: int | None

    @property
    def num_heads(self) -> int:
        """The number of lists of a token."""
        return 1

    def lens(self, positions: LongArray) -> LongArray:
        """Return the number of keys of tokens with these positions."""
        lens = np.minimum(positions + 1, self.window)
        if self.rate:
            others = (positions + 1) // self.rate
            lens += others if self.top_k is None else np.minimum(others, self.top_k)
        return lens


def num_listed(listed: Listed | Chosen, positions: LongArray) -> LongArray:
    """Return the number of keys in the lists of tokens with these positions."""
    if isinstance(listed, Listed):
        return listed.lens(positions)
    skipped = np.maximum(positions // listed.size + 1 - listed.top_k, 0)
    lens: LongArray = positions + 1 - skipped * listed.size
    return lens


class Division(NamedTuple):
    """How the attention of a layer is divided into pieces of work.

    heads_per_kv: the number of query heads that share a key-value head.
    split_keys: the number of positions in a split.
    listed: unless it is None, each token is a request of its own, whose context is a list, or what
        an indexer chose for it.
    """

    heads_per_kv: int
    split_keys: int
    listed: Listed | Chosen | None = None

    @classmethod
    def of(cls, spec: AnyAttention) -> Division:
        """Return that of a layer."""
        if isinstance(spec, AttentionSpec):
            return cls(spec.num_heads // spec.num_kv_heads, SPLIT_KEYS, spec.chosen)
        if isinstance(spec, LatentAttentionSpec):
            return cls(spec.num_heads, latent_attention.SPLIT_KEYS, spec.chosen)
        compression, indexer = spec.compression, spec.indexer
        rate = 0 if compression is None else compression.rate
        top_k = None if indexer is None else indexer.top_k
        listed = Listed(spec.window, rate, top_k)
        return cls(spec.num_heads, latent_attention.SPLIT_KEYS, listed)


class CpuInputs:
    """The inputs of the current step.

    Args:
        max_tokens: the largest number of tokens in a step.
        max_requests: the largest number of requests in a step.
        divisions: those of the different layers.
        num_groups: the number of groups of layers.
        max_samples: the largest number of tokens at which a step samples; None: one for each
            request.
        memory: what the ranks of a group share the inputs in; None: there are none.
        aheads: the different values of `AttentionSpec.ahead`.
        num_axes: the number of axes of the positions by which queries and keys are rotated; 0: a
            position is one number.
        rates: the different values of `CompressionSpec.rate`.

    Attributes:
        token_ids, positions, token_types: (max_tokens,) int64, as in `StepInputs`. A negative token
            id means that the token's embedding is in the buffer already.
        rope_positions: (axes, max_tokens) int64, as in `StepInputs`; None: there are no axes.
        slot_mapping: (num_groups, max_tokens) int64, as in `StepInputs`.
        rows, first_tokens, counts, context_lens: (max_requests,) int64, as in `StepInputs`.
        sample_tokens: (max_samples,) int64, likewise.
        pieces: for each of `divisions` the tiles and splits, int64, one more than requests, see
            `count_pieces`.
        listed_lens: for each of `divisions` that has lists how many keys those of tokens have,
            (max_tokens,) int64.
        token_indices, token_counts: (max_tokens,) int64, `first_tokens` and `counts` of tokens
            that are requests of their own.
        window_starts: for each of `rates` the position of the first token of the window that a
            token is the last one of, (max_tokens,) int64; 0 if it is none.
    """

    def __init__(
        self,
        max_tokens: int,
        max_requests: int,
        divisions: Collection[Division],
        num_groups: int,
        max_samples: int | None = None,
        memory: SharedArrays | None = None,
        aheads: Collection[Ahead] = (0,),
        num_axes: int = 0,
        rates: Collection[int] = (),
    ) -> None:
        self._memory = memory or Alone()
        words = self._memory.array
        self._counts = words("counts of a step", len(COUNTS))
        self.token_ids, self.positions, self.token_types = (
            words(name, max_tokens) for name in ("token_ids", "positions", "token_types")
        )
        self.rope_positions: LongArray | None = None
        if num_axes:
            self.rope_positions = words("rope_positions", num_axes, max_tokens)
        self._ends = {
            ahead: words(f"ends of {ahead} ahead", max_tokens) for ahead in aheads if ahead != 0
        }
        self.slot_mapping = words("slot_mapping", num_groups, max_tokens)
        self.rows, self.first_tokens, self.counts, self.context_lens = (
            words(name, max_requests) for name in ("rows", "first_tokens", "counts", "context_lens")
        )
        self.sample_tokens = words("sample_tokens", max_samples or max_requests)
        self._state_copies = words("state_copies", 2 * max_requests, 2)
        sizes = {
            division: 1 + (max_requests if division.listed is None else max_tokens)
            for division in divisions
        }
        self.pieces = {
            division: (words(f"tiles of {division}", size), words(f"splits of {division}", size))
            for division, size in sizes.items()
        }
        self._step_of_tokens = words("tokens, and as many requests", 2)
        self.listed_lens = {
            division: words(f"numbers of keys of {division}", max_tokens)
            for division in divisions
            if division.listed is not None
        }
        self.token_indices = np.arange(max_tokens)
        self.token_counts = np.ones_like(self.token_indices)
        self.window_starts = {rate: words(f"starts of {rate}", max_tokens) for rate in rates}

    @property
    def state_copies(self) -> list[tuple[int, int]]:
        """The blocks of states that are copied before the step: (source, target) of each."""
        return [tuple(pair) for pair in self._state_copies[: self._counts[3]].tolist()]

    @state_copies.setter
    def state_copies(self, copies: Sequence[tuple[int, int]]) -> None:
        self._counts[3] = len(copies)
        if copies:
            self._state_copies[: len(copies)] = copies

    @property
    def num_level_tokens(self) -> int:
        """To how many tokens levels of images are added behind the first layers: all of the step's,
        or none."""
        return int(self._counts[4])

    @num_level_tokens.setter
    def num_level_tokens(self, count: int) -> None:
        self._counts[4] = count

    def address_of(self, count: str) -> int:
        """Return the address of the int64 that holds one of COUNTS."""
        return int(self._counts.ctypes.data) + 8 * COUNTS.index(count)

    def address_of_step(self, division: Division) -> int:
        """Return the address of two int64: the number of tokens and the number of requests."""
        step = self._counts if division.listed is None else self._step_of_tokens
        return int(step.ctypes.data)

    def address_of_ends(self, ahead: Ahead) -> int:
        """Return the address of the (max_tokens,) int64 positions behind the last one that each
        token attends to, in layers with this `AttentionSpec.ahead`; 0: they are causal."""
        return 0 if ahead == 0 else int(self._ends[ahead].ctypes.data)

    def fill(self, inputs: StepInputs) -> None:
        """Copy a step's inputs to the addresses that the kernels read, after all ranks have left
        the step before."""
        self._memory.settle()
        num_tokens, num_requests = len(inputs.token_ids), len(inputs.rows)
        num_samples = len(inputs.sample_tokens)
        self._counts[:3] = num_tokens, num_requests, num_samples
        self.token_ids[:num_tokens] = inputs.token_ids
        self.positions[:num_tokens] = inputs.positions
        self.token_types[:num_tokens] = inputs.token_types
        if self.rope_positions is not None:
            self.rope_positions[:, :num_tokens] = inputs.on_axes(len(self.rope_positions))
        for ahead, ends in self._ends.items():
            ends[:num_tokens] = inputs.ends_of_keys(ahead)
        self.slot_mapping[:, :num_tokens] = inputs.slot_mapping
        self.rows[:num_requests] = inputs.rows
        self.first_tokens[:num_requests] = inputs.first_tokens
        self.counts[:num_requests] = inputs.counts
        self.context_lens[:num_requests] = inputs.context_lens
        self.sample_tokens[:num_samples] = inputs.sample_tokens
        self._step_of_tokens[:] = num_tokens
        for rate, starts in self.window_starts.items():
            starts[:num_tokens] = np.maximum(inputs.positions + 1 - rate, 0)
        for division, pieces in self.pieces.items():
            counts, lens, split_keys = inputs.counts, inputs.context_lens, division.split_keys
            if division.listed is not None:
                lens = num_listed(division.listed, inputs.positions)
                self.listed_lens[division][:num_tokens], counts = lens, np.ones_like(lens)
                if num_tokens > MOST_SPLIT_TOKENS:
                    split_keys = int(lens.max())
            count_pieces(counts, lens, division.heads_per_kv, *pieces, split_keys)
