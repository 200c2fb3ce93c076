"""The memory of a group, whose ranks are in one process here."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from shmllm.errors import SegmentError
from shmllm.ipc.wait import WaitPolicy
from shmllm.parallel.memory import NUM_KINDS, GroupMemory
from shmllm.worker.group import Kind

POLICY = WaitPolicy(0, 0, 0.01, 0.01)


@pytest.fixture
def ranks() -> Iterator[tuple[GroupMemory, GroupMemory]]:
    first = GroupMemory.create(2)
    second = GroupMemory(os.dup(first.fd), 1, 2, is_pipeline=False)
    yield first, second
    second.close()
    first.close()


def test_a_rank_gets_all_steps_in_their_order(ranks: tuple[GroupMemory, GroupMemory]) -> None:
    first, second = ranks
    waiter = second.waiter(POLICY)
    begun = [(Kind(1 + n % 3), n) for n in range(NUM_KINDS)]
    for kind, slot in begun:
        first.begin(kind, slot)
    assert [second.next_step(waiter) for _ in begun] == begun


def test_no_step_is_overwritten_before_a_rank_has_seen_it(
    ranks: tuple[GroupMemory, GroupMemory],
) -> None:
    first, second = ranks
    waiter = second.waiter(POLICY)
    for slot in range(NUM_KINDS):
        first.begin(Kind.STEP, slot)
    further = threading.Thread(target=first.begin, args=(Kind.SCORING, NUM_KINDS))
    further.start()
    further.join(0.05)
    assert further.is_alive()
    assert second.next_step(waiter) == (Kind.STEP, 0)
    further.join(5)
    assert not further.is_alive()
    found = [second.next_step(waiter) for _ in range(NUM_KINDS)]
    assert found[0] == (Kind.STEP, 1)
    assert found[-1] == (Kind.SCORING, NUM_KINDS)


def test_the_end_of_the_group_ends_the_wait_for_a_place(
    ranks: tuple[GroupMemory, GroupMemory],
) -> None:
    def fail() -> None:
        raise RuntimeError("rank 1 has ended")

    first, _ = ranks
    first.on_check = fail
    for slot in range(NUM_KINDS):
        first.begin(Kind.STEP, slot)
    first.end()
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        first.begin(Kind.STEP)


def test_other_ranks_find_arrays_whose_places_they_know(
    ranks: tuple[GroupMemory, GroupMemory],
) -> None:
    first, second = ranks
    first.array("numbers", 3)[1] = 7
    with pytest.raises(SegmentError, match="rank 0 has no 'numbers'"):
        second.found("numbers")
    second.places.update(first.new_places())
    assert second.found("numbers").tolist() == [0, 7, 0]
    first.array("more", 2)
    assert list(first.new_places()) == ["more"]
    assert first.new_places() == {}
