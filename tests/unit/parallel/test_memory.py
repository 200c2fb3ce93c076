"""The memory of a group in rank 0."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from support.waiting import join_all

from shmllm.parallel.memory import GroupMemory
from shmllm.worker.cpu.group import Kind


@pytest.fixture
def memory() -> Iterator[GroupMemory]:
    found = GroupMemory.create(2)
    yield found
    found.close()


def test_a_step_begins_when_the_one_before_has_ended(memory: GroupMemory) -> None:
    """An engine reads adapters while a step runs on another thread."""
    steps: list[int] = []

    def play() -> None:
        with memory.playing(Kind.SCORING):
            steps.append(int(memory.step[0]))

    other = threading.Thread(target=play)
    with memory.playing(Kind.STEP):
        other.start()
        other.join(0.1)
        assert (steps, int(memory.step[0])) == ([], 1)
    join_all([other])
    assert steps == [2]
