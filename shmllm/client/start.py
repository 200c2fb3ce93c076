"""Makes pools: starts several private engines, or attaches to several named ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from shmllm.client.attached import AttachedEngineClient
from shmllm.client.pool import EnginePool
from shmllm.client.private import PrivateEngineClient
from shmllm.client.revival import Revival
from shmllm.config.engine import EngineConfig
from shmllm.errors import EngineStartError


def start_engines(config: EngineConfig, count: int, startup_timeout_s: float) -> EnginePool:
    """Start engine processes. They load their models meanwhile.

    Args:
        config: the configuration of all engines together; see `config_of`.
        count: the number of engines; at least 2.
        startup_timeout_s: how many seconds they may take to become ready.

    Raises:
        EngineStartError: there are fewer threads than engines.
        NoSpaceError: there is no room for the segments.
    """
    configs = [config_of(config, index, count) for index in range(count)]
    clients = [PrivateEngineClient(configs[0], startup_timeout_s=startup_timeout_s)]
    waiter = clients[0].waiter

    def start(index: int) -> PrivateEngineClient:
        return PrivateEngineClient(
            configs[index], startup_timeout_s=startup_timeout_s, waiter=waiter
        )

    try:
        clients += [start(index) for index in range(1, count)]
    except BaseException:
        _close(clients)
        raise
    return EnginePool(clients, Revival(start))


def config_of(config: EngineConfig, index: int, count: int) -> EngineConfig:
    """Return the configuration of one of several equal engines.

    On a CPU they divide `num_threads` and `kv_cache_memory_bytes`. On GPUs each has its own: those
    from the named one on, as many for each as it has ranks.

    Raises:
        EngineStartError: there are fewer threads than engines.
    """
    if config.device.startswith("cuda"):
        first = int(config.device.partition(":")[2] or 0)
        size = config.parallel.num_processes
        return replace(config, device=f"cuda:{first + index * size}")
    num_threads = config.num_threads or len(os.sched_getaffinity(0))
    if num_threads < count:
        raise EngineStartError(
            f"data_parallel_size {count} needs a thread for each engine, and num_threads is "
            f"{num_threads}; possible: 1 to {num_threads}"
        )
    given = config.cache.memory_bytes
    cache = config.cache if given is None else replace(config.cache, memory_bytes=given // count)
    own = num_threads // count + (index < num_threads % count)
    return replace(config, num_threads=own, cache=cache)


def attach_engines(names: Sequence[str]) -> AttachedEngineClient | EnginePool:
    """Connect to named engines.

    Raises:
        SegmentError: one of them cannot be attached to.
    """
    first = AttachedEngineClient(names[0])
    clients = [first]
    try:
        clients += [AttachedEngineClient(name, leader=first) for name in names[1:]]
    except BaseException:
        _close(clients)
        raise
    return first if len(clients) == 1 else EnginePool(clients)


def _close(clients: Sequence[PrivateEngineClient] | Sequence[AttachedEngineClient]) -> None:
    for client in reversed(clients):
        client.close()
