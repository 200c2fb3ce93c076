"""The inputs of a step at fixed addresses, where the recorded kernels read them in every step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from shmllm.models.indexer_specs import Chosen
from shmllm.models.mixer_specs import Ahead, AttentionSpec, LatentAttentionSpec
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


class Division(NamedTuple):
    """How the attention of a layer is divided into pieces of work.

    heads_per_kv: the number of query heads that share a key-value head.
    split_keys: the number of positions in a split.
    chosen: that of the attention; unless it is None, each token is a request of its own, whose
        context is what was chosen for it.
    """

    heads_per_kv: int
    split_keys: int
    chosen: Chosen | None = None

    @classmethod
    def of(cls, spec: AttentionSpec | LatentAttentionSpec) -> Division:
        """Return that of a layer."""
        if isinstance(spec, LatentAttentionSpec):
            return cls(spec.num_heads, latent_attention.SPLIT_KEYS, spec.chosen)
        return cls(spec.num_heads // spec.num_kv_heads, SPLIT_KEYS, spec.chosen)


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

    Attributes:
        token_ids, positions, token_types: (max_tokens,) int64, as in `StepInputs`. A negative token
            id means that the token's embedding is in the buffer already.
        rope_positions: (axes, max_tokens) int64, as in `StepInputs`; None: there are no axes.
        slot_mapping: (num_groups, max_tokens) int64, as in `StepInputs`.
        rows, first_tokens, counts, context_lens: (max_requests,) int64, as in `StepInputs`.
        sample_tokens: (max_samples,) int64, likewise.
        pieces: for each of `divisions` the tiles and splits, int64, one more than requests, see
            `count_pieces`.
        chosen_lens: (max_tokens,) int64, how many keys each token attends to where an indexer
            chooses them.
        token_indices, token_counts: (max_tokens,) int64, `first_tokens` and `counts` of tokens
            that are requests of their own.
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
            division: 1 + (max_requests if division.chosen is None else max_tokens)
            for division in divisions
        }
        self.pieces = {
            division: (words(f"tiles of {division}", size), words(f"splits of {division}", size))
            for division, size in sizes.items()
        }
        self._step_of_tokens = words("tokens, and as many requests", 2)
        self.chosen_lens = words("numbers of chosen tokens", max_tokens)
        self.token_indices = np.arange(max_tokens)
        self.token_counts = np.ones_like(self.token_indices)

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
        step = self._counts if division.chosen is None else self._step_of_tokens
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
        for division, pieces in self.pieces.items():
            counts, lens, split_keys = inputs.counts, inputs.context_lens, division.split_keys
            if division.chosen is not None:
                _, top_k, size = division.chosen
                skipped = np.maximum(inputs.positions // size + 1 - top_k, 0)
                lens = inputs.positions + 1 - skipped * size
                self.chosen_lens[:num_tokens], counts = lens, np.ones_like(lens)
                if num_tokens > MOST_SPLIT_TOKENS:
                    split_keys = top_k * size
            count_pieces(counts, lens, division.heads_per_kv, *pieces, split_keys)
