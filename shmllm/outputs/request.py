"""RequestOutput and its parts: the results of generation requests, with vLLM's names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, wraps
from typing import Any, TypeVar

from shmllm.outputs.reply import ToolCall
from shmllm.outputs.sampling_masks import SamplingMask

Class = TypeVar("Class", bound=type)

logger = logging.getLogger(__name__)


def ignore_unknown_options(cls: Class) -> Class:
    """Makes the constructor of a dataclass ignore keyword arguments that it does not know, with one
    warning in the log. Programs written for another version of vLLM construct outputs, too."""
    names = {each.name for each in fields(cls)}
    construct: Callable[..., None] = vars(cls)["__init__"]

    @wraps(construct)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        try:
            construct(self, *args, **options)
        except TypeError:
            known = {name: value for name, value in options.items() if name in names}
            if len(known) == len(options):
                raise
            _warn(cls.__name__, ", ".join(name for name in options if name not in names))
            construct(self, *args, **known)

    type.__setattr__(cls, "__init__", __init__)
    return cls


@cache
def _warn(name: str, unknown: str) -> None:
    logger.warning("%s: ignores the unknown arguments %s", name, unknown)


@dataclass
class RequestMetrics:
    """Timestamps and counters of one request.

    Names that end in `_ts` are seconds of CLOCK_MONOTONIC, as in `time.monotonic()`; None means
    that the event has not happened, or that its time is unknown. `queued_time`, `scheduled_time`,
    `first_token_time` and `last_token_time` are the same events on the clock of `arrival_time`.

    Attributes:
        arrival_time: when the front end accepted the request, as in `time.time()`.
        arrival_ts: the same event on the other clock; None if it is not known.
        queued_ts: when the engine added the request to its waiting queue.
        scheduled_ts: when the engine first scheduled the request.
        first_token_ts: when the engine published the first token.
        last_token_ts: when the engine published the latest token.
        num_preemptions: the number of times that the request was preempted, known when it is
            finished.
        num_cached_tokens: the number of prompt tokens that were prefix-cache hits.
        num_steps: the number of steps that gave the request tokens, less than its tokens if
            drafted ones were accepted.
        num_draft_tokens: the number of drafted tokens that steps computed for the request; 0 if
            nothing was drafted. The engine says so in the record that ends the request. None
            without that record: while the request runs, after a stop string, which the front end
            finds, and mostly after an error.
        num_accepted_tokens: the number of them that were what the model samples, including those
            behind the token that ended the request; None if `num_draft_tokens` is.
        num_generation_tokens: the number of tokens that the request has so far.

    The metrics of a request with `n` > 1 have the sums of `num_preemptions`, `num_draft_tokens`,
    `num_accepted_tokens` and `num_generation_tokens` over its completions; all else is that of one
    of the completions.
    """

    arrival_time: float
    arrival_ts: float | None = None
    queued_ts: float | None = None
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_steps: int = 0
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    num_generation_tokens: int = 0

    queued_time = property(lambda self: self._on_clock_of_arrival(self.queued_ts))
    scheduled_time = property(lambda self: self._on_clock_of_arrival(self.scheduled_ts))
    first_token_time = property(lambda self: self._on_clock_of_arrival(self.first_token_ts))
    last_token_time = property(lambda self: self._on_clock_of_arrival(self.last_token_ts))

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from the arrival to the first token; None before it."""
        if self.first_token_ts is None or self.arrival_ts is None:
            return None
        return self.first_token_ts - self.arrival_ts

    def _on_clock_of_arrival(self, moment: float | None) -> float | None:
        if moment is None or self.arrival_ts is None:
            return None
        return self.arrival_time + (moment - self.arrival_ts)

    def end_drafts(self) -> None:
        """Take note that the engine ended the request. It says how much was drafted, if anything
        was."""
        if self.num_draft_tokens is None:
            self.num_draft_tokens = self.num_accepted_tokens = 0

    def with_counts_of(self, completions: Sequence[RequestMetrics]) -> RequestMetrics:
        """The metrics of a request.

        Args:
            completions: those of its completions, of which these metrics are one.
        """
        return replace(
            self,
            num_preemptions=sum(each.num_preemptions for each in completions),
            num_draft_tokens=_sum_if_known(each.num_draft_tokens for each in completions),
            num_accepted_tokens=_sum_if_known(each.num_accepted_tokens for each in completions),
        )


def _sum_if_known(counts: Iterable[int | None]) -> int | None:
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


@dataclass
class WeightVersionSpan:
    """The output tokens that were sampled with one version of the weights.

    Attributes:
        version: the version, as given to `LLM.update_weights`, or counted from 0.
        start: the position of the first of these tokens in the output.
        end: the position after the last one.
    """

    version: int | str
    start: int
    end: int


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: the position of this completion among the `n` completions of the prompt, from 0.
        text: the generated text. It ends before the stop string, unless the parameters have
            `include_stop_str_in_output`.
        token_ids: the generated token ids, including a token that ended the output.
        cumulative_logprob: the sum of the log-probabilities of the generated tokens; None
            unless the parameters have `logprobs`.
        logprobs: a LogprobsList, which is a sequence with one dict from token ids to Logprob
            per token of `token_ids`, or FlatLogprobs with `flat_logprobs`; None unless the
            parameters have `logprobs` or `logprob_token_ids`.
        finish_reason: "stop", "length", "repetition", "abort" or "error"; None while the
            request runs.
        stop_reason: the stop string or the stop token id that ended the output;
            "repetition_detected" for finish_reason "repetition"; otherwise None.
        weight_versions: the versions of the weights that sampled the tokens. A finished
            completion has one span, more if the weights were updated meanwhile, and none if it
            has no tokens. None before it is finished.
        lora_request: the LoRARequest of the adapter, or None.
        reasoning: for a chat whose replies are parsed (see docs/tools.md), the reasoning; None
            otherwise. In a stream with DELTA it has what is new, as do the next two fields.
        content: the answer alone, without reasoning and tool calls; None if replies are not
            parsed.
        tool_calls: the tool calls; None if replies are not parsed.
        routed_experts: with the option `enable_return_routed_experts`, the experts of a finished
            completion's tokens as a numpy array, (tokens, layers, top_k) uint8 or uint16: of those
            of the prompt from `routed_experts_prompt_start` on, and of those of the output but the
            last one, which no step computed. Layers without experts have zeros.
        sampling_mask: with the option `return_sampling_mask`, the SamplingMask of a finished
            completion, or of what a stream with DELTA yields: the tokens among which each token
            was drawn. None for a greedy request.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WeightVersionSpan] | None = None
    lora_request: Any = field(default=None, repr=False)
    reasoning: str | None = field(default=None, repr=False)
    content: str | None = field(default=None, repr=False)
    tool_calls: list[ToolCall] | None = field(default=None, repr=False)
    routed_experts: Any = field(default=None, repr=False)
    sampling_mask: SamplingMask | None = field(default=None, repr=False)

    def finished(self) -> bool:
        """Whether the completion has ended."""
        return self.finish_reason is not None


@ignore_unknown_options
@dataclass
class RequestOutput:
    """The result of one request: the completions of one prompt. The order of the first fields is
    vLLM's.

    Attributes:
        request_id: the id that the caller gave to the request, or a counter as text.
        prompt: the text of the prompt; None if the prompt was given without a text.
        prompt_token_ids: the token ids of the prompt. A prompt that was given as embeddings
            has token id 0 at each position.
        prompt_logprobs: a LogprobsList with None for the first prompt token and a dict from
            token ids to Logprob for each other one; None unless the parameters have
            `prompt_logprobs`.
        outputs: the completions. An output of a stream with DELTA or CUMULATIVE contains only
            those that changed.
        finished: whether all completions of the prompt have ended.
        metrics: timestamps and counters of the request.
        lora_request: the LoRARequest of the adapter, or None.
        num_cached_tokens: the number of prompt tokens whose keys and values were prefix-cache
            hits.
        error: the error message, if a completion has finish_reason "error".
        prompt_index: the position of the prompt among those given to `generate`, `stream` or
            `enqueue`.
        prompt_token_id_logprobs: a numpy array, (rows, ids) float32, with the log-probabilities of
            `prompt_logprob_token_ids`, -inf in the place of -1; None unless the parameters have
            them.
        encoder_prompt, encoder_prompt_token_ids: the text that the model's encoder reads, if it
            reads text, and its token ids; the prompt is the decoder's then.
        is_retryable: whether `error` says that the engine was paused or asleep, so that the same
            request can be sent again.

    `kv_transfer_params` is always None. It exists for programs that were written for vLLM.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Any
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = field(default=None, repr=False)
    lora_request: Any = field(default=None, repr=False)
    encoder_prompt: str | None = field(default=None, repr=False)
    encoder_prompt_token_ids: list[int] | None = field(default=None, repr=False)
    num_cached_tokens: int = 0
    kv_transfer_params: None = field(default=None, repr=False)
    error: str | None = None
    prompt_index: int = 0
    is_retryable: bool = False
    prompt_token_id_logprobs: Any = field(default=None, repr=False)
