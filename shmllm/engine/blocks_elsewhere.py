"""KV blocks outside of the engine's own cache: a cache that engines share, or a connector's.

An engine has one of them or none. This module owns what the engine core does with either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

from shmllm.config.engine import EngineConfig
from shmllm.config.info import EngineInfo
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.scheduler import Scheduler
from shmllm.engine.runner import Runner


class WeightsSource(NamedTuple):
    """Where weights are from.

    directory: the directory from which they were read, or whose model they suit.
    began_s: when the reading began, in seconds since 1970.
    is_random: whether they are random (load_format="dummy").
    """

    directory: str
    began_s: float
    is_random: bool = False

    @classmethod
    def of_start(cls, config: EngineConfig, runner: Runner) -> WeightsSource:
        """Those with which an engine starts."""
        return cls(config.load.directory, runner.began_s, config.load.load_format == "dummy")


class BlocksElsewhere(Protocol):
    """Blocks outside of the engine's cache.

    Attributes:
        problem: why there are none although the options ask for them; empty: there are.
        num_bytes: the memory of those that the engine shares; None: it is not known yet.
    """

    problem: str

    @property
    def num_bytes(self) -> int | None: ...

    @property
    def counters(self) -> Mapping[str, int]:
        """The statistics, by the lower-case name of their Stat."""

    def poll(self) -> None:
        """Do what is due. Called between steps, while the engine is awake."""

    def weights_written(self, source: WeightsSource | None) -> None:
        """The engine has other weights now, and no step is in flight.

        Args:
            source: where they were read from; None: nobody knows, or blocks of other weights are
                still cached.
        """

    def sleep(self) -> None:
        """The engine gives the memory of its KV cache back."""

    def reset(self) -> None:
        """Forget the blocks that this engine has put there."""

    def close(self) -> None:
        """The engine ends, after the last step."""


class NoBlocks:
    """There are none."""

    problem = ""
    num_bytes: int | None = 0
    counters: Mapping[str, int] = {}

    def poll(self) -> None:
        pass

    def weights_written(self, source: WeightsSource | None) -> None:
        pass

    def sleep(self) -> None:
        pass

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass


def info_with(info: EngineInfo, elsewhere: BlocksElsewhere) -> EngineInfo:
    """Return what an engine reports about itself, with what it really shares."""
    warnings = info.warnings
    if elsewhere.problem:
        warnings = (*warnings, elsewhere.problem)
    num_bytes = elsewhere.num_bytes
    shared = info.shared_kv_cache_bytes if num_bytes is None else num_bytes
    return replace(info, warnings=warnings, shared_kv_cache_bytes=shared)


def make_blocks_elsewhere(
    config: EngineConfig,
    runner: Runner,
    source: WeightsSource,
    kv_cache: KVCacheManager,
    scheduler: Scheduler,
    report: Callable[[str], None],
) -> BlocksElsewhere:
    """Make what the options ask for.

    Args:
        config: the engine's configuration.
        runner: reads and writes the blocks.
        source: where the weights are from.
        kv_cache: has the engine's own.
        scheduler: asks a connector.
        report: called with a sentence about something that failed and ends no request.

    Raises:
        EngineStartError: a connector cannot be made.
    """
    if config.shared_kv.num_bytes is not None:
        from shmllm.engine.shared_kv import SharedKVCache

        return SharedKVCache(config, runner, source, kv_cache, report)
    if config.plugins.kv_connector:
        from shmllm.engine.kv_connector import ConnectedEngine

        connected = ConnectedEngine(config, runner, source, kv_cache, report)
        scheduler.connector = connected.scheduler
        return connected
    return NoBlocks()
