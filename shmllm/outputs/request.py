"""What `LLM.generate` returns. Names and meaning are those of vLLM's classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestMetrics:
    """Moments of a request, in seconds of the monotonic clock, and what happened to it.

    Attributes:
        arrival_time: the front end accepted it.
        queued_time: the engine queued it.
        scheduled_time: the engine first gave it a place in a step.
        first_token_time: the engine published its first token.
        last_token_time: the engine published its last token.
        num_preemptions: how often it had to give its blocks back; known at its end.
        num_cached_tokens: prompt tokens that the prefix cache had.
    """

    arrival_time: float
    queued_time: float | None = None
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0

    # The names that vLLM's class has for some of these.
    queued_ts = property(lambda self: self.queued_time)
    scheduled_ts = property(lambda self: self.scheduled_time)
    first_token_ts = property(lambda self: self.first_token_time)
    last_token_ts = property(lambda self: self.last_token_time)

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from arrival to the first token."""
        first = self.first_token_time
        return None if first is None else first - self.arrival_time


@dataclass(slots=True)
class WeightVersionSpan:
    """Output tokens [start, end) were sampled with the weights of this version."""

    version: int | str
    start: int
    end: int


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: which completion of its request, from 0.
        text: the generated text, without the stop string.
        token_ids: all generated tokens, the ending token included.
        finish_reason: "stop", "length", "repetition", "abort", "error", or None while it
            goes on.
        stop_reason: the stop string or stop token id that ended it; None otherwise.
        weight_versions: of the weights that sampled its tokens: one span, more where weights
            changed on the way, none without tokens. None until it has finished.
        lora_request: None, for code that reads it.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WeightVersionSpan] | None = None
    lora_request: None = field(default=None, repr=False)

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and its completions.

    Attributes:
        prompt: the text, None when token ids were given.
        num_cached_tokens: prompt tokens whose keys and values came from the prefix cache.
        error: the message when `outputs[0].finish_reason` is "error".
        prompt_index: place of the prompt among those given to `generate`, `stream` or
            `enqueue`.

    The fields from `lora_request` on are None, for code that reads them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: Any = None
    metrics: RequestMetrics | None = field(default=None, repr=False)
    error: str | None = None
    prompt_index: int = 0
    lora_request: None = field(default=None, repr=False)
    encoder_prompt: None = field(default=None, repr=False)
    encoder_prompt_token_ids: None = field(default=None, repr=False)
    kv_transfer_params: None = field(default=None, repr=False)
