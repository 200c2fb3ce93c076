"""The interface of a structured output that is being followed, as the scheduler sees it."""

from __future__ import annotations

from typing import Protocol

from shmllm.outputs.columns import FinishReason


class Constraint(Protocol):
    """The state of one request's grammar.

    The worker creates it and masks tokens with it. The request passes every sampled token to
    `take`.

    Attributes:
        error: why the request cannot continue; an empty string if it can.
    """

    error: str

    def take(self, token_id: int) -> FinishReason:
        """Advance by one sampled token.

        Returns:
            NONE if the output continues, STOP if the grammar allows no further token but those
            that end an output, ERROR if the request cannot continue; `error` then says why. An
            end-of-sequence token may follow a STOP, which then is the result again.
        """
        ...
