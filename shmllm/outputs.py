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
class Embeddings:
    """Vectors that a step made, each before the row that ends its request.

    Attributes:
        numbers: of the requests.
        vectors: float32, little-endian.
    """

    numbers: list[int] = field(default_factory=list)
    vectors: list[bytes] = field(default_factory=list)

    def parts(self, most_bytes: int) -> Iterator[Embeddings]:
        """The same in pieces of at most `most_bytes`, or of one vector if that has more."""
        size = max(most_bytes // max(map(len, self.vectors)), 1)
        for begin in range(0, len(self.numbers), size):
            end = begin + size
            yield Embeddings(self.numbers[begin:end], self.vectors[begin:end])


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
        queued_ns: when the requests of `cached_rows` were queued, on CLOCK_MONOTONIC; empty
            if not known.
        scheduled_ns: when they were first scheduled; as long as `queued_ns`.
        preempted_rows: rows of requests that end here and were preempted on their way.
        preempted_counts: how often, for `preempted_rows`.
        logprobs: of the rows that asked for them.
        prompt_logprobs: what the step computed of prompts; they travel on their own, before
            the rows.
        embeddings: of pooling requests, which have a row without tokens; they travel likewise.
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
    queued_ns: list[int] = field(default_factory=list)
    scheduled_ns: list[int] = field(default_factory=list)
    preempted_rows: list[int] = field(default_factory=list)
    preempted_counts: list[int] = field(default_factory=list)
    embeddings: Embeddings | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but one token for each row, and all of them go on."""
        rows = len(self.numbers)
        return (
            rows == len(self.token_ids) == self.counts.count(1) == self.finishes.count(0)
            and not self.cached_rows
            and not self.preempted_rows
            and self.logprobs is None
        )

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
        for begin in range(0, len(self.numbers), most_rows):
            rows = range(begin, min(begin + most_rows, len(self.numbers)))
            counts = self.counts[begin : rows.stop]
            first = [i for i, row in enumerate(self.cached_rows) if row in rows]
            preempted = [i for i, row in enumerate(self.preempted_rows) if row in rows]
            yield OutputColumns(
                self.step,
                self.time_ns,
                self.numbers[begin : rows.stop],
                counts,
                self.finishes[begin : rows.stop],
                self.token_ids[offset : offset + sum(counts)],
                [self.cached_rows[i] - begin for i in first],
                [self.cached_counts[i] for i in first],
                logprobs and logprobs.cut(begin, rows.stop, self.counts),
                queued_ns=[self.queued_ns[i] for i in first] if self.queued_ns else [],
                scheduled_ns=[self.scheduled_ns[i] for i in first] if self.scheduled_ns else [],
                preempted_rows=[self.preempted_rows[i] - begin for i in preempted],
                preempted_counts=[self.preempted_counts[i] for i in preempted],
            )
            offset += sum(counts)


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
