"""The memory of all ranks sleeps and wakes together, and what was kept is never lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shmllm.errors import RequestError
from shmllm.outputs.sleep_report import SleepState
from shmllm.parallel.owners import GroupOwners
from shmllm.worker.arena import Contents
from shmllm.worker.cpu.arena import HostArena
from shmllm.worker.cpu.memory import HostMemory
from shmllm.worker.memory_owners import MemoryOwners


class FakeModel:
    """A model whose weights are one tensor."""

    def __init__(self) -> None:
        self.is_asleep = False
        self.missing: set[str] = set()

    def save_buffers(self) -> dict[str, torch.Tensor]:
        return {}

    def restore_buffers(self, saved: dict[str, torch.Tensor]) -> None:
        pass

    def weights_lost(self) -> None:
        self.missing.add("weight")


class Rank:
    """The memory of a rank, with two arenas of weights, of which the second one may refuse."""

    def __init__(self) -> None:
        self.model: Any = FakeModel()
        self.arenas = [HostArena(4096, "weights"), Refusing(4096, "further weights")]
        self.cache = HostArena(4096, "cache")
        self.weight = self.arenas[0].allocate((8,), torch.float32).fill_(7)
        first, *further = self.arenas
        self.owners = MemoryOwners(self.model, first, self.cache, [], HostMemory(), (), 0, further)

    @property
    def contents(self) -> list[Contents]:
        return [arena.contents for arena in self.arenas]


class Refusing(HostArena):
    """An arena that has no memory for what is in `refused`."""

    refused = ""

    def release(self, keep: bool = False) -> None:
        if keep and self.refused == "release":
            raise MemoryError("no memory of the host")
        super().release(keep)

    def restore(self) -> None:
        if self.refused == "restore":
            raise MemoryError("no memory of the device")
        super().restore()


@pytest.fixture
def ranks() -> list[Rank]:
    return [Rank(), Rank()]


@pytest.fixture
def group(ranks: list[Rank]) -> GroupOwners:
    def everywhere(own: Callable[[], Any], name: str, *arguments: Any) -> list[Any]:
        calls = [own, lambda: getattr(ranks[1].owners, name)(*arguments)]
        results, problem = [], None
        for call in calls:
            try:
                results.append(call())
            except RequestError as raised:
                problem = problem or raised
        if problem is not None:
            raise problem
        return results

    return GroupOwners(ranks[0].owners, everywhere)


def refuse(rank: Rank, what: str) -> None:
    further = rank.arenas[1]
    assert isinstance(further, Refusing)
    further.refused = what


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("keep", [True, False])
def test_all_ranks_wake_or_none(
    ranks: list[Rank], group: GroupOwners, failing: int, keep: bool
) -> None:
    group.release(SleepState.WEIGHTS, keep)
    refuse(ranks[failing], "restore")
    with pytest.raises(RequestError, match="weights cannot wake up: no memory of the device"):
        group.restore(SleepState.WEIGHTS)
    for rank in ranks:
        assert rank.contents == [Contents.KEPT if keep else Contents.LOST] * 2
        assert rank.model.is_asleep
        assert rank.owners.num_missing == (0 if keep else 1)
    refuse(ranks[failing], "")
    group.restore(SleepState.WEIGHTS)
    for rank in ranks:
        assert rank.weight.tolist() == [7.0 if keep else 0.0] * 8
        assert not rank.model.is_asleep


def test_kept_weights_that_are_discarded_stay_so(ranks: list[Rank], group: GroupOwners) -> None:
    group.release(SleepState.WEIGHTS, True)
    group.release(SleepState.WEIGHTS, False)
    refuse(ranks[1], "restore")
    with pytest.raises(RequestError):
        group.restore(SleepState.WEIGHTS)
    assert [rank.contents for rank in ranks] == [[Contents.LOST] * 2] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_all_ranks_keep_their_weights_or_stay_awake(
    ranks: list[Rank], group: GroupOwners, failing: int
) -> None:
    refuse(ranks[failing], "release")
    with pytest.raises(RequestError, match="weights cannot be kept: no memory of the host"):
        group.release(SleepState.WEIGHTS, True)
    for rank in ranks:
        assert rank.contents == [Contents.PRESENT] * 2
        assert rank.weight.tolist() == [7.0] * 8
        assert not rank.model.is_asleep


def test_weights_that_cannot_be_kept_again_stay_restored(
    ranks: list[Rank], group: GroupOwners
) -> None:
    group.release(SleepState.WEIGHTS, True)
    refuse(ranks[0], "release")
    first = ranks[1].arenas[0]
    first.restore, usual = _raise, first.restore  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="no memory at all"):
        group.restore(SleepState.WEIGHTS)
    first.restore = usual  # type: ignore[method-assign]
    group.restore(SleepState.WEIGHTS)
    assert [rank.weight.tolist() for rank in ranks] == [[7.0] * 8] * 2


def _raise() -> None:
    raise MemoryError("no memory at all")
