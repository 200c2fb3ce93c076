"""The interface of what guesses the tokens behind a request's last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shmllm.core.request import Request

PENDING = -1
"""Stands for a token that the runner drafts when it executes the step."""


class Drafter(Protocol):
    """Guesses tokens. A wrong guess costs time and changes nothing else.

    Attributes:
        catches_up: whether a step with drafts takes longer if the request had none in the step
            before, because a model computes what it has missed.
    """

    @property
    def catches_up(self) -> bool: ...

    def draft(self, request: Request, most: int) -> Sequence[int]:
        """The tokens that probably follow the known ones of a request, at most `most`.

        It may keep what it knows of the request in `request.drafting`.
        """


class RunnerDrafter:
    """Leaves the guess to the runner, whose model drafts when a step is executed."""

    catches_up = True

    def draft(self, request: Request, most: int) -> Sequence[int]:
        """As many places as there may be tokens."""
        return [PENDING] * most
