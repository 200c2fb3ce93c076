"""What comes out: of a step, as columns; of `LLM.generate`, as objects.

Names and meaning of the objects are those of vLLM's classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from shmllm.logprobs import LogprobColumns, PromptLogprobs


class FinishReason(IntEnum):
    """Why a request ended, as it travels on the wire. NONE: it goes on."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    REPETITION = 5

    @property
    def text(self) -> str | None:
        return None if self is FinishReason.NONE else self.name.lower()


@dataclass(slots=True)
class OutputColumns:
    """What one step produced for one front end.

    Row i is request `numbers[i]`, which got `counts[i]` of `token_ids` (taken in order)
    and the FinishReason `finishes[i]`. Columns, because an object per token costs ten
    times as much to build, write and read.

    Attributes:
        step: the engine's step counter.
        time_ns: CLOCK_MONOTONIC when the columns were written.
        cached_rows: rows that report their prompt's prefix-cache hit: those of requests
            that appear for the first time.
        cached_counts: cached prompt tokens of `cached_rows`.
        logprobs: of the rows that asked for them.
        prompt_logprobs: what the step computed of prompts; they travel on their own, before
            the rows.
    """

    step: int = 0
    time_ns: int = 0
    numbers: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    finishes: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    cached_rows: list[int] = field(default_factory=list)
    cached_counts: list[int] = field(default_factory=list)
    logprobs: LogprobColumns | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)

    def parts(self, most_rows: int, most_bytes: int = 2**63) -> Iterator[OutputColumns]:
        """The same in pieces of at most `most_rows`, since a record has a largest size, and
        of at most about `most_bytes` of log-probabilities, or of one row if that has more."""
        logprobs = self.logprobs
        if logprobs is not None and logprobs.num_bytes > most_bytes:
            largest = 8 * max(self.counts) * (1 + max(logprobs.ks))
            most_rows = min(most_rows, max(most_bytes // largest, 1))
        if len(self.numbers) <= most_rows:
            if self.numbers:
                yield self
            return
        offset = 0
        cached = dict(zip(self.cached_rows, self.cached_counts, strict=True))
        for begin in range(0, len(self.numbers), most_rows):
            rows = range(begin, min(begin + most_rows, len(self.numbers)))
            counts = self.counts[begin : rows.stop]
            hits = {row - begin: cached[row] for row in rows if row in cached}
            yield OutputColumns(
                self.step,
                self.time_ns,
                self.numbers[begin : rows.stop],
                counts,
                self.finishes[begin : rows.stop],
                self.token_ids[offset : offset + sum(counts)],
                list(hits),
                list(hits.values()),
                logprobs and logprobs.cut(begin, rows.stop, self.counts),
            )
            offset += sum(counts)


@dataclass(slots=True)
class RequestMetrics:
    """Moments of a request, in seconds of the monotonic clock.

    Attributes:
        arrival_time: the front end accepted it.
        first_token_time: the engine published its first token.
        last_token_time: the engine published its last token.
    """

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None


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
        lora_request: None, for code that reads it.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
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
