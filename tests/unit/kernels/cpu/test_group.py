"""Kernels in which ranks meet: each waits for the others, and all get the same sums."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.waiting import join_all

from shmllm_kernels.cpu import KernelProgram
from shmllm_kernels.cpu.group import LINE_BYTES, MEET, PUBLISH, SUM_PARTS

WIDTH = 7


class Group:
    """The memory of some ranks, which are threads here, and a program for each."""

    def __init__(self, size: int, rows: int) -> None:
        self.num_rows = np.array([rows])
        self.step = np.array([1])
        self.ended = np.zeros(1, np.int64)
        self.waits = np.zeros((size, 2), np.int64)
        self.parts = torch.randn(size, rows, WIDTH)
        self.outs = [torch.full((rows, WIDTH), float("nan")) for _ in range(size)]
        self.programs = [KernelProgram(1) for _ in range(size)]
        self.size = size

    def meeting(self, rank: int, words: np.ndarray) -> list[int]:
        arrays = self.num_rows, self.step, words
        addresses = [array.ctypes.data for array in arrays]
        ended, waits = self.ended.ctypes.data, self.waits[rank].ctypes.data
        return [*addresses, rank, self.size, ended, waits]

    def record_sum(self) -> None:
        words = np.zeros((self.size, LINE_BYTES // 8), np.int64)
        stride = 4 * self.parts.stride(0)
        for rank, (program, out) in enumerate(zip(self.programs, self.outs, strict=True)):
            rows = [self.parts.data_ptr(), stride, self.size, out.data_ptr(), WIDTH]
            program.record(SUM_PARTS, [*self.meeting(rank, words), *rows], keep=[words])

    def start(self, *ranks: int) -> list[threading.Thread]:
        threads = [threading.Thread(target=self.programs[rank].replay) for rank in ranks]
        for thread in threads:
            thread.start()
        return threads


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group(3, 5)
    made.record_sum()
    yield made
    made.ended[0] = 1  # so that no thread outlives a failed test


def summed(parts: torch.Tensor) -> torch.Tensor:
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_ranks_get_the_sum_in_their_order(size: int, rows: int) -> None:
    group = Group(size, rows)
    group.record_sum()
    for step in range(1, 4):
        group.step[0] = step
        group.parts.normal_()
        join_all(group.start(*range(size)))
        for out in group.outs:
            assert torch.equal(out, summed(group.parts))


def test_no_rank_goes_on_before_the_last_one_has_arrived(group: Group) -> None:
    early = group.start(0, 1)
    for thread in early:
        thread.join(0.1)
        assert thread.is_alive()
    group.parts[2] = 3.0
    join_all([*early, *group.start(2)])
    assert torch.equal(group.outs[0], summed(group.parts))


def test_words_of_earlier_steps_do_not_count(group: Group) -> None:
    join_all(group.start(0, 1, 2))
    group.step[0] = 2
    (alone,) = group.start(0)
    alone.join(0.1)
    assert alone.is_alive()
    join_all([alone, *group.start(1, 2)])


def test_the_end_of_the_group_ends_the_waiting(group: Group) -> None:
    waiting = group.start(0)
    group.ended[0] = 1
    join_all(waiting)


def test_only_rank_0_waits_where_it_gathers() -> None:
    group, words = Group(2, 5), np.zeros((2, LINE_BYTES // 8), np.int64)
    for rank, kernel in enumerate((MEET, PUBLISH)):
        group.programs[rank].record(kernel, group.meeting(rank, words), keep=[words])
    (first,) = group.start(0)
    first.join(0.1)
    assert first.is_alive()
    join_all(group.start(1))
    join_all([first])


def test_waits_are_measured_if_they_are_to_be(group: Group) -> None:
    group.waits[0, 0] = 1
    began_ns = time.perf_counter_ns()
    early = group.start(0, 1)
    early[0].join(0.1)
    join_all([*early, *group.start(2)])
    waited_ns = group.waits[:, 1].tolist()
    assert 0 < waited_ns[0] < time.perf_counter_ns() - began_ns
    assert waited_ns[1:] == [0, 0]
