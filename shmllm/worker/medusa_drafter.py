"""Drafts by heads that read the last hidden state of a request: one for each place behind the token
that follows it.

This module must not know on which device they are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from shmllm.core.plan import StepPlan
from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import InputBatch
from shmllm.worker.multi_token_prediction import last_accepted
from shmllm.worker.step_drafter import PendingDrafts
from shmllm.worker.step_inputs import StepInputs


class HeadSteps(Protocol):
    """Computes the heads on a device. It keeps a hidden state for each row."""

    def keep(self, hidden: Tensor, rows: LongArray, chosen: LongArray) -> None:
        """Let rows keep hidden states.

        Args:
            hidden: [tokens, hidden].
            rows: (N,) int64.
            chosen: (N,) int64, which of the tokens each of them keeps.
        """

    def sample(self, place: int, rows: LongArray, positions: LongArray) -> None:
        """Sample a token for each row by a head.

        Args:
            place: which head.
            rows: (N,) int64.
            positions: (N,) int64, the positions that the tokens will have.
        """

    def finish(self) -> None:
        """Wait for the sampled tokens: the batch has all of them now."""


class MedusaDrafter:
    """See `StepDrafter`.

    Args:
        steps: computes the heads.
        batch: the batch, which gets the tokens.
    """

    def __init__(self, steps: HeadSteps, batch: InputBatch) -> None:
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
            self._steps.sample(place, rows[chosen], begins[chosen] + place)
        self._steps.finish()
        pending.write(plan, self._batch.token_ids)

    def follow(
        self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, counts: Sequence[int] | None
    ) -> None:
        """See `StepDrafter.follow`."""
        rows, chosen = last_accepted(plan, inputs, counts)
        if len(rows):
            self._steps.keep(hidden, rows, chosen)
