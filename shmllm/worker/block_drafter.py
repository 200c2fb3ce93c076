"""Drafts a block of tokens at once.

The model reads the last known token of a request and one that stands for each of those behind it.
It has keys and values of the tokens before, which a step of the large model stores as projections
of its hidden states. Those of the block lie behind them, until the next step overwrites them.

This module must not know on which device the model computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from shmllm.core.plan import StepPlan
from shmllm.worker.batch import NO_ROWS, InputBatch
from shmllm.worker.multi_token_prediction import FurtherSteps, gather, without_samples
from shmllm.worker.step_drafter import PendingDrafts
from shmllm.worker.step_inputs import StepInputs


class BlockDrafter:
    """See `StepDrafter`.

    Args:
        steps: computes the model.
        batch: the batch, with the block table.
        mask_token: the token that stands for tokens that are not known.
    """

    def __init__(self, steps: FurtherSteps, batch: InputBatch, mask_token: int) -> None:
        self._steps = steps
        self._batch = batch
        self._mask_token = mask_token

    def draft(self, plan: StepPlan) -> None:
        """See `StepDrafter.draft`."""
        if not plan.drafts:
            return
        pending = PendingDrafts.of(plan)
        _, rows, begins, sizes = pending
        inputs = gather(self._batch, rows, begins - 1, sizes + 1)
        token_ids = np.full(len(inputs.token_ids), self._mask_token, np.int64)
        token_ids[inputs.first_tokens] = self._batch.token_ids[rows, begins - 1]
        self._steps.expand(without_samples(inputs, token_ids))
        for place in range(int(sizes.max())):
            chosen = sizes > place
            own = rows[chosen]
            self._steps.keep(own, inputs.first_tokens[chosen] + place + 1)
            self._steps.sample(own, begins[chosen] + place)
        self._steps.finish()
        pending.write(plan, self._batch.token_ids)

    def follow(
        self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, counts: Sequence[int] | None
    ) -> None:
        """See `StepDrafter.follow`: keys and values of all of the step's tokens are stored. Those
        of wrong drafts are overwritten by those of the tokens in their places."""
        own = without_samples(inputs, inputs.token_ids)
        self._steps.follow(own, hidden, NO_ROWS, NO_ROWS)
