"""Prompts given as embeddings, which replace the embeddings that the model looks up by token id.

This module owns the embeddings of each row, until the row is assigned to another request.
"""

from __future__ import annotations

import torch

from shmllm.core.plan import StepPlan
from shmllm.errors import RequestError
from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import EMBEDDED
from shmllm.worker.step_inputs import StepInputs

LARGEST = 1e15
"""Larger embeddings overflow: RMS norms add up squares in float32."""


FoundEmbeds = tuple[slice, torch.Tensor]
"""Some of a step's tokens, and their embeddings, (tokens, hidden)."""


class EmbedsByRow:
    """The prompt embeddings by row. A step without such requests costs one comparison.

    Args:
        scale: the factor of the embeddings, for models that multiply them.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale
        self._by_row: dict[int, torch.Tensor] = {}

    def update(self, plan: StepPlan) -> None:
        """Store the embeddings of a step's new requests."""
        for request in plan.new_requests:
            if request.embeds is not None:
                self._by_row[request.row] = request.embeds
            elif self._by_row:
                self._by_row.pop(request.row, None)

    def copy_into(self, hidden: torch.Tensor, token_ids: LongArray, inputs: StepInputs) -> None:
        """Copy the embeddings of a step's tokens to where the model reads them.

        Args:
            hidden: (T or more, hidden), where the embeddings go.
            token_ids: (T or more,) int64; set to EMBEDDED for tokens with embeddings.
            inputs: the step's inputs, with T tokens.
        """
        self.copy(hidden, self.find(token_ids, inputs))

    def find(self, token_ids: LongArray, inputs: StepInputs) -> list[FoundEmbeds]:
        """Return the embeddings of a step's tokens, and set the tokens to EMBEDDED; see
        `copy_into`."""
        found: list[FoundEmbeds] = []
        for index, row in enumerate(inputs.rows.tolist() if self._by_row else ()):
            given = self._by_row.get(row)
            if given is None:
                continue
            first = int(inputs.first_tokens[index])
            start = int(inputs.positions[first])
            count = min(int(inputs.counts[index]), len(given) - start)
            if count > 0:
                token_ids[first : first + count] = EMBEDDED
                found.append((slice(first, first + count), given[start : start + count]))
        return found

    def copy(self, hidden: torch.Tensor, found: list[FoundEmbeds]) -> None:
        """Copy what `find` returned to `hidden`, (T or more, hidden)."""
        for tokens, given in found:
            hidden[tokens] = given
            if self._scale != 1:
                hidden[tokens] *= self._scale


def check_prompt_embeds(
    embeds: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Convert a prompt's embeddings to the model's dtype.

    Args:
        embeds: the embeddings.
        shape: the expected shape, (tokens, hidden size).
        dtype: the model's dtype.

    Raises:
        RequestError: the shape is another one, the dtype is not a floating one, or values are so
            large that keys and values in the KV cache would become infinite or NaN. These would
            reach other requests that get the same blocks later, since attention multiplies the
            values of masked slots by zero.
    """
    if tuple(embeds.shape) != shape or not embeds.dtype.is_floating_point:
        raise RequestError(
            f"prompt_embeds must be floating numbers of shape {list(shape)} (tokens, hidden "
            f"size), got {embeds.dtype} of shape {list(embeds.shape)}"
        )
    return check_values("prompt_embeds has", embeds.to(dtype))


def check_values(subject: str, embeds: torch.Tensor) -> torch.Tensor:
    """Check embeddings in the model's dtype, and return them.

    Args:
        subject: whose they are, with the verb, for messages.
        embeds: the embeddings, at least one.

    Raises:
        RequestError: values are too large; see `check_prompt_embeds`.
    """
    largest = float(embeds.abs().max())
    if not largest < LARGEST:
        raise RequestError(
            f"{subject} values that {embeds.dtype} cannot compute with: the largest is {largest:g}"
        )
    return embeds
