"""Makes pools: starts several private engines, or attaches to several named ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shmllm.client.attached import AttachedEngineClient
from shmllm.client.pool import EnginePool
from shmllm.client.private import PrivateEngineClient
from shmllm.client.revival import Revival
from shmllm.config.engine import EngineConfig
from shmllm.config.shared_kv import Role
from shmllm.ipc.output_waiter import OutputWaiter


def start_engines(
    config: EngineConfig, count: int, startup_timeout_s: float, num_prefills: int = 0
) -> EnginePool:
    """Start engine processes. They load their models meanwhile.

    Args:
        config: the configuration of all engines together. On a CPU they divide `num_threads` and
            `kv_cache_memory_bytes`; on GPUs each has its own, from the named one on.
        count: the number of engines; at least 2.
        startup_timeout_s: how many seconds they may take to become ready.
        num_prefills: how many of them, the first ones, have the role "prefill"; the others then
            have the role "decode".

    Raises:
        EngineStartError: engines with roles have no shared cache.
        NoSpaceError: there is no room for the segments.
    """

    def start(
        index: int, waiter: OutputWaiter | None, num_starting: int = 1
    ) -> PrivateEngineClient:
        own = replace(config.parallel, pool_size=count, pool_index=index, num_starting=num_starting)
        shared_kv = config.shared_kv
        if num_prefills:
            role: Role = "prefill" if index < num_prefills else "decode"
            shared_kv = replace(shared_kv, role=role)
            shared_kv.check_role()
        return PrivateEngineClient(
            replace(config, parallel=own, shared_kv=shared_kv),
            startup_timeout_s=startup_timeout_s,
            waiter=waiter,
        )

    clients = [start(0, None, count)]
    waiter = clients[0].waiter
    try:
        clients += [start(index, waiter, count) for index in range(1, count)]
    except BaseException:
        _close(clients)
        raise
    return EnginePool(clients, Revival(lambda index: start(index, waiter)))


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
