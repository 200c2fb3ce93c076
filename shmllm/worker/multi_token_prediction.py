"""Drafts by a layer that checkpoints have behind the model's last one.

The layer joins the hidden state of a token with the embedding of the next one, and predicts the one
behind that (DeepSeek-AI, "DeepSeek-V3", 2024, section 2.2). So it runs behind every step, for all
of the step's tokens, because it needs keys and values of all of them. What it returns for the last
token predicts the first draft; for further drafts it runs on its own results.

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
from shmllm.worker.batch import NO_ROWS, InputBatch, StepInputs
from shmllm.worker.step_drafter import PendingDrafts


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
    """

    def __init__(self, steps: FurtherSteps, batch: InputBatch) -> None:
        self._steps = steps
        self._batch = batch

    def draft(self, plan: StepPlan) -> None:
        """See `StepDrafter.draft`."""
        if not plan.drafts:
            return
        pending = PendingDrafts.of(plan)
        _, rows, begins, sizes = pending
        for place in range(int(sizes.max())):
            chosen = sizes > place
            own, ends = rows[chosen], begins[chosen] + place
            if place:
                self._advance(own, ends - 2)
            self._steps.sample(own, ends)
        self._steps.finish()
        pending.write(plan, self._batch.token_ids)

    def follow(
        self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, counts: Sequence[int] | None
    ) -> None:
        """See `StepDrafter.follow`: the layer runs for each token of the step, with the token
        behind it. What it computes behind a wrong draft is computed again."""
        rows, chosen = NO_ROWS, NO_ROWS
        if plan.samples:
            accepted = np.ones(len(plan.samples), np.int64) if counts is None else np.array(counts)
            firsts = np.cumsum([0, *plan.sample_counts[:-1]])
            places = firsts + accepted - 1
            rows, chosen = inputs.sample_rows[places], inputs.sample_tokens[places]
        own = np.repeat(inputs.rows, inputs.counts)
        behind = self._batch.token_ids[own, inputs.positions + 1]
        self._steps.follow(_inputs_of(inputs, behind), hidden, rows, chosen)

    def _advance(self, rows: LongArray, positions: LongArray) -> None:
        """Run the layer for one token of each row, which was drafted.

        Args:
            rows: (N,) int64.
            positions: (N,) int64, the positions before those of the tokens.
        """
        size = len(rows)
        plan = StepPlan(
            0, rows=rows.tolist(), starts=positions.tolist(), counts=[1] * size, num_tokens=size
        )
        behind = self._batch.token_ids[rows, positions + 1]
        self._steps.advance(_inputs_of(self._batch.gather(plan), behind))


def _inputs_of(inputs: StepInputs, behind: IntArray) -> StepInputs:
    """Return the inputs of the layer for the tokens of a step.

    Args:
        inputs: the inputs of the step.
        behind: (T,) int32, the token behind each of its tokens.
    """
    return replace(
        inputs,
        token_ids=behind.astype(np.int64),
        sample_tokens=NO_ROWS,
        sample_rows=NO_ROWS,
        sample_positions=NO_ROWS,
    )
