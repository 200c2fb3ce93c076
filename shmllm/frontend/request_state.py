"""One request as its front end sees it: what came of it so far, and how users see that.

A request for several completions is several of these, which the engine knows nothing of;
`ParentRequest` holds them together.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from shmllm.errors import EnginePausedError, RequestError
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.text.detokenizer import IncrementalDetokenizer, OutputText
from shmllm.frontend.text.token_texts import TokenTexts
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.outputs.columns import FinishReason
from shmllm.outputs.logprob_lists import LogprobsList, LogprobStore
from shmllm.outputs.request import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    WeightVersionSpan,
)
from shmllm.params.sampling import RequestOutputKind

REPETITION_DETECTED = "repetition_detected"


class ParentRequest:
    """The completions of one prompt, in their order.

    Args:
        request_id: what users know the request by.
        size: how many completions there will be.

    Attributes:
        states: all of them; of a single one nothing, since it would be a cycle of references
            for each request, which only the garbage collector ends.
    """

    __slots__ = ("num_open", "request_id", "states")

    def __init__(self, request_id: str, size: int) -> None:
        self.request_id = request_id
        self.states: list[RequestState] | None = None if size == 1 else []
        self.num_open = 0

    def add(self, state: RequestState) -> int:
        """Returns its place."""
        self.num_open += 1
        if self.states is None:
            return 0
        self.states.append(state)
        return len(self.states) - 1


class RequestState:
    """One completion on its way.

    Args:
        number: its number towards the engine.
        index: its prompt's place in the caller's list.
        request: what was asked.
        tokenizer: for its text.
        streaming: decode tokens as they come.
        family: the completions of the same prompt; joined here.
        token_texts: texts of single tokens.

    Attributes:
        token_times: when the engine published each token, in seconds of the monotonic
            clock; None unless somebody measures.
        is_retryable: the `error` says nothing against the request: the engine is paused.
        silent_stop_ids: tokens that end the request without being its `stop_reason`.
        logprobs: of the output tokens, None if not asked for.
        prompt_logprobs: of the prompt's tokens from the second on, None if not asked for.
        vector: of a pooling request, float32.
        versions: of the weights, and how many tokens there were when each came into force;
            complete at the request's end.
        ends_request: whether it has ended, and as the last of its family.
    """

    __slots__ = (
        "_text",
        "_tokenizer",
        "completion_index",
        "ends_request",
        "error",
        "family",
        "finish_reason",
        "index",
        "is_retryable",
        "logprobs",
        "metrics",
        "num_cached_tokens",
        "num_decoded",
        "num_shown",
        "number",
        "prompt_logprobs",
        "request",
        "silent_stop_ids",
        "stop_reason",
        "text_is_urgent",
        "token_ids",
        "token_texts",
        "token_times",
        "vector",
        "versions",
    )

    def __init__(
        self,
        number: int,
        index: int,
        request: PreparedRequest,
        tokenizer: Tokenizer,
        streaming: bool,
        family: ParentRequest,
        token_texts: TokenTexts,
    ) -> None:
        params = request.params
        self.number = number
        self.index = index
        self.request = request
        self._tokenizer = tokenizer
        self._text: OutputText | None = None
        self.text_is_urgent = streaming or bool(params.stop)
        self.family = family
        self.completion_index = family.add(self)
        self.token_texts = token_texts
        self.token_ids: list[int] = []
        self.token_times: list[float] | None = None
        self.silent_stop_ids: frozenset[int] = frozenset()
        self.logprobs = None if params.logprobs is None else LogprobStore()
        self.prompt_logprobs = None if params.prompt_logprobs is None else LogprobStore()
        self.num_decoded = 0
        self.num_shown = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.is_retryable = False
        self.ends_request = False
        self.vector = b""
        self.versions: list[tuple[int | str, int]] = []
        self.metrics = RequestMetrics(arrival_time=time.monotonic())

    @property
    def text(self) -> OutputText:
        """Its text so far. Made when it is first needed: a hundred thousand requests that wait
        would give the garbage collector twice as much to look at."""
        if self._text is None:
            request, params = self.request, self.request.params
            detokenizer = IncrementalDetokenizer(
                self._tokenizer,
                request.prompt_token_ids if request.submitted.embeds is None else [],
                skip_special_tokens=params.skip_special_tokens,
            )
            include_stop = params.include_stop_str_in_output
            self._text = OutputText(detokenizer, params.stop, include_stop=include_stop)
        return self._text

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
            self._end(finish)
        if self.request.params.detokenize and (finish or self.text_is_urgent):
            self._decode(finish)
            if self.text.match is not None and self.stop_reason is None:
                self.finish_reason, self.stop_reason = "stop", self.text.match.stop
                return not finish
        return False

    def take_more(self, token_ids: Iterable[int], times_s: Sequence[float]) -> None:
        """Add the tokens of several steps, after which the request goes on."""
        self.token_ids += token_ids
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = times_s[0]
        self.metrics.last_token_time = times_s[-1]
        if self.token_times is not None:
            self.token_times += times_s

    def fail(self, message: str) -> None:
        """Note that the engine could not go on; what it sent until then stays."""
        self.error = message
        self.finish_reason = FinishReason.ERROR.text
        if self.request.params.detokenize:
            self._decode(FinishReason.ERROR)

    def change_version(self, before: int | str, version: int | str) -> None:
        """Note that other weights sample the tokens from here on."""
        num_tokens = len(self.token_ids)
        if num_tokens and not self.versions:
            self.versions.append((before, 0))
        if self.versions and self.versions[-1][1] == num_tokens:
            self.versions.pop()
        if num_tokens:
            self.versions.append((version, num_tokens))

    def close(self, version: int | str) -> None:
        """Nothing comes any more. `version` of the weights sampled the last tokens."""
        if not self.versions:
            self.versions.append((version, 0))
        self.family.num_open -= 1
        self.ends_request = not self.family.num_open

    def raise_error(self, name: str = "") -> None:
        """Raise the RequestError that `error` is, if there is one."""
        if self.error is not None:
            kind = EnginePausedError if self.is_retryable else RequestError
            raise kind(f"{name}: {self.error}" if name else self.error)

    def output(self) -> RequestOutput:
        """The request as it stands, with all its completions."""
        states = self._siblings()
        completions = [state._completion(state._said(), state.token_ids) for state in states]
        return self._wrap(completions, self._prompt_list())

    def next_output(self) -> RequestOutput | None:
        """What a stream shows next, as `output_kind` and `stream_interval` say; None while
        there is nothing to show. It holds this completion alone, but for FINAL_ONLY, which
        has all of them once. Call it after each change, and no more after the last."""
        params = self.request.params
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            return self.output() if self.ends_request else None
        num_new = len(self.token_ids) - self.num_shown
        if self.finish_reason is None and (
            not num_new or (self.num_shown and num_new < (params.stream_interval or 1))
        ):
            return None
        is_delta = params.output_kind is RequestOutputKind.DELTA
        begin = self.num_shown if is_delta else 0
        delta = self.text.take_delta()
        text = delta if is_delta else self.text.shown
        completion = self._completion(text, self.token_ids[begin:], begin)
        self.num_shown = len(self.token_ids)
        return self._wrap([completion], None if begin else self._prompt_list())

    def _end(self, finish: int) -> None:
        self.finish_reason = FinishReason(finish).text
        if finish == FinishReason.REPETITION:
            self.stop_reason = REPETITION_DETECTED
        has_token = finish == FinishReason.STOP and self.token_ids
        last = self.token_ids[-1] if has_token else None
        if last in self.request.params.stop_token_ids and last not in self.silent_stop_ids:
            self.stop_reason = last

    def _decode(self, finish: int) -> None:
        """The token that ended the request is not part of the text, unless asked for."""
        params = self.request.params
        end = len(self.token_ids)
        if finish == FinishReason.STOP and not params.include_stop_str_in_output:
            end -= self._ended_by_token()
        may_stop = len(self.token_ids) > params.min_tokens
        self.text.append(self.token_ids[self.num_decoded : end], check_stop=may_stop)
        self.num_decoded = end
        if finish:
            self.text.finish(check_stop=may_stop)

    def _ended_by_token(self) -> bool:
        """A structured output may also end because nothing can follow its last token."""
        params, last = self.request.params, self.token_ids[-1]
        return (
            params.structured_outputs is None
            or last in self.silent_stop_ids
            or last in params.stop_token_ids
        )

    def _completion(self, text: str, token_ids: list[int], begin: int = 0) -> CompletionOutput:
        """
        Args:
            token_ids: its tokens from `begin` on.
        """
        completion = CompletionOutput(
            index=self.completion_index,
            text=text,
            token_ids=token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            weight_versions=self._version_spans(),
        )
        if self.logprobs is not None:
            texts = self.token_texts if self.request.params.detokenize else None
            prompt = self.request.prompt_token_ids
            entries = LogprobsList(self.token_ids, self.logprobs, texts, prompt)
            completion.logprobs = entries[begin:] if begin else entries
            completion.cumulative_logprob = self.logprobs.total
        return completion

    def _siblings(self) -> list[RequestState]:
        """All completions of its prompt, itself included."""
        return self.family.states or [self]

    def _said(self) -> str:
        return "" if self._text is None else self._text.text

    def _version_spans(self) -> list[WeightVersionSpan] | None:
        if self.finish_reason is None:
            return None
        num_tokens = len(self.token_ids)
        ends = [start for _, start in self.versions[1:]] + [num_tokens]
        return [
            WeightVersionSpan(version, start, end)
            for (version, start), end in zip(self.versions, ends, strict=True)
            if start < end
        ]

    def _prompt_list(self) -> LogprobsList | None:
        first = self._siblings()[0]
        if first.prompt_logprobs is None:
            return None
        texts = first.token_texts if first.request.params.detokenize else None
        prompt = first.request.prompt_token_ids
        return LogprobsList(prompt[1:], first.prompt_logprobs, texts, prompt[:1], True)

    def _wrap(
        self, completions: list[CompletionOutput], prompt_logprobs: LogprobsList | None
    ) -> RequestOutput:
        states = self._siblings()
        return RequestOutput(
            request_id=self.family.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=completions,
            finished=not self.family.num_open,
            num_cached_tokens=states[0].num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
            metrics=self.metrics,
            error=next((state.error for state in states if state.error is not None), None),
            prompt_index=self.index,
        )
