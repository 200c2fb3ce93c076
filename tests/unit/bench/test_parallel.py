"""The divisions of a model that `shmllm bench parallel` compares, and which one it advises."""

from __future__ import annotations

import pytest

from shmllm.bench.parallel import ONE, best, divisions, flags_of


def sizes(ranks: int, stages: int, engines: int) -> dict[str, int]:
    return {
        "tensor_parallel_size": ranks,
        "pipeline_parallel_size": stages,
        "data_parallel_size": engines,
    }


def test_each_division_has_all_sizes() -> None:
    """Those that the user gives would otherwise count for the others, too."""
    assert divisions(3) == {
        ONE: sizes(1, 1, 1),
        "3 ranks": sizes(3, 1, 1),
        "3 stages": sizes(1, 3, 1),
        "3 engines": sizes(1, 1, 3),
    }


def test_flags_ask_for_a_division() -> None:
    found = [flags_of(division) for division in divisions(3).values()]
    assert found == ["", "--tensor-parallel-size 3", "--pipeline-parallel-size 3", "--engines 3"]


@pytest.mark.parametrize(
    ("ranks", "stages", "expected"), [(104, 99, ONE), (106, 99, "ranks"), (106, 107, "stages")]
)
def test_more_processes_are_advised_only_if_they_are_faster(
    ranks: float, stages: float, expected: str
) -> None:
    assert best({ONE: 100, "ranks": ranks, "stages": stages}) == expected
