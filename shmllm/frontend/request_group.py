"""The requests of one caller of a front end, and what keeps their states up to date."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Protocol

from shmllm.client.protocol import EngineOutput
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.request_state import RequestState


class Outputs(Protocol):
    """The methods of OutputProcessor that the dispatcher uses."""

    def add_all(
        self,
        request: PreparedRequest,
        index: int,
        streaming: bool,
        time_tokens: bool = False,
        request_id: str | None = None,
    ) -> list[RequestState]: ...
    def discard(self, numbers: Iterable[int]) -> list[int]: ...
    def discard_all_but(self, numbers: Container[int]) -> None: ...
    def process(self, events: Iterable[EngineOutput]) -> tuple[list[RequestState], list[int]]: ...


class RequestGroup:
    """The requests of one caller.

    Args:
        is_kept: the caller goes on with the group after an exception. Other callers discard it.

    Attributes:
        num_open: the number of requests whose end the caller has not collected.
    """

    __slots__ = ("_changed", "_num_ended", "_running", "is_kept", "num_open")

    def __init__(self, is_kept: bool = False) -> None:
        self.is_kept = is_kept
        self.num_open = 0
        self._running: dict[int, RequestState] = {}
        self._changed: dict[int, RequestState] = {}
        self._num_ended = 0

    def _take(self) -> list[RequestState]:
        changed = list(self._changed.values())
        # No call may come between these statements.
        self._changed = {}
        self.num_open -= self._num_ended
        self._num_ended = 0
        return changed
