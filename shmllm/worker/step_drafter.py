"""The interface of a model that drafts inside the steps of a runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self

import numpy as np
from torch import Tensor

from shmllm.core.plan import StepPlan
from shmllm.worker.arrays import IntArray, LongArray
from shmllm.worker.step_inputs import StepInputs


class PendingDrafts(NamedTuple):
    """What a plan asks a model to draft for N requests.

    columns: (N,) int64, their columns in the plan.
    rows: (N,) int64, their rows.
    begins: (N,) int64, the position of the first drafted token.
    sizes: (N,) int64, the number of drafted tokens.
    """

    columns: LongArray
    rows: LongArray
    begins: LongArray
    sizes: LongArray

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        """Read a plan that has drafts."""
        columns = np.array(list(plan.drafts), np.int64)
        sizes = np.array([len(drafts) for drafts in plan.drafts.values()], np.int64)
        rows, starts, counts = (
            np.array(each, np.int64)[columns] for each in (plan.rows, plan.starts, plan.counts)
        )
        return cls(columns, rows, starts + counts - sizes, sizes)

    def write(self, plan: StepPlan, token_ids: IntArray) -> None:
        """Put the drafted tokens into the plan.

        Args:
            plan: the plan.
            token_ids: (rows, tokens) int32, the tokens of each row, the drafted ones included.
        """
        for column, row, begin, size in zip(*self, strict=True):
            plan.drafts[int(column)] = token_ids[row, begin : begin + size].tolist()


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
            hidden: [T or more, hidden], the hidden states of its tokens after the final norm, which
                may be overwritten.
            counts: how many tokens each of the plan's `samples` got; None: one each.
        """
