"""Drafts by a layer that checkpoints have behind the model's last one.

The layer joins the hidden state of a token with the embedding of the next one, and predicts the one
behind that (DeepSeek-AI, "DeepSeek-V3", 2024, section 2.2). So it runs behind every step, for all
of the step's tokens, because it needs keys and values of all of them. What it returns for the last
token predicts the first draft. For further drafts it runs on its own results, one after the other,
or once for all of them, with a token that stands for those that are not known.

This module must not know on which device the layer computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from torch import Tensor

from shmllm.core.plan import StepPlan
from shmllm.worker.arrays import IntArray, LongArray
from shmllm.worker.batch import NO_ROWS, InputBatch
from shmllm.worker.step_drafter import PendingDrafts
from shmllm.worker.step_inputs import StepInputs


class FurtherSteps(Protocol):
    """Computes the layer on a device. It keeps a hidden state for each row, which predicts the
    token that is drafted next.

    The inputs of a step have the positions and slots of the tokens whose hidden states are joined
    with embeddings, as `token_ids` the tokens behind these, and no samples.
    """

    def follow(
        self, inputs: StepInputs, hidden: Tensor, rows: LongArray, chosen: LongArray
    ) -> None:
        """Run the layer for the tokens of the model's step that was computed last.

        Args:
            inputs: the inputs, for T tokens.
            hidden: [T or more, hidden], the hidden states of the tokens; may be overwritten.
            rows: (N,) int64, the rows that keep a result.
            chosen: (N,) int64, which of the T results each of them keeps.
        """

    def advance(self, inputs: StepInputs) -> None:
        """Run the layer for one token of each row: the one that was sampled for it last, from the
        hidden state that it keeps. It keeps the result.

        Args:
            inputs: the inputs; the device may have the tokens alone, and `inputs` others.
        """

    def expand(self, inputs: StepInputs) -> None:
        """Run the layer for tokens that are not known, and keep none of the results.

        Args:
            inputs: the inputs, for T tokens, all of which are that which stands for others.
        """

    def keep(self, rows: LongArray, chosen: LongArray) -> None:
        """Let rows keep results of the last call of `expand`.

        Args:
            rows: (N,) int64.
            chosen: (N,) int64, which of the T results each of them keeps.
        """

    def sample(self, rows: LongArray, positions: LongArray) -> None:
        """Sample a token for each row from the hidden state that it keeps.

        Args:
            rows: (N,) int64.
            positions: (N,) int64, the positions that the tokens will have.
        """

    def finish(self) -> None:
        """Wait for the sampled tokens: the batch has all of them now."""


class MultiTokenPrediction:
    """See `StepDrafter`.

    Args:
        steps: computes the layer.
        batch: the batch, with the block table.
        mask_token: the token that stands for tokens that are not known; None: each draft reads the
            one before.
    """

    def __init__(
        self, steps: FurtherSteps, batch: InputBatch, mask_token: int | None = None
    ) -> None:
        self._steps = steps
        self._batch = batch
        self._mask_token = mask_token

    def draft(self, plan: StepPlan) -> None:
        """See `StepDrafter.draft`."""
        if not plan.drafts:
            return
        pending = PendingDrafts.of(plan)
        _, rows, begins, sizes = pending
        further, mask = sizes - 1, self._mask_token
        first_results = further.cumsum() - further
        for place in range(int(sizes.max())):
            chosen = sizes > place
            own, ends = rows[chosen], begins[chosen] + place
            if place and mask is None:
                self._advance(own, ends - 2)
            elif mask is not None and place:
                if place == 1:
                    self._expand(own, ends - 2, further[chosen], mask)
                self._steps.keep(own, first_results[chosen] + place - 1)
            self._steps.sample(own, ends)
        self._steps.finish()
        pending.write(plan, self._batch.token_ids)

    def follow(
        self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, counts: Sequence[int] | None
    ) -> None:
        """See `StepDrafter.follow`: the layer runs for each token of the step, with the token
        behind it. What it computes behind a wrong draft is computed again."""
        rows, chosen = last_accepted(plan, inputs, counts)
        own = np.repeat(inputs.rows, inputs.counts)
        behind = self._batch.token_ids[own, inputs.positions + 1]
        self._steps.follow(without_samples(inputs, behind), hidden, rows, chosen)

    def _advance(self, rows: LongArray, positions: LongArray) -> None:
        """Run the layer for one token of each row, which was drafted.

        Args:
            rows: (N,) int64.
            positions: (N,) int64, the positions before those of the tokens.
        """
        inputs = gather(self._batch, rows, positions, np.ones_like(rows))
        behind = self._batch.token_ids[rows, positions + 1]
        self._steps.advance(without_samples(inputs, behind))

    def _expand(self, rows: LongArray, positions: LongArray, counts: LongArray, mask: int) -> None:
        """Run the layer for some tokens of each row, none of which is known.

        Args:
            rows: (N,) int64.
            positions: (N,) int64, the positions before those of the first of these tokens.
            counts: (N,) int64, their numbers.
            mask: what stands for them.
        """
        inputs = gather(self._batch, rows, positions, counts)
        self._steps.expand(without_samples(inputs, np.full(len(inputs.token_ids), mask, np.int32)))


def last_accepted(
    plan: StepPlan, inputs: StepInputs, counts: Sequence[int] | None
) -> tuple[LongArray, LongArray]:
    """Return the rows that have got tokens in a step, and which of the step's tokens are before the
    last of these. Arguments: see `StepDrafter.follow`."""
    if not plan.samples:
        return NO_ROWS, NO_ROWS
    accepted = np.ones(len(plan.samples), np.int64) if counts is None else np.array(counts)
    places = np.cumsum([0, *plan.sample_counts[:-1]]) + accepted - 1
    return inputs.sample_rows[places], inputs.sample_tokens[places]


def gather(batch: InputBatch, rows: LongArray, starts: LongArray, counts: LongArray) -> StepInputs:
    """Return the inputs of a step of so many tokens of each row, from these positions on."""
    plan = StepPlan(
        0,
        rows=rows.tolist(),
        starts=starts.tolist(),
        counts=counts.tolist(),
        num_tokens=int(counts.sum()),
    )
    return batch.gather(plan)


def without_samples(inputs: StepInputs, token_ids: IntArray | LongArray) -> StepInputs:
    """Return the inputs of a step of what drafts for the tokens of another step.

    Args:
        inputs: the inputs of that.
        token_ids: (T,), what is read in the place of each of its tokens.
    """
    return replace(
        inputs,
        token_ids=token_ids.astype(np.int64),
        sample_tokens=NO_ROWS,
        sample_rows=NO_ROWS,
        sample_positions=NO_ROWS,
    )
