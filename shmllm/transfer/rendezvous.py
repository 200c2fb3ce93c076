"""How a trainer and engines find each other: through a key-value store that the trainer serves.

    engine                                     trainer
    joined += 1 (its index), workers/INDEX     waits until the workers add up, then
    waits for place/INDEX                      place/INDEX = {"rank", "size"} or {"error"}

Only one process of an engine joins, for all of its workers; so the group is smaller than the number
of workers that programs call `world_size`. No wait is longer than its deadline.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any

from shmllm.errors import RequestError

POLL_S = 0.005
ANSWER_S = 1.0
"""How long a trainer that gives up lets its engines know why. Engines wait that much longer than
the trainer does."""


def serve_store(address: str, port: int, timeout_s: float) -> Any:
    """The store of a trainer, which listens on `address` only.

    Args:
        address: an address of this host.
        port: 0 takes a free port; the store's `port` says which.
        timeout_s: the longest time that a call of the store waits, in seconds.

    Raises:
        RequestError: this host cannot listen there.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(where[:2], family=family)
    except OSError as problem:
        raise RequestError(f"cannot listen on {address}:{port}: {problem}") from problem
    with listener:
        port = listener.getsockname()[1]
        descriptor = listener.detach()
    return import_module("torch.distributed").TCPStore(
        address,
        port,
        None,
        True,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )


def join_store(address: str, port: int, timeout_s: float) -> Any:
    """The store that a trainer serves, for an engine.

    Raises:
        RequestError: nobody serves it within `timeout_s` seconds.
    """
    try:
        return import_module("torch.distributed").TCPStore(
            address, port, None, False, timedelta(seconds=timeout_s)
        )
    except RuntimeError as problem:
        raise RequestError(
            f"no trainer answers at {address}:{port} within {timeout_s:g} s: {_short(problem)}"
        ) from problem


def announce(store: Any, num_workers: int, deadline: float) -> tuple[int, int]:
    """Join a trainer's group with an engine.

    Args:
        store: the trainer's store.
        num_workers: the number of processes that this engine stands for.
        deadline: when to give up, as `time.monotonic` counts.

    Returns:
        The engine's rank in the group, and the group's size.

    Raises:
        RequestError: the trainer refuses the engine, is gone, or does not answer in time.
    """
    try:
        index = store.add("joined", 1)
        store.set(f"workers/{index}", str(num_workers))
        while not store.check([f"place/{index}"]):
            if time.monotonic() > deadline:
                raise RequestError("the trainer waits for other engines; check its world_size")
            time.sleep(POLL_S)
        place = json.loads(store.get(f"place/{index}"))
    except RuntimeError as problem:
        raise RequestError(f"the trainer is gone: {_short(problem)}") from problem
    if "error" in place:
        raise RequestError(place["error"])
    return place["rank"], place["size"]


def gather(store: Any, num_workers: int, deadline: float, look: Callable[[], None]) -> int:
    """Wait until engines with so many workers have joined, and tell them their ranks.

    Args:
        store: the trainer's store.
        num_workers: the number of workers of all engines together.
        deadline: when to give up, as `time.monotonic` counts.
        look: called again and again; raises if there is no use in waiting.

    Returns:
        The size of the group: the trainer and the engines.

    Raises:
        RequestError: too many workers, or too few at the deadline.
    """
    num_engines = 0
    try:
        while True:
            look()
            num_engines = int(store.add("joined", 0))
            keys = [f"workers/{index}" for index in range(1, num_engines + 1)]
            found = sum(int(store.get(key)) for key in keys if store.check([key]))
            is_late = time.monotonic() > deadline
            if found > num_workers or (is_late and found < num_workers):
                raise RequestError(
                    f"engines with {found} workers have joined, but the trainer's world_size is "
                    f"{num_workers + 1}: it must be 1 and the number of all workers"
                )
            if found == num_workers:
                break
            time.sleep(POLL_S)
    except RequestError as problem:
        _tell(store, [{"error": str(problem)}] * num_engines)
        raise
    size = num_engines + 1
    _tell(store, [{"rank": rank, "size": size} for rank in range(1, size)])
    return size


def _tell(store: Any, places: list[dict[str, Any]]) -> None:
    for index, place in enumerate(places, 1):
        store.set(f"place/{index}", json.dumps(place))


def say_gone(store: Any) -> None:
    """Let the engines know that the trainer ends the connection."""
    store.set("gone", "")


def is_gone(store: Any) -> bool:
    """Whether the trainer has ended the connection. Raises RuntimeError if it is gone itself."""
    found: bool = store.check(["gone"])
    return found


def own_address(address: str, port: int) -> str:
    """The address by which this host reaches another one; a loopback address for its own."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing
            found: str = probe.getsockname()[0]
            return found
    except OSError as problem:
        raise RequestError(f"no way to {address}: {problem}") from problem


def _short(problem: Exception) -> str:
    return str(problem).partition("\n")[0]
