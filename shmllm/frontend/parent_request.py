"""ParentRequest: what the completions of one prompt have in common."""

from __future__ import annotations

from typing import Generic, TypeVar

Completion = TypeVar("Completion")


class ParentRequest(Generic[Completion]):
    """The completions of one prompt.

    Args:
        request_id: the id in the request's outputs.
        size: the number of completions.

    Attributes:
        num_open: the number of completions that have not ended.
        states: the completions by index. None for a single completion: a list would be a
            reference cycle in each request, which only the garbage collector can free.
    """

    __slots__ = ("num_open", "request_id", "states")

    def __init__(self, request_id: str, size: int) -> None:
        self.request_id = request_id
        self.states: list[Completion] | None = None if size == 1 else []
        self.num_open = 0

    def add(self, state: Completion) -> int:
        """Add the next completion. Returns its index."""
        self.num_open += 1
        if self.states is None:
            return 0
        self.states.append(state)
        return len(self.states) - 1
