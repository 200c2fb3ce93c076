"""Memory for tensors: read as written, and freed when no rank reads it any more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
import torch

from shmllm.errors import RankDeadError
from shmllm.parallel import staging
from shmllm.parallel.staging import StagingReader, StagingWriter


class Group:
    """Rank 0's and another rank's end of the memory.

    Attributes:
        held: the size of the memory when rank 0 waited for the other ranks.
        has_ended: whether the group has ended.
    """

    def __init__(self) -> None:
        self.held: list[int] = []
        self.has_ended = False
        self.first = StagingWriter(self.settle)
        self.second = StagingReader(self.first.fd)

    @property
    def num_bytes(self) -> int:
        return os.fstat(self.first.fd).st_size

    def settle(self) -> None:
        self.held.append(self.num_bytes)
        if self.has_ended:
            raise RankDeadError("rank 1 has ended")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setattr(staging, "BATCH_BYTES", 256)
    made = Group()
    yield made
    made.first.close()


TENSORS = [
    ("a", torch.arange(30.0).view(5, 6)),
    ("b", torch.ones(3, dtype=torch.bfloat16)),
    ("none", torch.empty(0, 4)),
    ("c", torch.arange(100, dtype=torch.int8)),
]


def test_tensors_are_read_as_they_were_written(group: Group) -> None:
    found, sizes = [], []
    with closing(group.first.batches(TENSORS)) as batches:
        for batch in batches:
            found += [(name, tensor.clone()) for name, tensor in group.second.read(batch)]
            sizes.append(len(batch))
    assert sizes == [3, 1]
    for (name, ours), (expected_name, expected) in zip(found, TENSORS, strict=True):
        assert name == expected_name
        assert torch.equal(ours, expected)
        assert ours.dtype == expected.dtype
    assert group.num_bytes == 0


def test_the_memory_is_freed_behind_a_failure_when_no_rank_reads_it(group: Group) -> None:
    with suppress(KeyboardInterrupt), closing(group.first.batches(TENSORS)) as batches:
        next(batches)
        raise KeyboardInterrupt
    assert group.held == [192]
    assert group.num_bytes == 0


def test_the_memory_is_freed_when_the_ranks_have_ended(group: Group) -> None:
    group.has_ended = True
    with closing(group.first.batches(TENSORS)) as batches:
        next(batches)
    assert group.num_bytes == 0


def test_a_second_close_closes_nothing_that_was_opened_since(group: Group) -> None:
    number, other = group.first.fd, os.memfd_create("other")
    group.first.close()
    os.dup2(other, number)
    group.first.close()
    for fd in (number, other):
        os.close(fd)
