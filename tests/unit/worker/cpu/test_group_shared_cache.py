"""Blocks that engines share, of which the ranks of a group have a part each."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.shared_buffers import KV_PART, STATE_PART, make_buffers

from shmllm.core.shared_blocks import BlockCopy
from shmllm.errors import RankDeadError
from shmllm.shared_kv.layout import RegionLayout, Section
from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.region import Region
from shmllm.shared_kv.region_files import adopt, create, remove
from shmllm.worker.cpu.group_shared_cache import MOST_COPIES, GroupSharedCache
from shmllm.worker.cpu.shared_cache import CpuSharedCache
from shmllm.worker.group import Alone, Kind
from shmllm.worker.ranks import NoRanks

SIZE = 2
LAYOUT = RegionLayout((Section(8, SIZE * 3, KV_PART), Section(2, SIZE * 2, STATE_PART)))


class Memory(Alone):
    """The memory of a group, whose other rank computes what `begin` says at once."""

    def __init__(self, rank: int, arrays: dict[str, npt.NDArray[Any]]) -> None:
        super().__init__()
        self.rank, self.arrays = rank, arrays
        self.other: CpuSharedCache | None = None

    def array(self, name: str, *shape: int, dtype: str = "int64") -> npt.NDArray[Any]:
        return self.arrays.setdefault(name, np.zeros(shape, dtype))

    def begin(self, kind: Kind, slot: int = 0) -> None:
        assert kind is Kind.SHARING
        assert self.other is not None
        self.other.copy()


class OneMore(NoRanks):
    """The other rank, in this process. It has ended if there is an `end`."""

    memory: Memory
    end: RankDeadError | None = None

    def __init__(self, memory: Memory) -> None:
        super().__init__(1)
        self.memory = memory

    def everywhere(self, own: Callable[[], Any], name: str, *arguments: Any) -> list[Any]:
        if self.end is not None:
            raise self.end
        assert name == "share"
        method, *rest = arguments
        return [own(), getattr(self.memory.other, method)(*rest)]


class Group:
    """Two ranks with blocks of their own."""

    def __init__(self, in_place: tuple[bool, bool]) -> None:
        arrays: dict[str, npt.NDArray[Any]] = {}
        memories = [Memory(rank, arrays) for rank in range(SIZE)]
        self.buffers = []
        parts = []
        for memory, is_in_place in zip(memories, in_place, strict=True):
            buffers, arena = make_buffers(is_in_place)
            self.buffers.append(buffers)
            parts.append(CpuSharedCache(buffers, arena, memory))
        self.own, self.other = parts
        memories[0].other = self.other
        self.ranks = OneMore(memories[0])
        self.cache = GroupSharedCache(self.own, self.ranks)

    def block(self, section: int, block: int) -> list[bytes]:
        """A block in all buffers of all ranks."""
        return [each[block].numpy().tobytes() for own in self.buffers for each in own[section]]


@pytest.fixture
def path() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder / "0"
    shutil.rmtree(folder)


@pytest.fixture
def region(path: Path) -> Iterator[OwnRegion]:
    own = create(path.parent, LAYOUT, [0])
    yield own
    own.close()


@pytest.mark.parametrize("in_place", [(True, True), (False, False), (True, False), (False, True)])
def test_each_rank_has_its_buffers_of_a_region(
    region: OwnRegion, in_place: tuple[bool, bool]
) -> None:
    group = Group(in_place)
    assert group.cache.is_in_place == all(in_place)
    firsts = group.cache.map(region.fd, LAYOUT)
    saves = [BlockCopy(0, 4, firsts[0] + 7), BlockCopy(1, 3, firsts[1])]
    group.cache.copy(saves)
    for section, source, target in saves:
        size, number = LAYOUT.sections[section].part_bytes, target - firsts[section]
        found = [
            os.pread(region.fd, size, LAYOUT.data_offset + begin + number * size)
            for begin in LAYOUT.buffer_offsets[section]
        ]
        assert found == group.block(section, source)
        if not group.cache.is_in_place:
            group.cache.copy([], [BlockCopy(section, target, 1)])
            assert group.block(section, 1) == found
    group.cache.unmap(firsts)
    assert group.own.mapped_bytes == group.other.mapped_bytes == 0


def test_more_copies_than_there_are_words_for(region: OwnRegion) -> None:
    group = Group((False, False))
    first, _ = group.cache.map(region.fd, LAYOUT)
    group.cache.copy([BlockCopy(0, 4, first)] * MOST_COPIES + [BlockCopy(0, 3, first + 1)])
    group.cache.copy([], [BlockCopy(0, first + 1, 0)])
    assert group.block(0, 0) == group.block(0, 3)


def test_a_region_has_no_other_owner_before_the_last_rank_has_ended(path: Path) -> None:
    group, own = Group((True, True)), create(path.parent, LAYOUT, [0])
    reader = Region.open(path, 0)
    firsts = group.cache.map(own.fd, LAYOUT)
    own.close()  # as if rank 0 had been killed
    assert reader.is_owned
    assert adopt(path, 0, LAYOUT) is None
    assert not remove(path)
    group.cache.unmap(firsts)
    assert not reader.is_owned
    reader.close()
    second = adopt(path, 0, LAYOUT)
    assert second is not None
    second.close()


def test_readers_do_not_own_what_they_map(path: Path) -> None:
    group, own = Group((True, True)), create(path.parent, LAYOUT, [0])
    reader = Region.open(path, 0)
    firsts = group.cache.map(reader.fd, LAYOUT)
    own.close()
    assert not reader.is_owned
    group.cache.unmap(firsts)
    reader.close()


def test_what_one_rank_cannot_map_none_maps(
    region: OwnRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group((True, True))
    with monkeypatch.context() as patch:
        patch.setattr(
            "shmllm.worker.cpu.shared_cache.own_together",
            lambda fd: (_ for _ in ()).throw(BlockingIOError(11, "taken over")),
        )
        with pytest.raises(OSError, match="taken over"):
            group.cache.map(region.fd, LAYOUT)
    assert group.own.mapped_bytes == group.other.mapped_bytes == 0
    first = group.cache.map(region.fd, LAYOUT)
    assert list(first) == [begin for begin, _ in group.own.ids]  # the ids are free again


def test_rank_0_unmaps_its_part_when_another_rank_has_ended(region: OwnRegion) -> None:
    group = Group((True, True))
    firsts = group.cache.map(region.fd, LAYOUT)
    group.ranks.end = RankDeadError("rank 1 was killed")
    group.cache.unmap(firsts)
    assert group.own.mapped_bytes == 0
    with pytest.raises(OSError, match="rank 1 was killed"):
        group.cache.map(region.fd, LAYOUT)
