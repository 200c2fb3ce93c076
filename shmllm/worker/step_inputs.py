"""The inputs of a step, as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from shmllm.models.mixer_specs import Ahead, Encoded
from shmllm.worker.arrays import LongArray


@dataclass(slots=True)
class StepInputs:
    """The inputs of one step with T tokens of S requests, behind N of which a token is sampled.

    A request with D drafted tokens gets 1 + D sampled: one behind its last known token, and one
    behind each drafted token. Its samples follow each other.

    Attributes:
        token_ids: (T,) int64, token ids; `SAMPLED_FOR_ROW` - row for tokens that only the device
            knows.
        positions: (T,) int64, the position of each token in its request, from 0.
        token_types: (T,) int64, 1 for the tokens of the second text of a pair, else 0.
        slot_mapping: (G, T) int64, the slot of the KV cache for each token's key and value in each
            group of layers.
        rows: (S,) int64, the row of each request.
        first_tokens: (S,) int64, the index of each request's first token among the T.
        counts: (S,) int64, the number of tokens of each request in this step.
        context_lens: (S,) int64, the number of tokens of each request with this step's.
        sample_tokens: (N,) int64, the indices among the T of the tokens whose successor is
            sampled.
        sample_rows: (N,) int64, the rows of their requests.
        sample_positions: (N,) int64, the position that each sampled token will have.
        rope_positions: (axes, T) int64, the position of each token on several axes, such as time,
            row and column, for rotations by sections; None: it is `positions` on all of them.
        item_ends: (T,) int64, the position behind the item, say an image, or the prompt that each
            token belongs to, or behind its own; None: all are behind their own.
        encoded_ends: (T,) int64, the position behind those that an encoder has computed of each
            token's request; None: the model is no encoder-decoder.
        item_results: [1, width], what a tower has computed as the result of a request, by the index
            of the request among the S.
    """

    token_ids: LongArray
    positions: LongArray
    token_types: LongArray
    slot_mapping: LongArray
    rows: LongArray
    first_tokens: LongArray
    counts: LongArray
    context_lens: LongArray
    sample_tokens: LongArray
    sample_rows: LongArray
    sample_positions: LongArray
    rope_positions: LongArray | None = None
    item_ends: LongArray | None = None
    encoded_ends: LongArray | None = None
    item_results: Mapping[int, Tensor] = field(default_factory=dict)

    def on_axes(self, num_axes: int) -> LongArray:
        """Return `rope_positions`, also where the axes are alike: (num_axes, T) int64, not to be
        written."""
        if num_axes and self.rope_positions is not None:
            return self.rope_positions
        return np.broadcast_to(self.positions, (num_axes, len(self.positions)))

    @property
    def looks_ahead(self) -> bool:
        """Whether an item that some token belongs to goes on behind it."""
        ends = self.item_ends
        return ends is not None and bool((ends > self.positions + 1).any())

    def ends_of_keys(self, ahead: Ahead) -> LongArray:
        """Return (T,) int64, the position behind the last one that each token attends to.

        Args:
            ahead: see `AttentionSpec.ahead`.
        """
        if isinstance(ahead, Encoded):
            assert self.encoded_ends is not None, "the model is an encoder-decoder"
            return self.encoded_ends
        ends = np.repeat(self.context_lens, self.counts)
        if ahead is None:
            return ends
        if isinstance(ahead, int):
            return np.minimum(ends, self.positions + ahead + 1)
        return self.positions + 1 if self.item_ends is None else np.minimum(ends, self.item_ends)
