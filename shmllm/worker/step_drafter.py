"""The interface of a model that drafts inside the steps of a runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from shmllm.core.plan import StepPlan
from shmllm.worker.batch import StepInputs


class StepDrafter(Protocol):
    """Drafts tokens before a step, and sees the hidden states of every step."""

    def draft(self, plan: StepPlan) -> None:
        """Replace the pending tokens in `plan.drafts`, and in the batch.

        Args:
            plan: a plan whose requests and blocks are in the batch already.
        """

    def follow(
        self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, counts: Sequence[int] | None
    ) -> None:
        """Take note of a step. Its sampled tokens are in the batch.

        Args:
            plan: the step's plan.
            inputs: its inputs.
            hidden: [T, hidden] float32, the hidden states of its tokens after the final norm.
            counts: how many tokens each of the plan's `samples` got; None: one each.
        """
