"""Queued requests whose results the caller collects later, for `LLM.enqueue`."""

from __future__ import annotations

from collections.abc import Sequence

from shmllm.frontend.dispatcher import POLL_S, Dispatcher
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.progress import Shown, progress_of
from shmllm.frontend.request_group import RequestGroup
from shmllm.frontend.request_outputs import request_output
from shmllm.frontend.request_state import RequestState
from shmllm.outputs.request import RequestOutput


class Enqueued:
    """
    Args:
        dispatcher: runs the requests.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._group = RequestGroup(is_kept=True)
        self._states: list[RequestState] = []

    @property
    def num_open(self) -> int:
        """How many of the requests have not ended yet."""
        return self._group.num_open

    def add(self, requests: Sequence[PreparedRequest]) -> list[str]:
        """Queue requests after the earlier ones. Returns their request ids."""
        before = self._states
        added: list[RequestState] = []
        try:
            for request in requests:
                states = self._dispatcher.submit(self._group, request, len(before) + len(added))
                added.append(states[0])
            names = [state.parent.request_id for state in added]
            self._states = before + added
            return names
        except BaseException:
            self._states = before
            self._dispatcher.discard_from(self._group, len(before))
            raise

    def wait(self, show_progress: Shown) -> list[RequestOutput]:
        """Wait for all requests and return their outputs. After an interrupt, it can be called
        again."""
        states, group = self._states, self._group
        with progress_of(len(states), show_progress) as progress:
            while group.num_open:
                progress.update(self._dispatcher.collect(group, POLL_S))
        self._states = []
        return [request_output(state) for state in states]
