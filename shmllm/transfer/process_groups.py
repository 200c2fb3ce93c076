"""Makes process groups of torch that are objects of their own, beside its default group."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from typing import Any

from shmllm.errors import RequestError
from shmllm.transfer.rendezvous import own_address


def make_gloo(
    prefix: str, store: Any, rank: int, size: int, timeout_s: float, num_threads: int = 1
) -> Any:
    """Return a ProcessGroupGloo, connected to the other processes. It listens on the address by
    which this host reaches the store's.

    Args:
        prefix: what the group's keys in the store begin with.
        store: the TCPStore of all processes.
        rank, size: of this process.
        timeout_s: how long to wait for the others.
        num_threads: how many operations may be under way.

    Raises:
        RuntimeError: they did not connect in time.
        RequestError: there is no way to the store's host.
    """
    distributed: Any = import_module("torch.distributed")
    kind = distributed.ProcessGroupGloo
    options = kind._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = num_threads
    options._devices = [kind.create_device(hostname=own_address(store.host, store.port))]
    return kind(distributed.PrefixStore(prefix, store), rank, size, options)


def make_nccl(prefix: str, store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """Return a ProcessGroupNCCL, which connects at its first operation.

    Args:
        prefix, store, rank, size: as for `make_gloo`.
        timeout_s: how long an operation may take.

    Raises:
        RequestError: this torch has no NCCL.
    """
    distributed: Any = import_module("torch.distributed")
    if not distributed.is_nccl_available():
        raise RequestError(
            "this torch has no NCCL; the backend 'gloo' sends weights through the CPU"
        )
    kind = distributed.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return kind(distributed.PrefixStore(prefix, store), rank, size, options)
