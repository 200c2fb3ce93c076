"""Which cores the ranks of a group compute on."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

from shmllm.config.parallel import ParallelConfig
from shmllm.errors import EngineStartError

_NODES = Path("/sys/devices/system/node")


def threads_of_a_rank(num_threads: int | None, parallel: ParallelConfig) -> int:
    """Return the number of compute threads of each process of a group.

    Args:
        num_threads: the number of all processes together; None: the usable cores.
        parallel: the options for the group.

    Raises:
        EngineStartError: there are fewer threads than processes.
    """
    usable = len(os.sched_getaffinity(0))
    total = num_threads or usable
    if total >= parallel.num_processes:
        return total // parallel.num_processes
    told = "num_threads is" if num_threads else "the number of usable cores is"
    raise EngineStartError(
        f"{parallel.option} needs at least a thread for each process, and {told} {total}; "
        f"possible: 1 to {total}"
    )


def threads_of_an_engine(num_threads: int | None, parallel: ParallelConfig) -> int:
    """Return the number of compute threads of an engine.

    Args:
        num_threads: the number of all engines of its pool together; None: the usable cores.
        parallel: the options for the pool.

    Raises:
        EngineStartError: there are fewer threads than engines.
    """
    total, count = num_threads or len(os.sched_getaffinity(0)), parallel.pool_size
    if total < count:
        told = "num_threads is" if num_threads else "the number of usable cores is"
        raise EngineStartError(
            f"data_parallel_size {count} needs at least a thread for each engine, and {told} "
            f"{total}; possible: 1 to {total}"
        )
    # Ranks are bound to equal numbers of cores, so engines of several ranks have equal ones, too.
    extra = total % count if parallel.num_processes == 1 else 0
    return total // count + (parallel.pool_index < extra)


def cores_of(rank: int, threads: int, size: int) -> set[int] | None:
    """Return the cores of a rank, next to each other on one memory node if possible; None: there
    are fewer cores than threads, so that the ranks are not bound."""
    nodes = defaultdict(list)
    for core in sorted(os.sched_getaffinity(0)):
        nodes[_node_of(core)].append(core)
    places, rest = [], []
    for _, usable in sorted(nodes.items()):
        num_whole = len(usable) // threads
        places += [usable[threads * each : threads * (each + 1)] for each in range(num_whole)]
        rest += usable[threads * num_whole :]
    places += [rest[begin : begin + threads] for begin in range(0, len(rest), threads)]
    if sum(map(len, places)) < threads * size:
        return None
    return set(places[rank])


def _node_of(core: int) -> int:
    for path in _NODES.glob(f"node*/cpu{core}"):
        return int(path.parent.name.removeprefix("node"))
    return 0
