"""What a scheduler counts, and the requests that it ends with an error."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that ended with an error after the engine had queued it."""

    client: int
    number: int
    message: str


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start. `prefix_*` count tokens; recomputed requests do not count."""

    steps: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    requests_finished: int = 0
