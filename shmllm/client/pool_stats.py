"""The counters and gauges of a pool: sums over its engines, also over those that have ended.

Counters never fall: readers take the difference of two of them.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence
from typing import Protocol

STATES = frozenset(
    {"paused", "asleep", "num_speculative_tokens", "draft_break_even", "stopped_rank"}
)
"""What an engine is, as numbers. That of a pool is that of any engine that has it."""
GAUGES = STATES | {
    "running", "waiting", "kv_blocks_total", "kv_blocks_used", "weight_bytes_loaded",
    "weight_bytes_total", "graphs_captured", "graphs_total", "shared_kv_cache_bytes",
}  # fmt: skip
"""What an engine has now, and no more when it has ended."""


def sum_of_stats(stats: Sequence[dict[str, int]]) -> dict[str, int]:
    """Add up the counters and gauges of engines, of one at least. Names may lack in some."""
    names = dict.fromkeys(name for each in stats for name in each)
    return {
        name: (max if name in STATES else sum)([each.get(name, 0) for each in stats])
        for name in names
    }


def counters_of(stats: dict[str, int]) -> dict[str, int]:
    """The statistics of an engine that has ended."""
    return {name: 0 if name in GAUGES else value for name, value in stats.items()}


class HasStats(Protocol):
    """The client of an engine, as an `EngineClient`."""

    def stats(self) -> dict[str, int]: ...


class PastStats:
    """The counters of engines that were replaced.

    Attributes:
        lock: hold it to replace an engine, or to read the statistics of all.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may read while its thread does
        self._sum: dict[str, int] = {}

    def add(self, stats: dict[str, int]) -> None:
        """Add those of an engine that is replaced now."""
        self._sum = sum_of_stats([self._sum, counters_of(stats)])

    def with_those_of(self, clients: Sequence[HasStats], alive: Container[int]) -> dict[str, int]:
        """The sum with the statistics of a pool's engines, of which some may have ended.

        Args:
            clients: the clients of the engines.
            alive: the indexes of those that run.
        """
        with self.lock:
            found = [client.stats() for client in clients]
            own = [each if k in alive else counters_of(each) for k, each in enumerate(found)]
            return sum_of_stats([*own, self._sum])
