"""RequestState: the tokens, the text and the end of one request in its front end.

A request with n > 1 completions is n separate requests in the engine, with a RequestState each.
Their ParentRequest connects them, and `request_outputs` shows them to the caller.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmllm.config.routed_experts import RoutedInfo
from shmllm.errors import EnginePausedError, RequestError
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.parent_request import ParentRequest
from shmllm.frontend.replies.reader import ReplyReader
from shmllm.frontend.result_pieces import ResultPieces
from shmllm.frontend.sampling_masks import ReceivedMasks
from shmllm.frontend.text.detokenizer import IncrementalDetokenizer, OutputText
from shmllm.frontend.text.token_texts import TokenTexts
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.frontend.weights.versions import VersionStarts, add_version
from shmllm.outputs.columns import FinishReason
from shmllm.outputs.logprob_lists import LogprobStore
from shmllm.outputs.request import RequestMetrics

REPETITION_DETECTED = "repetition_detected"
DIFFERS = "its engine has ended, and another one gave other tokens than those returned before"


class RequestState:
    """The state of one completion, or of one pooling request.

    Args:
        number: the number that identifies the completion in messages to the engine.
        index: the position of the prompt among the caller's prompts.
        request: the request, with n = 1.
        tokenizer: decodes the output tokens.
        streaming: decode tokens when they arrive, not only when the completion has ended.
        parent: the completions of the same prompt; the constructor adds this one.
        token_texts: returns the texts of single tokens, for log-probabilities.

    Attributes:
        completion_index: the position among the completions of the prompt.
        text_is_urgent: whether the text is needed when tokens arrive, for a stream or for stop
            strings.
        token_ids: the output tokens so far.
        token_times: when the engine published each token, in seconds of CLOCK_MONOTONIC; None
            unless the caller of `submit` asked for times.
        num_decoded: the number of tokens whose text was decoded.
        num_emitted: the number of tokens that `next_output` has returned.
        num_repeated: how many of the tokens so far come again, after `start_over`.
        is_retryable: whether the engine refused the request only because it is paused.
        eos_stop_ids: end-of-sequence tokens that may end the completion. `stop_reason` stays
            None then, as in vLLM.
        logprobs: the log-probabilities of the output tokens; None unless requested.
        prompt_logprobs: the log-probabilities of the prompt tokens from the second one on;
            None unless requested.
        pieces: the result of a pooling request so far, as the bytes of a float32 array; of other
            requests the experts of their tokens, if the engine reports them.
        routed: the form of the experts in `pieces`; None: the engine reports none.
        masks: the tokens among which those of the output were drawn; None: nobody asks for them.
        stream_interval: after how many new tokens a stream yields the next output.
        versions: the weight versions that sampled the tokens, complete when the completion
            has ended.
        ends_request: whether this completion has ended, as the last one of its parent.
    """

    __slots__ = (
        "_reply",
        "_text",
        "_tokenizer",
        "completion_index",
        "ends_request",
        "eos_stop_ids",
        "error",
        "finish_reason",
        "index",
        "is_retryable",
        "logprobs",
        "masks",
        "metrics",
        "num_cached_tokens",
        "num_decoded",
        "num_emitted",
        "num_repeated",
        "number",
        "parent",
        "pieces",
        "prompt_logprobs",
        "request",
        "routed",
        "stop_reason",
        "stream_interval",
        "text_is_urgent",
        "token_ids",
        "token_texts",
        "token_times",
        "versions",
    )

    def __init__(
        self,
        number: int,
        index: int,
        request: PreparedRequest,
        tokenizer: Tokenizer,
        streaming: bool,
        parent: ParentRequest[RequestState],
        token_texts: TokenTexts,
    ) -> None:
        params = request.params
        self.number = number
        self.index = index
        self.request = request
        self._tokenizer = tokenizer
        self._text: OutputText | None = None
        self._reply: ReplyReader | None = None
        self.text_is_urgent = streaming or bool(params.stop)
        self.parent = parent
        self.completion_index = parent.add(self)
        self.token_texts = token_texts
        self.token_ids: list[int] = []
        self.token_times: list[float] | None = None
        self.eos_stop_ids: frozenset[int] = frozenset()
        self.logprobs = (
            None
            if params.num_logprobs is None
            else LogprobStore(is_ranked=params.logprob_token_ids is None)
        )
        self.prompt_logprobs = LogprobStore() if params.scores_prompt else None
        self.num_decoded = 0
        self.num_emitted = 0
        self.num_repeated = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.is_retryable = False
        self.ends_request = False
        self.pieces = ResultPieces()
        self.routed: RoutedInfo | None = None
        self.masks: ReceivedMasks | None = None
        self.stream_interval = params.stream_interval or 1
        self.versions: VersionStarts = []
        self.metrics = RequestMetrics(arrival_time=time.time(), arrival_ts=time.monotonic())

    @property
    def text(self) -> OutputText:
        """The text so far. The object is created at the first use: for 100,000 waiting requests
        it would double the number of objects that the garbage collector traverses."""
        if self._text is None:
            self._text = self._new_text(self.request.params.skip_special_tokens)
        return self._text

    @property
    def text_so_far(self) -> str:
        """The decoded text, without creating `text` if it does not exist yet."""
        return "" if self._text is None else self._text.text

    @property
    def reply(self) -> ReplyReader | None:
        """The reply so far, if it has parts. Special tokens may be marks between them."""
        if self._reply is None and self.request.reply_format is not None:
            parser = self.request.reply_format.parser()
            self._reply = ReplyReader(self._new_text(skip_special_tokens=False), parser)
        return self._reply

    @property
    def routed_experts(self) -> npt.NDArray[Any] | None:
        """The experts of the tokens so far; see `CompletionOutput`."""
        info = self.routed
        if info is None:
            return None
        begin = self.request.params.routed_experts_prompt_start
        end = len(self.request.prompt_token_ids) + max(len(self.token_ids) - 1, 0)
        sent = np.frombuffer(self.pieces.data, f"u{info.item_bytes}").reshape(-1, *info.shape)
        sent = sent[begin:end]
        experts = np.zeros((len(sent), info.num_layers, info.top_k), sent.dtype)
        experts[:, info.layers] = sent
        return experts

    def _new_text(self, skip_special_tokens: bool) -> OutputText:
        request, params = self.request, self.request.params
        detokenizer = IncrementalDetokenizer(
            self._tokenizer,
            request.prompt_token_ids if request.submitted.embeds is None else [],
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        include_stop = params.include_stop_str_in_output
        return OutputText(detokenizer, params.stop, include_stop=include_stop)

    def append_step(self, token_ids: list[int], finish: int, time_s: float) -> bool:
        """Add the tokens of one step.

        Args:
            token_ids: the tokens.
            finish: the FinishReason of the step's row.
            time_s: when the engine published the tokens, in seconds of CLOCK_MONOTONIC.

        Returns:
            Whether the caller must abort the request in the engine, because a stop string
            ended it here.
        """
        if self.num_repeated:
            count = min(self.num_repeated, len(token_ids))
            begin = len(self.token_ids) - self.num_repeated
            if token_ids[:count] != self.token_ids[begin : begin + count]:
                self.fail(DIFFERS)
                return not finish
            self.num_repeated -= count
            token_ids = token_ids[count:]
        self.metrics.num_steps += bool(token_ids)
        if len(token_ids) <= 1 or not self.request.params.stop:
            return self._append(token_ids, finish, time_s)
        for place, token_id in enumerate(token_ids, 1):
            ends = self._append([token_id], finish if place == len(token_ids) else 0, time_s)
            if ends:
                if self.logprobs is not None:
                    self.logprobs.truncate(len(self.token_ids))
                return not finish
        return False

    def _append(self, token_ids: list[int], finish: int, time_s: float) -> bool:
        self.token_ids += token_ids
        if self.metrics.first_token_ts is None and token_ids:
            self.metrics.first_token_ts = time_s
        self.metrics.last_token_ts = time_s
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

    def append_steps(self, token_ids: Iterable[int], times_s: Sequence[float]) -> None:
        """Add one token from each of several steps, none of which ends the request.

        Args:
            token_ids: the tokens.
            times_s: when the engine published each of them, in seconds of CLOCK_MONOTONIC.
        """
        self.token_ids += token_ids
        if self.metrics.first_token_ts is None:
            self.metrics.first_token_ts = times_s[0]
        self.metrics.last_token_ts = times_s[-1]
        self.metrics.num_steps += len(times_s)
        if self.token_times is not None:
            self.token_times += times_s

    def start_over(self) -> None:
        """Expect all outputs so far once more."""
        self.num_repeated = len(self.token_ids)
        self.pieces = ResultPieces()
        if self.masks is not None:
            self.masks.start_over()
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = LogprobStore()

    def fail(self, message: str) -> None:
        """End the completion with an error. Its tokens so far remain."""
        self.error = message
        self.finish_reason = FinishReason.ERROR.text
        if self.request.params.detokenize:
            self._decode(FinishReason.ERROR)

    def change_version(self, before: int | str, version: int | str) -> None:
        """Record that `version` of the weights samples the tokens from here on, and `before`
        sampled those until here."""
        add_version(self.versions, len(self.token_ids), before, version)

    def close(self, version: int | str) -> None:
        """Record the end, after the call that ended the completion. `version` of the weights
        sampled its last tokens."""
        if not self.versions:
            self.versions.append((version, 0))
        self.parent.num_open -= 1
        self.ends_request = not self.parent.num_open

    def raise_error(self, name: str = "") -> None:
        """Raise `error` as a RequestError if it is set, with `name` in front of the message."""
        if self.error is not None:
            kind = EnginePausedError if self.is_retryable else RequestError
            raise kind(f"{name}: {self.error}" if name else self.error)

    def _end(self, finish: int) -> None:
        self.finish_reason = FinishReason(finish).text
        self.metrics.end_drafts()
        if finish == FinishReason.REPETITION:
            self.stop_reason = REPETITION_DETECTED
        has_token = finish == FinishReason.STOP and self.token_ids
        last = self.token_ids[-1] if has_token else None
        if last in self.request.params.stop_token_ids and last not in self.eos_stop_ids:
            self.stop_reason = last

    def _decode(self, finish: int) -> None:
        """Decode the new tokens. The token that ended the completion is not part of the text,
        unless the parameters have `include_stop_str_in_output`."""
        params = self.request.params
        end = len(self.token_ids)
        if finish == FinishReason.STOP and not params.include_stop_str_in_output:
            end -= self._ended_by_token()
        may_stop = len(self.token_ids) > params.min_tokens
        new_ids = self.token_ids[self.num_decoded : end]
        self.text.append(new_ids, check_stop=may_stop)
        self.num_decoded = end
        if finish:
            self.text.finish(check_stop=may_stop)
        if (reply := self.reply) is not None:
            reply.append(new_ids, check_stop=may_stop)
            if finish or self.text.match is not None:
                reply.finish(check_stop=may_stop)

    def _ended_by_token(self) -> bool:
        """Whether the last token is an end-of-sequence or stop token. A structured output can
        also end because its grammar allows no further token."""
        params, last = self.request.params, self.token_ids[-1]
        return (
            params.structured_outputs is None
            or last in self.eos_stop_ids
            or last in params.stop_token_ids
        )
