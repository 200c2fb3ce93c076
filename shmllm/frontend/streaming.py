"""`LLM.stream`: runs any number of prompts through an engine, a bounded number at a time.

This module owns the number of prompts in flight and the order of the results. Its memory does not
grow with the number of prompts. It must not know the engine.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from shmllm.errors import RequestError
from shmllm.frontend.dispatcher import POLL_S, Dispatcher
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.items_in_flight import ItemsInFlight
from shmllm.frontend.priorities import check_priority, set_priorities
from shmllm.frontend.prompt_source import AdaptersSource, ParamsSource, PromptSource, Taken
from shmllm.frontend.prompts import Prompt
from shmllm.frontend.request_group import RequestGroup
from shmllm.frontend.request_outputs import join_completions, next_output
from shmllm.frontend.request_state import RequestState
from shmllm.outputs.request import CompletionOutput, RequestOutput
from shmllm.params.lora import LoRARequest
from shmllm.params.sampling import RequestOutputKind, SamplingParams

OnError = Literal["raise", "yield"]

CHUNK_SIZE = 32
"""The largest number of prompts to submit between two polls."""
IN_FLIGHT_FACTOR = 2
"""The default of `max_in_flight`, as a multiple of the engine's `num_rows`."""
REORDER_FACTOR = 4
"""The number of results that an ordered stream may hold back, as a multiple of max_in_flight."""


@dataclass(slots=True)
class FailedPrompt:
    """A prompt that could not be submitted. It takes the place of a RequestState.

    Attributes:
        index: the position of the prompt in the iterable.
        prompt: the prompt as the caller gave it.
        error: the error message.
        ends_request: always True: the prompt has no further outputs.
    """

    index: int
    prompt: object
    error: str
    ends_request: bool = True

    def raise_error(self, name: str) -> None:
        """Do nothing: a stream that raises errors creates no FailedPrompt."""

    def output(self) -> RequestOutput:
        """An output like that of a request that the engine refused, without token ids."""
        return RequestOutput(
            request_id=f"prompt-{self.index}",
            prompt=self.prompt if isinstance(self.prompt, str) else None,
            prompt_token_ids=[],
            prompt_logprobs=None,
            outputs=[CompletionOutput(0, "", [], finish_reason="error")],
            finished=True,
            error=self.error,
            prompt_index=self.index,
        )


Item = RequestState | FailedPrompt
Prepare = Callable[
    [Sequence[Prompt], Sequence[SamplingParams], Sequence[str], Sequence[LoRARequest | None]],
    list[PreparedRequest],
]


class _Unordered:
    """Yields results immediately."""

    def room(self, position: int) -> int:
        return sys.maxsize

    def put(self, items: Iterable[Item]) -> Iterable[Item]:
        return items


class _Ordered:
    """Yields results in the order of the prompts, and holds back those that are too early.

    Args:
        most: the largest number of prompts between the oldest unfinished one and the next one
            to read. No further prompts are read when it is reached.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._next = 0
        self._held: dict[int, dict[int, Item]] = {}

    def room(self, position: int) -> int:
        """How many more prompts may be read, if `position` is the index of the next one."""
        return self._next + self._most - position

    def put(self, items: Iterable[Item]) -> Iterable[Item]:
        """Add changed states. Yields those, old and new, whose turn it is."""
        for item in items:
            self._held.setdefault(item.index, {})[id(item)] = item
        while due := self._held.pop(self._next, None):
            yield from due.values()
            if not any(item.ends_request for item in due.values()):
                return
            self._next += 1


class Stream:
    """One call of `LLM.stream`.

    Args:
        dispatcher: runs the requests.
        prepare: checks and tokenizes prompts, given their parameters and names.
        source: the prompts and their parameters.
        max_in_flight: the largest number of unfinished requests.
        ordered: yield results in the order of the prompts.
        on_error: "raise" ends the stream at a prompt that fails; "yield" yields an output with
            the error.
        output_kind: the contents of outputs; None uses the `output_kind` of the parameters.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        prepare: Prepare,
        source: PromptSource,
        *,
        max_in_flight: int,
        ordered: bool,
        on_error: OnError,
        output_kind: RequestOutputKind | None,
    ) -> None:
        self._dispatcher = dispatcher
        self._prepare = prepare
        self._source = source
        self._max_in_flight = max_in_flight
        self._raises = on_error == "raise"
        self._output_kind = output_kind
        self._given: SamplingParams | None = None
        self._group = RequestGroup()
        self._items_in_flight = ItemsInFlight()
        self._order = _Ordered(max_in_flight * REORDER_FACTOR) if ordered else _Unordered()

    def run(self) -> Iterator[RequestOutput]:
        """Yield the results. Closing the generator aborts the unfinished requests."""
        try:
            # No loop stands here; see `FrontEnd.serve`.
            yield from self._polls()
        finally:
            self._dispatcher.discard_group(self._group)

    def _polls(self) -> Iterator[RequestOutput]:
        group, source = self._group, self._source
        while group.num_open or not source.is_exhausted:
            yield from self._outputs(self._submit_some())
            is_full = source.is_exhausted or self._room() <= 0
            yield from self._outputs(self._collect(POLL_S if is_full else 0.0))

    def _room(self) -> int:
        """How many more prompts may be read now."""
        if self._items_in_flight.is_full:
            return 0
        free = self._max_in_flight - self._group.num_open
        return min(free, self._order.room(self._source.position))

    def _submit_some(self) -> list[Item]:
        """Submit a chunk of prompts. Returns the prompts that could not be submitted."""
        failed: list[Item] = []
        if self._source.is_exhausted or (room := self._room()) <= 0:
            return failed
        for index, request in self._prepared(self._source.take(min(room, CHUNK_SIZE))):
            if isinstance(request, FailedPrompt):
                failed.append(request)
            else:
                self._items_in_flight.add(index, request.submitted.items)
                streaming = _has_early_outputs(request)
                self._dispatcher.submit(self._group, request, index, streaming=streaming)
        return failed

    def _prepared(self, taken: list[Taken]) -> Iterator[tuple[int, PreparedRequest | FailedPrompt]]:
        """Prepare the prompts in one call, which is fastest, or one by one if that fails."""
        try:
            requests = self._prepare_all(taken)
        except RequestError:
            if self._raises:
                raise
        else:
            yield from ((item[0], request) for item, request in zip(taken, requests, strict=True))
            return
        for item in taken:
            try:
                yield item[0], self._prepare_all([item])[0]
            except RequestError as error:
                yield item[0], FailedPrompt(item[0], item[1], str(error))

    def _prepare_all(self, taken: list[Taken]) -> list[PreparedRequest]:
        return self._prepare(
            [prompt for _, prompt, _, _ in taken],
            [self._checked(index, params) for index, _, params, _ in taken],
            [f"prompt {index}" for index, _, _, _ in taken],
            [adapter for _, _, _, adapter in taken],
        )

    def _checked(self, index: int, params: SamplingParams) -> SamplingParams:
        """The checked parameters of one prompt, with the `output_kind` of this stream.

        Usually all prompts have the same parameter object, which is checked only once.
        """
        if params is not self._given:
            try:
                params.check()
            except RequestError as error:
                raise RequestError(f"sampling_params {index}: {error}") from error
            self._given, self._used = params, copy.copy(params)
            self._used.output_kind = self._kind_for(params)
        return self._used

    def _kind_for(self, params: SamplingParams) -> RequestOutputKind:
        """The `output_kind` for the parameters of a prompt. CUMULATIVE there means FINAL_ONLY here:
        it is the default of SamplingParams, so most callers did not choose it."""
        if self._output_kind is not None:
            return self._output_kind
        is_delta = params.output_kind is RequestOutputKind.DELTA
        return RequestOutputKind.DELTA if is_delta else RequestOutputKind.FINAL_ONLY

    def _collect(self, timeout_s: float) -> list[Item]:
        changed = self._dispatcher.collect(self._group, timeout_s)
        for state in changed:
            if state.ends_request:
                self._items_in_flight.remove(state.index)
        return [s for s in changed if s.ends_request or _has_early_outputs(s.request)]

    def _outputs(self, items: list[Item]) -> list[RequestOutput]:
        with self._dispatcher.reading():
            self._raise_first_error(items)
            return join_completions(map(_next_output, self._order.put(items)))

    def _raise_first_error(self, items: list[Item]) -> None:
        if self._raises:
            for item in items:
                item.raise_error(f"prompt {item.index}")


def _next_output(item: Item) -> RequestOutput | None:
    return item.output() if isinstance(item, FailedPrompt) else next_output(item)


def stream(
    front_end: FrontEnd,
    prompts: Prompt | Iterable[Prompt],
    sampling_params: ParamsSource,
    *,
    ordered: bool,
    max_in_flight: int | None,
    on_error: OnError,
    output_kind: RequestOutputKind | None,
    priority: int | None,
    lora_request: AdaptersSource = None,
) -> Iterator[RequestOutput]:
    """The generator of `LLM.stream`. Checks its arguments immediately, not at the first result."""
    front_end.dispatcher.check_open()
    if max_in_flight is None:
        max_in_flight = IN_FLIGHT_FACTOR * front_end.info.num_rows
    if not isinstance(max_in_flight, int) or max_in_flight < 1:
        raise RequestError(f"max_in_flight must be a whole number from 1, got {max_in_flight!r}")
    if on_error not in get_args(OnError):
        raise RequestError(f"on_error is 'raise' or 'yield', got {on_error!r}")
    if output_kind is not None and not isinstance(output_kind, RequestOutputKind):
        raise RequestError(f"output_kind is a RequestOutputKind, got {output_kind!r}")
    check_priority(priority, front_end.info)

    def prepare(
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        names: Sequence[str],
        adapters: Sequence[LoRARequest | None],
    ) -> list[PreparedRequest]:
        requests = front_end.inputs.prepare(prompts, params, names)
        front_end.add_adapters(front_end.adapters.set(requests, adapters))
        return set_priorities(requests, priority, front_end.info)

    return Stream(
        front_end.dispatcher,
        prepare,
        PromptSource(prompts, sampling_params, front_end.default_sampling_params(), lora_request),
        max_in_flight=max_in_flight,
        ordered=ordered,
        on_error=on_error,
        output_kind=output_kind,
    ).run()


def _has_early_outputs(request: PreparedRequest) -> bool:
    """Whether the request has outputs before the last one."""
    return request.params.output_kind is not RequestOutputKind.FINAL_ONLY
