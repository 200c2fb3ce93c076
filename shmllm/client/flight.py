"""A request of a pool of engines: where it is, and what has happened to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shmllm.client.phases import Phase, prefill_of
from shmllm.client.routing import Placement
from shmllm.outputs.columns import OutputColumns
from shmllm.params.request import EngineCoreRequest

NOT_SENT = 2**63


@dataclass(slots=True)
class Flight:
    """A request that has not ended.

    Attributes:
        request: the request.
        chain: the `chain_hashes` of its prompt.
        placement: where it is; None: nowhere, because its engine has ended.
        place: counts the placements of all requests: an engine gets them in this order.
        sent_at: the position in the engine's ring of requests behind it.
        version: the version of the weights with which it began; None: nobody has seen its begin.
        num_deaths: how many engines have ended while they ran it.
        is_aborted: whether its end was asked for.
        problem: why it cannot start over; "" if it can.
        phase: what its engine does with it.
        followers: the requests that wait for its prefill.
        queued_ns: when it was queued first, on CLOCK_MONOTONIC; 0: as its last engine says.
        scheduled_ns: when its prefill was scheduled; 0: as its last engine says.
        num_cached: the prompt tokens that its prefill found cached; None: it had none.
    """

    request: EngineCoreRequest
    chain: Sequence[int]
    placement: Placement | None = None
    place: int = 0
    sent_at: int = NOT_SENT
    version: int | str | None = None
    num_deaths: int = 0
    is_aborted: bool = False
    problem: str = ""
    phase: Phase = Phase.NEW
    followers: list[Flight] = field(default_factory=list)
    queued_ns: int = 0
    scheduled_ns: int = 0
    num_cached: int | None = None

    @property
    def sent(self) -> EngineCoreRequest:
        """The request that its engine gets."""
        return prefill_of(self.request) if self.phase is Phase.PREFILL else self.request

    def is_at(self, engine: int) -> bool:
        """Whether an engine has it."""
        return self.placement is not None and self.placement.engine == engine

    def note_prefill(self, columns: OutputColumns, row: int) -> None:
        """Take the figures of its prefill from a row."""
        if row in columns.cached_rows:
            at = columns.cached_rows.index(row)
            self.num_cached = columns.cached_counts[at]
            if columns.queued_ns:
                self.scheduled_ns = columns.scheduled_ns[at]
                self.queued_ns = self.queued_ns or columns.queued_ns[at]

    def complete(self, columns: OutputColumns, at: int) -> None:
        """Let the row of its first token tell of what came before. Idempotent.

        Args:
            columns: the columns with the row.
            at: its place in `cached_rows`.
        """
        if self.num_cached is not None:
            columns.cached_counts[at] = min(columns.cached_counts[at], self.num_cached)
        if columns.queued_ns and self.queued_ns:
            columns.queued_ns[at] = self.queued_ns
            columns.scheduled_ns[at] = self.scheduled_ns or columns.scheduled_ns[at]
