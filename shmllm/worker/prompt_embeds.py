"""Prompts given as embeddings: puts them where the model would look up those of token ids.

Owns which row has which, from admission until the row is given to another request.
"""

from __future__ import annotations

import torch

from shmllm.core.plan import StepPlan
from shmllm.errors import RequestError
from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import StepInputs

LARGEST = 1e15
"""Squares of embeddings are added up in float32."""


class EmbedsByRow:
    """No cost but one look for steps without such requests."""

    def __init__(self) -> None:
        self._by_row: dict[int, torch.Tensor] = {}

    def update(self, plan: StepPlan) -> None:
        """Take in the step's admissions."""
        for admission in plan.new_requests:
            if admission.embeds is not None:
                self._by_row[admission.row] = admission.embeds
            elif self._by_row:
                self._by_row.pop(admission.row, None)

    def lay_over(self, hidden: torch.Tensor, token_ids: LongArray, inputs: StepInputs) -> None:
        """Put those of the step's tokens into `hidden`, [T, hidden], and mark their `token_ids`
        as not to be looked up: -1."""
        if not self._by_row:
            return
        for index, row in enumerate(inputs.rows.tolist()):
            given = self._by_row.get(row)
            if given is None:
                continue
            first = int(inputs.first_tokens[index])
            start = int(inputs.positions[first])
            count = min(int(inputs.counts[index]), len(given) - start)
            if count > 0:
                hidden[first : first + count] = given[start : start + count]
                token_ids[first : first + count] = -1


def check_prompt_embeds(
    embeds: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The embeddings in the model's dtype.

    Raises:
        RequestError: another shape, no floating numbers, or values that would make keys and
            values of the cache infinite or NaN: these would reach other requests, since what
            attention masks has to be finite.
    """
    if tuple(embeds.shape) != shape or not embeds.dtype.is_floating_point:
        raise RequestError(
            f"prompt_embeds must be floating numbers of shape {list(shape)} (tokens, hidden "
            f"size), got {embeds.dtype} of shape {list(embeds.shape)}"
        )
    embeds = embeds.to(dtype)
    largest = float(embeds.abs().max())
    if not largest < LARGEST:
        raise RequestError(
            f"prompt_embeds has values that {dtype} cannot compute with: the largest is {largest:g}"
        )
    return embeds
