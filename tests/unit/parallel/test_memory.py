"""The words by which the ranks of a group begin and leave steps."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
from support.waiting import join_all, wait_until

from shmllm.config.parallel import MOST_PROCESSES
from shmllm.errors import RankDeadError, SegmentError
from shmllm.parallel.memory import NUM_KINDS, GroupMemory
from shmllm.parallel.rank import serve
from shmllm.parallel.replies import unpack
from shmllm.worker.cpu.inputs import CpuInputs
from shmllm.worker.group import Kind
from shmllm.worker.step_inputs import StepInputs
from shmllm_kernels.cpu.group import AwaitMore

# How long a test looks whether something does not happen.
LOOK_S = 0.1


class FakeServer:
    """A rank whose steps last until `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.played: list[tuple[Kind, int]] = []

    def play(self, kind: Kind, slot: int) -> None:
        self.played.append((kind, slot))
        self.go.wait()


class Group:
    """Two ranks of one process. The second one serves on a thread."""

    def __init__(self, first: GroupMemory, second: GroupMemory) -> None:
        self.first, self.second = first, second
        self.second.look = AwaitMore(self.second.step.ctypes.data)
        self.server: Any = FakeServer()
        self.commands, theirs = Pipe()
        self.thread = start(lambda: serve(self.server, self.second, theirs, theirs))

    def begin(self) -> None:
        """Begin a step, which the other rank computes now."""
        count = len(self.server.played)
        self.first.begin(Kind.STEP)
        wait_until(lambda: len(self.server.played) > count, "the step of the other rank")

    def end(self) -> None:
        """End all waits of the two ranks."""
        self.first.end()
        self.server.go.set()
        join_all([self.thread])


def start(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


@contextmanager
def memories(size: int) -> Iterator[tuple[GroupMemory, ...]]:
    """The memory of a group, as each of its ranks has it. The end ends all waits of rank 0."""
    first = GroupMemory.create(size)
    others = [GroupMemory(os.dup(first.fd), rank, size, False) for rank in range(1, size)]
    try:
        yield first, *others
    finally:
        first.end()
        for memory in (*others, first):
            memory.close()


@pytest.fixture
def group() -> Iterator[Group]:
    with memories(2) as (first, second):
        made = Group(first, second)
        try:
            yield made
        finally:
            made.end()


def assert_waits(thread: threading.Thread) -> None:
    thread.join(LOOK_S)
    assert thread.is_alive()


def test_rank_0_waits_until_the_others_have_left_the_step(group: Group) -> None:
    group.first.settle()
    group.begin()
    settling = start(group.first.settle)
    assert_waits(settling)
    group.server.go.set()
    join_all([settling])
    assert group.server.played == [(Kind.STEP, 0)]


def test_inputs_stay_until_the_others_have_left_the_step(group: Group) -> None:
    step = StepInputs(**{field.name: np.ones(1, np.int64) for field in fields(StepInputs)})
    step.slot_mapping = np.ones((1, 1), np.int64)
    inputs = CpuInputs(4, 4, [], 1, memory=group.first)
    inputs.fill(step)
    group.begin()
    inputs.token_ids[0] = 7
    filling = start(lambda: inputs.fill(step))
    assert_waits(filling)
    assert inputs.token_ids[0] == 7
    group.server.go.set()
    join_all([filling])
    assert inputs.token_ids[0] == 1


def test_the_end_of_the_group_ends_the_wait(group: Group) -> None:
    group.begin()

    def settle() -> None:
        with pytest.raises(RankDeadError, match="the group has ended"):
            group.first.settle()

    settling = start(settle)
    assert_waits(settling)
    group.first.end()
    join_all([settling])


def test_a_command_is_left_before_its_reply_comes(group: Group) -> None:
    group.server.go.set()
    group.server.answer = lambda: 5
    group.first.begin(Kind.COMMAND)
    group.commands.send(("answer", (), {}))
    assert unpack(group.commands.recv_bytes()) == (5, None)
    group.first.settle()


class CodeError(Exception):
    """An exception that a pickle cannot make again: it has fewer arguments than its constructor."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} {code}")


def test_an_error_of_any_class_is_the_reply_of_a_command(group: Group) -> None:
    def fail() -> None:
        raise CodeError("no such thing", 7)

    group.server.go.set()
    group.server.answer = fail
    group.first.begin(Kind.COMMAND)
    group.commands.send(("answer", (), {}))
    result, failure = unpack(group.commands.recv_bytes())
    assert result is None
    assert failure is not None
    assert str(failure.error_of(1)).startswith("rank 1: CodeError: no such thing 7\nTraceback ")
    group.first.settle()


def test_steps_of_a_pipeline_are_computed_in_their_order_each_with_its_slot(group: Group) -> None:
    group.begin()
    for slot in (1, 2, 0):
        group.first.begin(Kind.STEP, slot)
    settling = start(lambda: group.first.settle(1))
    assert_waits(settling)
    group.server.go.set()
    join_all([settling])
    group.first.settle()
    assert group.server.played == [(Kind.STEP, slot) for slot in (0, 1, 2, 0)]


def test_the_words_of_all_ranks_lie_apart() -> None:
    with memories(MOST_PROCESSES) as (first, *others):
        first.begin(Kind.SCORING)
        settling = start(first.settle)
        for other in others:
            assert settling.is_alive()
            assert other.next_step(other.waiter()) == (Kind.SCORING, 0)
            other.has_left()
        join_all([settling])


def test_a_rank_that_asks_for_another_array_than_rank_0_is_refused(group: Group) -> None:
    group.first.array("numbers", 3)
    group.second.places = group.first.places
    group.first.array("numbers", 3)[1] = 7
    assert group.second.array("numbers", 3).tolist() == [0, 7, 0]
    for wrong in ((4,), (3, 1)):
        with pytest.raises(SegmentError, match="rank 0 has"):
            GroupMemory.array(group.second, "others", *wrong)


@pytest.fixture
def ranks() -> Iterator[tuple[GroupMemory, ...]]:
    with memories(2) as made:
        yield made


def test_a_rank_gets_all_steps_in_their_order(ranks: tuple[GroupMemory, ...]) -> None:
    first, second = ranks
    waiter = second.waiter()
    begun = [(Kind(1 + n % 3), n) for n in range(NUM_KINDS)]
    for kind, slot in begun:
        first.begin(kind, slot)
    assert [second.next_step(waiter) for _ in begun] == begun


def test_no_step_is_overwritten_before_a_rank_has_left_it(
    ranks: tuple[GroupMemory, ...],
) -> None:
    first, second = ranks
    waiter = second.waiter()
    for slot in range(NUM_KINDS):
        first.begin(Kind.STEP, slot)
    further = start(lambda: first.begin(Kind.SCORING, NUM_KINDS))
    assert_waits(further)
    assert second.next_step(waiter) == (Kind.STEP, 0)
    second.has_left()
    join_all([further])
    found = [second.next_step(waiter) for _ in range(NUM_KINDS)]
    assert found[0] == (Kind.STEP, 1)
    assert found[-1] == (Kind.SCORING, NUM_KINDS)


def test_the_end_of_the_group_ends_the_wait_for_a_place(
    ranks: tuple[GroupMemory, ...],
) -> None:
    first, _ = ranks
    first.describe_end = lambda: "rank 1 was ended"
    for slot in range(NUM_KINDS):
        first.begin(Kind.STEP, slot)
    first.end()
    with pytest.raises(RankDeadError, match="rank 1 was ended"):
        first.begin(Kind.STEP)


def test_other_ranks_find_arrays_whose_places_they_know(
    ranks: tuple[GroupMemory, ...],
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


def test_a_rank_gets_the_label_of_each_step(ranks: tuple[GroupMemory, ...]) -> None:
    first, second = ranks
    waiter = second.waiter()
    for label in (7, 0, 9):
        first.label = label
        first.begin(Kind.STEP)
    found = []
    for _ in range(3):
        second.next_step(waiter)
        found.append(second.label_of_step())
    assert found == [7, 0, 9]


def test_the_memory_of_floats_is_given_back_and_words_stay(
    ranks: tuple[GroupMemory, ...],
) -> None:
    first, second = ranks
    first.floats("buffer", 1000, 512).fill_(3)
    first.array("words", 600)[:] = 7
    second.places.update(first.new_places())
    theirs = second.floats("buffer", 1000, 512)
    assert theirs.sum() == 3 * 512_000
    assert first.workspace_bytes == second.workspace_bytes == 4 * 512_000
    first.drop_workspace()
    assert first.workspace_bytes == 0
    assert second.array("words", 600).tolist() == [7] * 600
    assert not theirs.any()
    theirs[0] = 5
    assert first.floats("buffer", 1000, 512)[0, 511] == 5


def test_a_second_close_closes_nothing_that_was_opened_since() -> None:
    memory, other = GroupMemory.create(2), os.memfd_create("other")
    number = memory.fd
    memory.close()
    os.dup2(other, number)
    memory.close()
    for fd in (number, other):
        os.close(fd)
