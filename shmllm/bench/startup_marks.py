"""Reads the start timestamps of this process's engine, for the program in `startup`."""

from __future__ import annotations

from shmllm.ipc.stats import Mark
from shmllm.monitor.find import engine_of_this_process
from shmllm.monitor.sample import Watch


def marks_ns() -> list[int]:
    """When the engine process began, had imported its libraries, and was ready (monotonic ns)."""
    engine = engine_of_this_process()
    assert engine is not None
    watch = Watch(engine)
    try:
        return [watch.mark_ns(mark) for mark in Mark]
    finally:
        watch.close()
