"""Which cores ranks compute on, on machines with several memory nodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shmllm.config.parallel import ParallelConfig
from shmllm.errors import EngineStartError
from shmllm.parallel import cores
from shmllm.parallel.cores import cores_of, threads_of_a_rank, threads_of_an_engine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets the cores of the memory nodes, and those that may be used."""

    def describe(*nodes: list[int], usable: list[int] | None = None) -> None:
        for number, node in enumerate(nodes):
            for core in node:
                (tmp_path / f"node{number}" / f"cpu{core}").mkdir(parents=True)
        found = sum(nodes, []) if usable is None else usable  # noqa: RUF017
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(found))
        monkeypatch.setattr(cores, "_NODES", tmp_path)

    return describe


def bound(threads: int, size: int) -> list[list[int]]:
    """The cores of each rank."""
    found = [cores_of(rank, threads, size) for rank in range(size)]
    return [sorted(each) for each in found if each is not None]


def test_ranks_have_cores_of_their_own_in_their_order(machine: Any) -> None:
    machine([0, 1, 2, 3])
    assert bound(2, 2) == [[0, 1], [2, 3]]
    assert bound(1, 3) == [[0], [1], [2]]


def test_a_rank_lies_on_one_memory_node_if_the_nodes_interleave(machine: Any) -> None:
    machine([0, 2, 4, 6], [1, 3, 5, 7])
    assert bound(4, 2) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert bound(2, 4) == [[0, 2], [4, 6], [1, 3], [5, 7]]


def test_a_rank_lies_on_one_memory_node_if_it_has_room_elsewhere(machine: Any) -> None:
    machine([0, 1, 2], [3, 4, 5])
    assert bound(2, 2) == [[0, 1], [3, 4]]
    assert bound(2, 3) == [[0, 1], [3, 4], [2, 5]]


def test_cores_that_may_not_be_used_are_left_out(machine: Any) -> None:
    machine([0, 1, 2, 3], [4, 5, 6, 7], usable=[1, 3, 6, 7])
    assert bound(2, 2) == [[1, 3], [6, 7]]


def test_a_machine_that_names_no_nodes_has_one(machine: Any) -> None:
    machine(usable=[9, 4, 7, 2])
    assert bound(2, 2) == [[2, 4], [7, 9]]


def test_ranks_with_more_threads_than_cores_are_not_bound(machine: Any) -> None:
    machine([0, 1, 2])
    assert bound(2, 2) == []
    assert bound(1, 3) == [[0], [1], [2]]


RANKS, STAGES = ParallelConfig(tensor_parallel_size=3), ParallelConfig(pipeline_parallel_size=3)


@pytest.mark.parametrize(("num_threads", "threads"), [(None, 2), (3, 1), (7, 2), (9, 3), (30, 10)])
def test_threads_are_those_of_all_ranks_together(
    machine: Any, num_threads: int | None, threads: int
) -> None:
    machine(list(range(8)))
    assert threads_of_a_rank(num_threads, RANKS) == threads


@pytest.mark.parametrize(
    ("parallel", "num_threads", "message"),
    [
        (RANKS, 2, "tensor_parallel_size 3 needs .* num_threads is 2; possible: 1 to 2"),
        (STAGES, None, "pipeline_parallel_size 3 .* usable cores is 2; possible: 1 to 2"),
    ],
)
def test_fewer_threads_than_ranks_are_refused(
    machine: Any, parallel: ParallelConfig, num_threads: int | None, message: str
) -> None:
    machine([0, 1])
    with pytest.raises(EngineStartError, match=message):
        threads_of_a_rank(num_threads, parallel)


def test_the_engines_of_a_pool_divide_the_threads() -> None:
    found = [
        threads_of_an_engine(8, ParallelConfig(pool_size=3, pool_index=index)) for index in range(3)
    ]
    assert found == [3, 3, 2]
    with pytest.raises(EngineStartError, match="num_threads is 2; possible: 1 to 2"):
        threads_of_an_engine(2, ParallelConfig(pool_size=3))
