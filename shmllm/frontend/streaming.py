"""`LLM.stream`: any number of prompts through an engine, a bounded number at a time.

Owns taking prompts from an iterable, how many are under way, and the order of results.
Memory does not grow with the number of prompts. Must not know the engine.
"""

from __future__ import annotations

import copy
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from shmllm.errors import RequestError
from shmllm.frontend.dispatcher import POLL_S, Dispatcher, RequestGroup
from shmllm.frontend.emitted import next_outputs
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.input_processor import PreparedRequest, Prompt, as_list
from shmllm.frontend.request_state import RequestState
from shmllm.outputs.request import CompletionOutput, RequestOutput
from shmllm.params.sampling import RequestOutputKind, SamplingParams

OnError = Literal["raise", "yield"]
ParamsSource = SamplingParams | Iterable[SamplingParams] | None

CHUNK_SIZE = 32
CHUNK_S = 0.01
WAVES = 2
REORDER_FACTOR = 4


@dataclass(slots=True)
class FailedPrompt:
    """A prompt that could not be submitted, in the place of the state that it has not."""

    index: int
    prompt: object
    error: str
    ends_request: bool = True

    def raise_error(self, name: str) -> None:
        """Never asked: such prompts are made only where errors are not raised."""

    def next_output(self) -> RequestOutput:
        """As for a request that the engine refused; nothing is known of its tokens."""
        return RequestOutput(
            request_id=f"prompt-{self.index}",
            prompt=self.prompt if isinstance(self.prompt, str) else None,
            prompt_token_ids=[],
            outputs=[CompletionOutput(0, "", [], finish_reason="error")],
            finished=True,
            error=self.error,
            prompt_index=self.index,
        )


Item = RequestState | FailedPrompt
Taken = tuple[int, Prompt, SamplingParams]
Prepare = Callable[
    [Sequence[Prompt], Sequence[SamplingParams], Sequence[str]], list[PreparedRequest]
]


class PromptSource:
    """Prompts and their parameters, in pairs, taken a few at a time.

    Args:
        prompts: one prompt, or any iterable of them.
        params: one for all, or an iterable aligned with the prompts.
        default: the parameters if `params` is None.

    Attributes:
        is_exhausted: the iterable has ended.
        position: index of the prompt that comes next.

    Raises:
        RequestError: no prompts, or lists of different lengths.
    """

    def __init__(
        self, prompts: Prompt | Iterable[Prompt], params: ParamsSource, default: SamplingParams
    ) -> None:
        if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
            raise RequestError(f"prompts must be an iterable, got {type(prompts).__name__}")
        is_list = isinstance(prompts, Sequence | dict)
        self._prompts: Iterator[Any] = iter(as_list(prompts) if is_list else prompts)  # type: ignore[arg-type]
        params = default if params is None else params
        if isinstance(params, SamplingParams):
            self._params: Iterator[SamplingParams] = itertools.repeat(params)
        elif isinstance(params, str | bytes) or not isinstance(params, Iterable):
            raise RequestError(
                "sampling_params must be a SamplingParams or an iterable of them, got "
                f"{type(params).__name__}"
            )
        else:
            self._params = iter(params)
        if is_list and isinstance(params, Sequence):
            _check_lengths(len(as_list(prompts)), len(params))  # type: ignore[arg-type]
        self.is_exhausted = False
        self.position = 0

    def take(self, most: int) -> list[Taken]:
        """(index, prompt, parameters) of the next ones: at most `most`, and no more than
        come quickly, so that one that comes slowly does not hold up those before it."""
        taken: list[Taken] = []
        deadline = time.monotonic() + CHUNK_S
        while len(taken) < most and not (taken and time.monotonic() >= deadline):
            try:
                prompt = next(self._prompts)
            except StopIteration:
                self.is_exhausted = True
                break
            taken.append((self.position, prompt, self._next_params()))
            self.position += 1
        return taken

    def _next_params(self) -> SamplingParams:
        params = next(self._params, None)
        if params is None:
            raise RequestError(f"sampling_params ended before prompt {self.position}")
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params {self.position} is a {type(params).__name__}, not a "
                "SamplingParams"
            )
        return params


def _check_lengths(num_prompts: int, num_params: int) -> None:
    if num_prompts != num_params:
        raise RequestError(
            f"{num_prompts} prompts and {num_params} sampling_params: give one "
            "SamplingParams for all prompts, or one for each"
        )


class _AsTheyCome:
    """Results at once."""

    def room(self, position: int) -> int:
        return sys.maxsize

    def put(self, items: Iterable[Item]) -> Iterable[Item]:
        return items


class _InOrder:
    """Results in the order of the prompts; those that came too early are held, and while
    there are too many of these no more prompts are taken.

    Args:
        most: requests held and under way, at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._next = 0
        self._held: dict[int, dict[int, Item]] = {}

    def room(self, position: int) -> int:
        return self._next + self._most - position

    def put(self, items: Iterable[Item]) -> Iterable[Item]:
        for item in items:
            self._held.setdefault(item.index, {})[id(item)] = item
        while there := self._held.pop(self._next, None):
            yield from there.values()
            if not any(item.ends_request for item in there.values()):
                return
            self._next += 1


class Stream:
    """One call of `LLM.stream`.

    Args:
        dispatcher: runs the requests.
        prepare: checks and tokenizes prompts with parameters and names.
        source: the prompts.
        max_in_flight: requests under way, at most.
        ordered: results in the order of the prompts.
        on_error: "raise" ends the stream at a prompt that cannot be served, "yield" makes
            an output of it.
        output_kind: what outputs hold; None: what the parameters say.
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
        self._order = _InOrder(max_in_flight * REORDER_FACTOR) if ordered else _AsTheyCome()

    def run(self) -> Iterator[RequestOutput]:
        """The results; leaving it early aborts what runs."""
        group, source = self._group, self._source
        try:
            while group.num_open or not source.is_exhausted:
                yield from self._outputs(self._submit_some())
                is_full = source.is_exhausted or self._room() <= 0
                yield from self._outputs(self._collect(POLL_S if is_full else 0.0))
        finally:
            self._dispatcher.leave(group)

    def _room(self) -> int:
        """How many more prompts may be taken now."""
        free = self._max_in_flight - self._group.num_open
        return min(free, self._order.room(self._source.position))

    def _submit_some(self) -> list[Item]:
        """Submit a chunk of prompts; returns those that cannot be."""
        failed: list[Item] = []
        if self._source.is_exhausted or (room := self._room()) <= 0:
            return failed
        for index, request in self._prepared(self._source.take(min(room, CHUNK_SIZE))):
            if isinstance(request, FailedPrompt):
                failed.append(request)
            else:
                streaming = _is_shown(request)
                self._dispatcher.submit(self._group, request, index, streaming=streaming)
        return failed

    def _prepared(self, taken: list[Taken]) -> Iterator[tuple[int, PreparedRequest | FailedPrompt]]:
        """All at once, which is fastest; where one of them is bad, one by one."""
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
            [prompt for _, prompt, _ in taken],
            [self._checked(index, params) for index, _, params in taken],
            [f"prompt {index}" for index, _, _ in taken],
        )

    def _checked(self, index: int, params: SamplingParams) -> SamplingParams:
        """Parameters of one prompt, with the kind of output that is wanted. Mostly they are
        the same object as before, which need not be looked at again."""
        if params is not self._given:
            try:
                params.check()
            except RequestError as error:
                raise RequestError(f"sampling_params {index}: {error}") from error
            self._given, self._used = params, copy.copy(params)
            self._used.output_kind = self._kind_for(params)
        return self._used

    def _kind_for(self, params: SamplingParams) -> RequestOutputKind:
        """CUMULATIVE is the default of SamplingParams, so there it says nothing."""
        if self._output_kind is not None:
            return self._output_kind
        is_delta = params.output_kind is RequestOutputKind.DELTA
        return RequestOutputKind.DELTA if is_delta else RequestOutputKind.FINAL_ONLY

    def _collect(self, timeout_s: float) -> list[Item]:
        changed = self._dispatcher.collect(self._group, timeout_s)
        return [state for state in changed if state.ends_request or _is_shown(state.request)]

    def _outputs(self, items: list[Item]) -> list[RequestOutput]:
        with self._dispatcher.reading():
            for item in items:
                if self._raises:
                    item.raise_error(f"prompt {item.index}")
            return next_outputs(self._order.put(items))


def stream(
    front_end: FrontEnd,
    prompts: Prompt | Iterable[Prompt],
    sampling_params: ParamsSource,
    *,
    ordered: bool,
    max_in_flight: int | None,
    on_error: OnError,
    output_kind: RequestOutputKind | None,
) -> Iterator[RequestOutput]:
    """See `LLM.stream`. Checks its arguments at once, not when the first result is wanted."""
    front_end.dispatcher.check_open()
    if max_in_flight is None:
        max_in_flight = WAVES * front_end.info.max_num_seqs
    if not isinstance(max_in_flight, int) or max_in_flight < 1:
        raise RequestError(f"max_in_flight must be a whole number from 1, got {max_in_flight!r}")
    if on_error not in get_args(OnError):
        raise RequestError(f"on_error is 'raise' or 'yield', got {on_error!r}")
    if output_kind is not None and not isinstance(output_kind, RequestOutputKind):
        raise RequestError(f"output_kind is a RequestOutputKind, got {output_kind!r}")
    return Stream(
        front_end.dispatcher,
        front_end.inputs.prepare,
        PromptSource(prompts, sampling_params, front_end.default_sampling_params()),
        max_in_flight=max_in_flight,
        ordered=ordered,
        on_error=on_error,
        output_kind=output_kind,
    ).run()


def _is_shown(request: PreparedRequest) -> bool:
    """Whether there are outputs before the last one."""
    return request.params.output_kind is not RequestOutputKind.FINAL_ONLY
