"""Turns the engine's columns into the state of each request: tokens, text, ending.

The one place that loops over output rows. Text of a request is decoded as its tokens
arrive only if someone needs it then (stop strings, streaming), else once at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from shmllm.client.protocol import EngineOutput
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.request_state import ParentRequest, RequestState
from shmllm.frontend.text.token_texts import TokenTexts
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.outputs.columns import Embeddings, OutputColumns
from shmllm.outputs.logprobs import LogprobColumns, PromptLogprobs
from shmllm.wire.messages import WeightVersion


class OutputProcessor:
    """The unfinished requests of one front end.

    Args:
        tokenizer: for their text.
        eos_token_ids: the model's own; ending with one is no `stop_reason`.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._token_texts = TokenTexts(tokenizer)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._states: dict[int, RequestState] = {}
        self._next_number = 0
        self._next_request = 0
        self._version: int | str = 0

    def add_all(
        self,
        request: PreparedRequest,
        index: int,
        streaming: bool,
        time_tokens: bool = False,
        request_id: str | None = None,
    ) -> list[RequestState]:
        """A state with a number for each of the request's `n` completions.

        Args:
            request_id: what users know it by; None counts requests.
        """
        name = str(self._next_request) if request_id is None else request_id
        family = ParentRequest(name, request.params.n)
        self._next_request += 1
        each = [request] if request.params.n == 1 else request.children()
        return [self._add(child, index, streaming, time_tokens, family) for child in each]

    def add(
        self, request: PreparedRequest, index: int, streaming: bool, time_tokens: bool = False
    ) -> RequestState:
        """As `add_all`, for a request for one completion."""
        (state,) = self.add_all(request, index, streaming, time_tokens)
        return state

    def _add(
        self,
        request: PreparedRequest,
        index: int,
        streaming: bool,
        time_tokens: bool,
        family: ParentRequest,
    ) -> RequestState:
        params = request.params
        state = RequestState(
            self._next_number,
            index,
            request,
            self._tokenizer,
            streaming,
            family,
            self._token_texts,
        )
        state.token_times = [] if time_tokens else None
        if not params.ignore_eos or params.structured_outputs is not None:
            state.silent_stop_ids = self._eos_token_ids
        self._states[state.number] = state
        self._next_number += 1
        return state

    def discard(self, numbers: Iterable[int]) -> list[int]:
        """Forget requests, whatever still comes of them; returns those that were known."""
        return [number for number in numbers if self._states.pop(number, None) is not None]

    def process(self, events: Iterable[EngineOutput]) -> tuple[list[RequestState], list[int]]:
        """Apply events in order.

        Returns:
            (states that changed, each once, finished ones included; numbers of the requests
            that the engine has to abort because a stop string ended them).
        """
        changed: dict[int, RequestState] = {}
        to_abort: list[int] = []
        for numbers, group in groupby(events, _plain_numbers):
            steps = list(group)
            if numbers is None or not self._process_plain(numbers, steps, changed):
                self._process_each(steps, changed, to_abort)
        return list(changed.values()), to_abort

    def _process_each(
        self, events: Iterable[EngineOutput], changed: dict[int, RequestState], to_abort: list[int]
    ) -> None:
        for event in events:
            if isinstance(event, OutputColumns):
                self._process_columns(event, changed, to_abort)
            elif isinstance(event, PromptLogprobs):
                self._process_prompt(event)
            elif isinstance(event, Embeddings):
                for number, vector in zip(event.numbers, event.vectors, strict=True):
                    if number in self._states:
                        self._states[number].vector = vector
            elif isinstance(event, WeightVersion):
                for state in self._states.values():
                    state.change_version(self._version, event.version)
                self._version = event.version
            elif (ended := self._states.pop(event.number, None)) is not None:
                ended.fail(event.message)
                ended.is_retryable = event.is_retryable
                ended.close(self._version)
                changed[ended.number] = ended

    def _process_plain(
        self, numbers: list[int], steps: list[Any], changed: dict[int, RequestState]
    ) -> bool:
        """Give requests their tokens of several plain steps at once. False, and nothing done,
        where it is not worth it, or a text may end a request on the way."""
        states = [self._states.get(number) for number in numbers]
        if len(steps) == 1 or any(s is not None and s.text_is_urgent for s in states):
            return False
        times_s = [columns.time_ns / 1e9 for columns in steps]
        by_request = zip(*(columns.token_ids for columns in steps), strict=True)
        for state, token_ids in zip(states, by_request, strict=True):
            if state is not None:
                state.take_more(token_ids, times_s)
                changed[state.number] = state
        return True

    def _process_columns(
        self, columns: OutputColumns, changed: dict[int, RequestState], to_abort: list[int]
    ) -> None:
        time_s = columns.time_ns / 1e9
        self._process_history(columns)
        if columns.logprobs is not None:
            self._process_logprobs(columns, columns.logprobs)
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
                state.close(self._version)
            changed[number] = state

    def _process_history(self, columns: OutputColumns) -> None:
        for i, (row, cached) in enumerate(
            zip(columns.cached_rows, columns.cached_counts, strict=True)
        ):
            if (state := self._states.get(columns.numbers[row])) is not None:
                state.num_cached_tokens = state.metrics.num_cached_tokens = cached
                if columns.queued_ns:
                    state.metrics.queued_time = columns.queued_ns[i] / 1e9
                    state.metrics.scheduled_time = columns.scheduled_ns[i] / 1e9
        for row, count in zip(columns.preempted_rows, columns.preempted_counts, strict=True):
            if (state := self._states.get(columns.numbers[row])) is not None:
                state.metrics.num_preemptions = count

    def _process_logprobs(self, columns: OutputColumns, logprobs: LogprobColumns) -> None:
        """Bytes to bytes: no number becomes an object but the two of each sampled token."""
        values, ranks = logprobs.logprobs.tolist(), logprobs.ranks.tolist()
        top_ids, top_logprobs = logprobs.top_ids.tobytes(), logprobs.top_logprobs.tobytes()
        token = entry = 0
        for row, k in zip(logprobs.rows, logprobs.ks, strict=True):
            token_end = token + columns.counts[row]
            entry_end = entry + 4 * k * columns.counts[row]
            state = self._states.get(columns.numbers[row])
            if state is not None and (store := state.logprobs) is not None:
                store.k = k
                store.total += sum(values[token:token_end])
                store.logprobs.extend(values[token:token_end])
                store.ranks.extend(ranks[token:token_end])
                if k:
                    store.top_ids.frombytes(top_ids[entry:entry_end])
                    store.top_logprobs.frombytes(top_logprobs[entry:entry_end])
            token, entry = token_end, entry_end

    def _process_prompt(self, scored: PromptLogprobs) -> None:
        state = self._states.get(scored.number)
        if state is None or (store := state.prompt_logprobs) is None:
            return
        store.k = scored.k
        store.logprobs.frombytes(scored.logprobs.tobytes())
        store.ranks.frombytes(scored.ranks.tobytes())
        store.top_ids.frombytes(scored.top_ids.tobytes())
        store.top_logprobs.frombytes(scored.top_logprobs.tobytes())


def _plain_numbers(event: EngineOutput) -> list[int] | None:
    """Of a step that brought one token to each of these requests, and nothing else."""
    return event.numbers if isinstance(event, OutputColumns) and event.is_plain else None
