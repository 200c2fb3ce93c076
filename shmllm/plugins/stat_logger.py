"""The interface of stat loggers, and the statistics that they get: vLLM's, as far as a front end
knows them.

A front end reads its engine's counters at an interval, so a record covers all steps since the one
before, of all front ends. Fields of vLLM's that need every step or request do not exist; asking for
one is an error that says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn


class _Statistics:
    def __getattr__(self, name: str) -> NoReturn:
        known = ", ".join(each.name for each in fields(self))  # type: ignore[arg-type]
        raise AttributeError(
            f"shmllm's {type(self).__name__} has no {name!r}: front ends read counters at an "
            f"interval, which give {known}"
        )


@dataclass(frozen=True, slots=True)
class PrefixCacheStats(_Statistics):
    """The prompt tokens that were looked up in the prefix cache since the last record, and those
    that it had."""

    queries: int
    hits: int


@dataclass(frozen=True, slots=True)
class SpecDecodingStats(_Statistics):
    """The tokens that were drafted since the last record.

    Attributes:
        num_spec_tokens: the most tokens that are drafted for a request in a step.
        num_drafts: how often tokens were drafted for a request.
        num_draft_tokens: the drafted tokens that a step computed.
        num_accepted_tokens: those that were right.
        num_accepted_tokens_per_pos: by their place in the draft.
    """

    num_spec_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]


@dataclass(frozen=True, slots=True)
class SchedulerStats(_Statistics):
    """The engine's state now.

    Attributes:
        num_running_reqs: the requests that run.
        num_waiting_reqs: the requests that wait.
        step_counter: the steps since the engine's start.
        kv_cache_usage: the part of the KV cache that is used, from 0 to 1.
        prefix_cache_stats: since the last record.
        spec_decoding_stats: since the last record; None: the engine drafts no tokens.
    """

    num_running_reqs: int
    num_waiting_reqs: int
    step_counter: int
    kv_cache_usage: float
    prefix_cache_stats: PrefixCacheStats
    spec_decoding_stats: SpecDecodingStats | None = None


@dataclass(frozen=True, slots=True)
class IterationStats(_Statistics):
    """What the engine did since the last record.

    Attributes:
        iteration_timestamp: when the record was made, in seconds since 1970.
        num_generation_tokens: the tokens generated.
        num_prompt_tokens: the tokens of admitted prompts.
        num_preempted_reqs: how often requests were preempted.
        num_finished_reqs: the requests that ended.
    """

    iteration_timestamp: float
    num_generation_tokens: int
    num_prompt_tokens: int
    num_preempted_reqs: int
    num_finished_reqs: int


class StatLoggerBase(ABC):
    """Gets an engine's statistics, in a thread of the front end.

    Args:
        vllm_config: the engine's configuration, a `VllmConfigView`.
        engine_index: 0. The statistics of a pool's engines are added up.
    """

    @abstractmethod
    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

    @abstractmethod
    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: None = None,
        engine_idx: int = 0,
    ) -> None:
        """Take the statistics of an interval, and those of the last one when the LLM is closed."""

    @abstractmethod
    def log_engine_initialized(self) -> None:
        """The engine is ready."""

    def log(self) -> None:
        """Write what was recorded, after each `record`."""
        return

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """The engine fell asleep: (1, 1 or 2), or woke up: (0, 0)."""
        return


def statistics(
    now: Mapping[str, int], before: Mapping[str, int], timestamp: float
) -> tuple[SchedulerStats, IterationStats]:
    """Make the statistics of an interval.

    Args:
        now, before: the engine's counters at both ends, as `LLM.get_metrics` returns them.
        timestamp: the end, in seconds since 1970.
    """

    def grown(name: str) -> int:
        return now[name] - before[name]

    drafted = None
    if num_places := now.get("num_speculative_tokens", 0):
        drafted = SpecDecodingStats(
            num_places,
            grown("drafts"),
            grown("draft_tokens"),
            grown("accepted_tokens"),
            [grown(f"accepted_at_{place}") for place in range(num_places)],
        )
    return (
        SchedulerStats(
            now["running"],
            now["waiting"],
            now["steps"],
            now["kv_blocks_used"] / max(now["kv_blocks_total"], 1),
            PrefixCacheStats(grown("prefix_query_tokens"), grown("prefix_hit_tokens")),
            drafted,
        ),
        IterationStats(
            timestamp,
            grown("generated_tokens"),
            grown("prompt_tokens"),
            grown("preemptions"),
            grown("requests_finished"),
        ),
    )
