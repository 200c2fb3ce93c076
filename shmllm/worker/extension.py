"""Extends the workers of an engine by a class of the user, as vLLM's `worker_extension_cls` does.

Each rank has a worker, and each worker becomes an instance of a class that has the methods of both.
The functions of this module run in every rank; `engine.worker` calls them there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shmllm.config.info import EngineInfo
from shmllm.config.views import VllmConfigView
from shmllm.errors import EngineStartError
from shmllm.plugins.entry_points import vllm_names
from shmllm.plugins.qualified_names import in_one_line, load_object, shown
from shmllm.worker.extension_adapters import AdapterMethods

JOIN_S = 60
"""How long a rank waits for the others, in seconds."""
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def extend(worker: Any, name: str, info: EngineInfo) -> list[str]:
    """Give a worker the methods of a class, and what such classes use of vLLM's workers:
    `vllm_config` and its parts, `is_driver_worker`, and the methods of `AdapterMethods`.

    Args:
        worker: the worker of this rank.
        name: the class, as "module.Class" or "module:Class".
        info: what the engine reports about itself.

    Returns:
        The names of the methods, sorted.

    Raises:
        EngineStartError: there is no such class, it has an attribute of the worker's, or its
            `__new__` raised.
    """
    with vllm_names():
        found = load_object(name)
    name = shown(name)
    own = type(worker)
    if not isinstance(found, type):
        raise EngineStartError(f"worker_extension_cls {name} is no class")
    names = [each for each in dir(found) if not each.startswith("__")]
    if taken := [each for each in names if hasattr(own, each) or hasattr(AdapterMethods, each)]:
        raise EngineStartError(
            f"worker_extension_cls {name} has {', '.join(taken)}, which the worker has itself; "
            "give it another name"
        )
    view = VllmConfigView.of(info, {}, rank=worker.rank)
    given = {
        "vllm_config": view,
        "local_rank": worker.local_rank,
        "rank": worker.rank,
        "distributed_init_method": "",
        "is_driver_worker": worker.rank == 0,
    }
    bases = (AdapterMethods, own, found)
    both: Any = type(own.__name__, bases, {"__module__": own.__module__})
    try:
        made = both.__new__(both, **given)  # vLLM calls it so, and classes use it to prepare
    except Exception as problem:
        raise EngineStartError(
            f"worker_extension_cls {name} cannot be made: {in_one_line(problem)}"
        ) from problem
    vars(worker).update(vars(made))
    worker.__class__ = both
    worker.vllm_config = worker.model_runner.vllm_config = view
    for part in ("model", "cache", "scheduler", "parallel", "lora", "speculative"):
        setattr(worker, f"{part}_config", getattr(view, f"{part}_config"))
    worker.is_driver_worker = worker.rank == 0
    return sorted(each for each in names if callable(getattr(found, each)))


def join_group(worker: Any, path: str, size: int) -> None:
    """Make this rank a member of torch.distributed's default group, which vLLM's workers have.

    Gloo listens on the loopback interface. A group that the process has already stays.

    Args:
        worker: the worker of this rank.
        path: a file through which the ranks find each other, which none of them removes.
        size: the number of ranks.
    """
    if dist.is_initialized():
        return
    backend = "gloo" if worker.device.type == "cpu" else "cpu:gloo,cuda:nccl"
    with _loopback_only():
        dist.init_process_group(
            backend,
            store=dist.FileStore(path, size),  # type: ignore[attr-defined]
            rank=worker.rank,
            world_size=size,
            timeout=timedelta(seconds=JOIN_S),
        )


@contextmanager
def _loopback_only() -> Iterator[None]:
    before = os.environ.get(_GLOO_INTERFACE)
    os.environ[_GLOO_INTERFACE] = "lo"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_GLOO_INTERFACE]
        else:
            os.environ[_GLOO_INTERFACE] = before
