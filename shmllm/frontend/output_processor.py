"""Turns the engine's columns into the state of each request: tokens, text, ending.

The one place that loops over output rows. Text of a request is decoded as its tokens
arrive only if someone needs it then (stop strings, streaming), else once at its end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from shmllm.engine.client import Event
from shmllm.frontend.detokenizer import IncrementalDetokenizer, OutputText
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.tokenizer import Tokenizer
from shmllm.outputs import (
    CompletionOutput,
    FinishReason,
    OutputColumns,
    RequestMetrics,
    RequestOutput,
)


class RequestState:
    """One request on its way.

    Args:
        number: its number towards the engine.
        index: its place in the caller's list.
        request: what was asked.
        text: its text so far.
        streaming: decode tokens as they come.

    Attributes:
        token_times: when the engine published each token, in seconds of the monotonic
            clock; None unless somebody measures.
        silent_stop_ids: tokens that end the request without being its `stop_reason`.
    """

    __slots__ = (
        "error",
        "finish_reason",
        "index",
        "metrics",
        "num_cached_tokens",
        "num_decoded",
        "number",
        "request",
        "silent_stop_ids",
        "stop_reason",
        "text",
        "text_is_urgent",
        "token_ids",
        "token_times",
    )

    def __init__(
        self, number: int, index: int, request: PreparedRequest, text: OutputText, streaming: bool
    ) -> None:
        self.number = number
        self.index = index
        self.request = request
        self.text = text
        self.text_is_urgent = streaming or bool(request.params.stop)
        self.token_ids: list[int] = []
        self.token_times: list[float] | None = None
        self.silent_stop_ids: frozenset[int] = frozenset()
        self.num_decoded = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.metrics = RequestMetrics(arrival_time=time.monotonic())

    def output(self) -> RequestOutput:
        """The request as it stands, in the form that users get."""
        completion = CompletionOutput(
            index=0,
            text=self.text.text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        return RequestOutput(
            request_id=str(self.number),
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[completion],
            finished=self.finish_reason is not None,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
            error=self.error,
        )

    def take(self, token_ids: list[int], finish: int, time_s: float) -> bool:
        """Add a step's tokens and note an ending; True if a stop string ends the request
        here, while the engine goes on with it."""
        self.token_ids += token_ids
        if self.metrics.first_token_time is None and token_ids:
            self.metrics.first_token_time = time_s
        self.metrics.last_token_time = time_s
        if self.token_times is not None:
            self.token_times += [time_s] * len(token_ids)
        if finish:
            self.finish_reason = FinishReason(finish).text
            last = self.token_ids[-1] if finish == FinishReason.STOP else None
            if last in self.request.params.stop_token_ids and last not in self.silent_stop_ids:
                self.stop_reason = last
        if self.request.params.detokenize and (finish or self.text_is_urgent):
            self._decode(finish)
            if self.text.match is not None and self.stop_reason is None:
                self.finish_reason, self.stop_reason = "stop", self.text.match.stop
                return not finish
        return False

    def _decode(self, finish: int) -> None:
        """The token that ended the request is not part of the text, unless asked for."""
        params = self.request.params
        end = len(self.token_ids)
        if finish == FinishReason.STOP and not params.include_stop_str_in_output:
            end -= 1
        may_stop = len(self.token_ids) > params.min_tokens
        self.text.append(self.token_ids[self.num_decoded : end], check_stop=may_stop)
        self.num_decoded = end
        if finish:
            self.text.finish(check_stop=may_stop)


class OutputProcessor:
    """The unfinished requests of one front end.

    Args:
        tokenizer: for their text.
        eos_token_ids: the model's own; ending with one is no `stop_reason`.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._states: dict[int, RequestState] = {}
        self._next_number = 0

    def add(
        self, request: PreparedRequest, index: int, streaming: bool, time_tokens: bool = False
    ) -> RequestState:
        """Give a request its number."""
        params = request.params
        detokenizer = IncrementalDetokenizer(
            self._tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
        )
        text = OutputText(detokenizer, params.stop, include_stop=params.include_stop_str_in_output)
        state = RequestState(self._next_number, index, request, text, streaming)
        state.token_times = [] if time_tokens else None
        if not params.ignore_eos:
            state.silent_stop_ids = self._eos_token_ids
        self._states[state.number] = state
        self._next_number += 1
        return state

    def discard(self, numbers: Iterable[int]) -> list[int]:
        """Forget requests, whatever still comes of them; returns those that were known."""
        return [number for number in numbers if self._states.pop(number, None) is not None]

    def process(self, events: Iterable[Event]) -> tuple[list[RequestState], list[int]]:
        """Apply events in order.

        Returns:
            (states that changed, each once, finished ones included; numbers of the requests
            that the engine has to abort because a stop string ended them).
        """
        changed: dict[int, RequestState] = {}
        to_abort: list[int] = []
        for event in events:
            if isinstance(event, OutputColumns):
                self._process_columns(event, changed, to_abort)
            elif (state := self._states.pop(event.number, None)) is not None:
                state.finish_reason, state.error = FinishReason.ERROR.text, event.message
                changed[state.number] = state
        return list(changed.values()), to_abort

    def _process_columns(
        self, columns: OutputColumns, changed: dict[int, RequestState], to_abort: list[int]
    ) -> None:
        time_s = columns.time_ns / 1e9
        for row, cached in zip(columns.cached_rows, columns.cached_counts, strict=True):
            if (state := self._states.get(columns.numbers[row])) is not None:
                state.num_cached_tokens = cached
        offset = 0
        for number, count, finish in zip(
            columns.numbers, columns.counts, columns.finishes, strict=True
        ):
            token_ids = columns.token_ids[offset : offset + count]
            offset += count
            state = self._states.get(number)
            if state is None:
                continue
            if state.take(token_ids, finish, time_s):
                to_abort.append(number)
            if state.finish_reason is not None:
                del self._states[number]
            changed[number] = state
