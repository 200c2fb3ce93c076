"""What a step produced for one front end, as columns of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Self

from shmllm.outputs.logprobs import LogprobColumns, PromptLogprobs


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


class Piece(NamedTuple):
    """A part of a result that is larger than a row: a vector, or rows of a matrix.

    offset: where it begins among the bytes of the whole result.
    data: numbers, little-endian.
    """

    offset: int
    data: bytes

    def split(self, most_bytes: int) -> Iterator[Piece]:
        """The same in pieces of at most `most_bytes`."""
        for begin in range(0, len(self.data), most_bytes):
            yield Piece(self.offset + begin, self.data[begin : begin + most_bytes])


@dataclass(slots=True)
class PieceColumns:
    """What a step adds to results that are larger than a row.

    Attributes:
        numbers: of the requests, for each piece.
        pieces: the pieces. One whose offset is not the end of the pieces before it takes the
            place of what follows: the request was recomputed.
    """

    numbers: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    def add(self, number: int, piece: Piece) -> None:
        """Append a piece of a request."""
        self.numbers.append(number)
        self.pieces.append(piece)

    def parts(self, most_bytes: int) -> Iterator[Self]:
        """The same in several of at most `most_bytes` each."""
        part, size = type(self)(), 0
        for number, whole in zip(self.numbers, self.pieces, strict=True):
            for piece in whole.split(most_bytes):
                if part.pieces and size + len(piece.data) > most_bytes:
                    yield part
                    part, size = type(self)(), 0
                part.add(number, piece)
                size += len(piece.data)
        yield part


@dataclass(slots=True)
class Embeddings(PieceColumns):
    """Of pooling requests, the bytes of float32 numbers; the last piece comes before the row that
    ends its request."""


@dataclass(slots=True)
class RoutedColumns(PieceColumns):
    """Of requests that generate tokens, the experts of their tokens, see `RoutedInfo`; those of a
    token come before the row with the token that was sampled behind it."""


@dataclass(slots=True)
class MaskColumns(PieceColumns):
    """Of requests that draw tokens, the tokens among which each was drawn, see `SamplingMasks`;
    they come before the row with the drawn token. The pieces of a request follow each other, and
    their offsets have no meaning, because no token is drawn twice."""


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
        drafted_rows: rows of requests that end here and had drafts.
        drafted_counts: how many drafted tokens steps computed, for `drafted_rows`.
        accepted_counts: how many of them were right; as long as `drafted_counts`.
        logprobs: of the rows that asked for them.
        prompt_logprobs: what the step computed of prompts; they travel on their own, before
            the rows.
        embeddings: of pooling requests, which have a row without tokens; they travel likewise.
        routed_experts: of the rows, where the engine reports them; they travel likewise.
        sampling_masks: the same.
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
    drafted_rows: list[int] = field(default_factory=list)
    drafted_counts: list[int] = field(default_factory=list)
    accepted_counts: list[int] = field(default_factory=list)
    embeddings: Embeddings | None = None
    routed_experts: RoutedColumns | None = None
    sampling_masks: MaskColumns | None = None

    @property
    def all_pieces(self) -> list[Embeddings | RoutedColumns | MaskColumns]:
        """What travels on its own, before the rows, in pieces."""
        pieces = self.embeddings, self.routed_experts, self.sampling_masks
        return [each for each in pieces if each is not None]

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but one token for each row, and all of them go on."""
        rows = len(self.numbers)
        return (
            rows == len(self.token_ids) == self.counts.count(1) == self.finishes.count(0)
            and not self.cached_rows
            and not self.preempted_rows
            and not self.drafted_rows
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
        for begin in range(0, len(self.numbers), most_rows):
            yield self._slice(range(begin, min(begin + most_rows, len(self.numbers))))

    def without(self, rows: Sequence[int]) -> list[OutputColumns]:
        """The rows between some others, in pieces.

        Args:
            rows: the rows to leave out, in ascending order.
        """
        begins, ends = [0, *(row + 1 for row in rows)], [*rows, len(self.numbers)]
        pieces = zip(begins, ends, strict=True)
        return [self._slice(range(begin, end)) for begin, end in pieces if begin < end]

    def _slice(self, rows: range) -> OutputColumns:
        begin, end, logprobs = rows.start, rows.stop, self.logprobs
        counts, offset = self.counts[begin:end], sum(self.counts[:begin])
        first = [i for i, row in enumerate(self.cached_rows) if row in rows]
        preempted = [i for i, row in enumerate(self.preempted_rows) if row in rows]
        drafted = [i for i, row in enumerate(self.drafted_rows) if row in rows]
        return OutputColumns(
            self.step,
            self.time_ns,
            self.numbers[begin:end],
            counts,
            self.finishes[begin:end],
            self.token_ids[offset : offset + sum(counts)],
            [self.cached_rows[i] - begin for i in first],
            [self.cached_counts[i] for i in first],
            logprobs and logprobs.slice_rows(begin, end, self.counts),
            queued_ns=[self.queued_ns[i] for i in first] if self.queued_ns else [],
            scheduled_ns=[self.scheduled_ns[i] for i in first] if self.scheduled_ns else [],
            preempted_rows=[self.preempted_rows[i] - begin for i in preempted],
            preempted_counts=[self.preempted_counts[i] for i in preempted],
            drafted_rows=[self.drafted_rows[i] - begin for i in drafted],
            drafted_counts=[self.drafted_counts[i] for i in drafted],
            accepted_counts=[self.accepted_counts[i] for i in drafted],
        )
