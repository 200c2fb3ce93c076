"""`EngineWatch` samples memory and sleep; the test process plays the engine."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

from shmllm.bench.engine_watch import EngineWatch

BYTES = 64 * 2**20
PATIENCE_S = 30


class Engine:
    """A fake LLM whose engine is this process."""

    engine_pid = os.getpid()

    def __init__(self) -> None:
        self.is_asleep = False

    def is_sleeping(self) -> bool:
        return self.is_asleep


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def samples(watch: EngineWatch, number: int = 3) -> list[int]:
    """Waits for `number` more samples and returns their sizes in bytes."""
    known = len(watch.memory)
    wait_until(lambda: len(watch.memory) >= known + number + 1)
    return [size for _, size in watch.memory[known + 1 :]]


def test_memory_that_is_allocated_and_freed_appears_in_the_samples() -> None:
    with EngineWatch(Engine(), 0.001) as watch:
        before = samples(watch)
        block = mmap.mmap(-1, BYTES)
        block.write(b"x" * BYTES)
        during = samples(watch)
        block.close()
        after = samples(watch)
    assert min(during) - max(before) > 0.8 * BYTES
    assert min(during) - max(after) > 0.8 * BYTES
    times = [seconds for seconds, _ in watch.memory]
    assert times == sorted(times)


def test_each_sleep_is_one_interval() -> None:
    engine = Engine()
    with EngineWatch(engine, 0.001) as watch:
        for is_asleep in (False, True, False, True, False):
            engine.is_asleep = is_asleep
            samples(watch)
    assert len(watch.asleep) == 2
    (_, first_end), (second_begin, second_end) = watch.asleep
    assert first_end <= second_begin < second_end


def test_sampling_ends_when_the_engine_has_ended() -> None:
    class Dead(Engine):
        def is_sleeping(self) -> bool:
            raise ProcessLookupError

    with EngineWatch(Dead(), 0.001) as watch:
        wait_until(lambda: not watch._thread.is_alive())
    assert not watch.memory
