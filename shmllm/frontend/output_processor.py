"""OutputProcessor: updates the requests of a front end from the engine's output columns.

This is the only module of the front end that loops over output rows. It decodes the text of a
request when tokens arrive only for stop strings and streaming; otherwise it decodes the text
once, at the end of the request.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import groupby
from typing import Any

from shmllm.client.protocol import EngineOutput, StartedOver
from shmllm.config.routed_experts import RoutedInfo
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.parent_request import ParentRequest
from shmllm.frontend.request_state import RequestState
from shmllm.frontend.sampling_masks import ReceivedMasks
from shmllm.frontend.text.token_texts import TokenTexts
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.outputs.columns import MaskColumns, OutputColumns, PieceColumns
from shmllm.outputs.logprobs import LogprobColumns, PromptLogprobs
from shmllm.params.sampling import SamplingParams
from shmllm.wire.messages import WeightVersion


class OutputProcessor:
    """The states of the unfinished requests of one front end.

    Args:
        tokenizer: decodes the output tokens.
        eos_token_ids: the model's end-of-sequence tokens. A request that one of them ends has
            the `stop_reason` None.
        routed: the form of the experts that the engine reports; None: it reports none.
        stream_interval: that of requests whose parameters have none.
        returns_masks: whether the engine reports the tokens among which each token is drawn.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int] = (),
        routed: RoutedInfo | None = None,
        stream_interval: int = 1,
        *,
        returns_masks: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._routed = routed
        self._returns_masks = returns_masks
        self._stream_interval = stream_interval
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
        """Create a state for each of the request's `n` completions.

        Args:
            request: the checked request.
            index: the position of its prompt among the caller's prompts.
            streaming: decode tokens when they arrive.
            time_tokens: record the time of each token in `token_times`.
            request_id: the id in its outputs; None uses a counter of the requests.

        Returns:
            One state per completion, each with a number that was never used before.
        """
        name = str(self._next_request) if request_id is None else request_id
        parent = ParentRequest[RequestState](name, request.params.n)
        self._next_request += 1
        each = [request] if request.params.n == 1 else request.children()
        return [self._add(child, index, streaming, time_tokens, parent) for child in each]

    def _add(
        self,
        request: PreparedRequest,
        index: int,
        streaming: bool,
        time_tokens: bool,
        parent: ParentRequest[RequestState],
    ) -> RequestState:
        params = request.params
        state = RequestState(
            self._next_number,
            index,
            request,
            self._tokenizer,
            streaming,
            parent,
            self._token_texts,
        )
        state.token_times = [] if time_tokens else None
        if not params.ignore_eos or params.structured_outputs is not None:
            state.eos_stop_ids = self._eos_token_ids
        if isinstance(request.submitted.params, SamplingParams):  # a vector is in pieces, too
            state.routed = self._routed
            if self._returns_masks and not request.params.is_greedy:
                state.masks = ReceivedMasks()
        state.stream_interval = params.stream_interval or self._stream_interval
        self._states[state.number] = state
        self._next_number += 1
        return state

    def discard(self, numbers: Iterable[int]) -> list[int]:
        """Forget requests, and ignore further events about them.

        Returns:
            Those of the numbers that belonged to unfinished requests.
        """
        return [number for number in numbers if self._states.pop(number, None) is not None]

    def discard_all_but(self, numbers: Container[int]) -> None:
        """Forget all requests but these."""
        for number in [each for each in self._states if each not in numbers]:
            del self._states[number]

    def process(self, events: Iterable[EngineOutput]) -> tuple[list[RequestState], list[int]]:
        """Apply events in order.

        Returns:
            The states that changed, each once, including finished ones; and the numbers of the
            requests that a stop string ended, which the caller must abort in the engine.
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
            elif isinstance(event, MaskColumns):
                self._process_masks(event)
            elif isinstance(event, PieceColumns):
                self._process_pieces(event)
            elif isinstance(event, WeightVersion):
                self._change_version(event.version)
            elif isinstance(event, StartedOver):
                if (state := self._states.get(event.number)) is not None:
                    state.start_over()
            elif (ended := self._states.pop(event.number, None)) is not None:
                ended.fail(event.message)
                ended.is_retryable = event.is_retryable
                ended.close(self._version)
                changed[ended.number] = ended

    def _process_pieces(self, columns: PieceColumns) -> None:
        for number, piece in zip(columns.numbers, columns.pieces, strict=True):
            if number in self._states:
                self._states[number].pieces.add(piece)

    def _process_masks(self, columns: MaskColumns) -> None:
        for number, piece in zip(columns.numbers, columns.pieces, strict=True):
            state = self._states.get(number)
            if state is not None and state.masks is not None:
                state.masks.add(piece.data)

    def _change_version(self, version: int | str) -> None:
        for state in self._states.values():
            state.change_version(self._version, version)
        self._version = version

    def _process_plain(
        self, numbers: list[int], steps: list[Any], changed: dict[int, RequestState]
    ) -> bool:
        """Add the tokens of several steps to each request at once.

        Args:
            numbers: the requests in each of the steps.
            steps: the columns of the steps, which are all plain.
            changed: where to put the changed states.

        Returns:
            False, without any change, for a single step, or if a request needs its text after
            each step.
        """
        states = [self._states.get(number) for number in numbers]
        if len(steps) == 1 or any(
            s is not None and (s.text_is_urgent or s.num_repeated) for s in states
        ):
            return False
        times_s = [columns.time_ns / 1e9 for columns in steps]
        by_request = zip(*(columns.token_ids for columns in steps), strict=True)
        for state, token_ids in zip(states, by_request, strict=True):
            if state is not None:
                state.append_steps(token_ids, times_s)
                changed[state.number] = state
        return True

    def _process_columns(
        self, columns: OutputColumns, changed: dict[int, RequestState], to_abort: list[int]
    ) -> None:
        time_s = columns.time_ns / 1e9
        self._process_metrics(columns)
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
            if state.append_step(token_ids, finish, time_s):
                to_abort.append(number)
            if state.finish_reason is not None:
                del self._states[number]
                state.close(self._version)
            changed[number] = state

    def _process_metrics(self, columns: OutputColumns) -> None:
        for i, (row, cached) in enumerate(
            zip(columns.cached_rows, columns.cached_counts, strict=True)
        ):
            if (state := self._states.get(columns.numbers[row])) is not None:
                state.num_cached_tokens = state.metrics.num_cached_tokens = cached
                if columns.queued_ns:
                    state.metrics.queued_ts = columns.queued_ns[i] / 1e9
                    state.metrics.scheduled_ts = columns.scheduled_ns[i] / 1e9
        for row, count in zip(columns.preempted_rows, columns.preempted_counts, strict=True):
            if (state := self._states.get(columns.numbers[row])) is not None:
                state.metrics.num_preemptions = count
        for row, drafted, accepted in zip(
            columns.drafted_rows, columns.drafted_counts, columns.accepted_counts, strict=True
        ):
            if (state := self._states.get(columns.numbers[row])) is not None:
                state.metrics.num_draft_tokens = drafted
                state.metrics.num_accepted_tokens = accepted

    def _process_logprobs(self, columns: OutputColumns, logprobs: LogprobColumns) -> None:
        """Append the log-probabilities to the arrays of the requests.

        Alternatives are copied as bytes: only the two numbers of each sampled token become
        Python objects.
        """
        values, ranks = logprobs.logprobs.tolist(), logprobs.ranks.tolist()
        top_ids, top_logprobs = logprobs.top_ids.tobytes(), logprobs.top_logprobs.tobytes()
        token = entry = 0
        for row, k in zip(logprobs.rows, logprobs.ks, strict=True):
            token_end = token + columns.counts[row]
            entry_end = entry + 4 * k * columns.counts[row]
            state = self._states.get(columns.numbers[row])
            if state is not None and (store := state.logprobs) is not None:
                store.k = k
                if state.num_repeated:
                    num_repeated = min(state.num_repeated, columns.counts[row])
                    token, entry = token + num_repeated, entry + 4 * k * num_repeated
                for value in values[token:token_end]:  # in this order, whatever a row has
                    store.total += value
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
    """The requests of a step that has one token for each of them and nothing else, or None."""
    return event.numbers if isinstance(event, OutputColumns) and event.is_plain else None
