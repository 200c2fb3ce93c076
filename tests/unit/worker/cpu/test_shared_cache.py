"""Blocks of regions, as the memory of a CPU's KV cache reads and writes them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from support.shared_buffers import KV_PART, STATE_PART, make_buffers
from support.shared_regions import new_region

from shmllm.core.shared_blocks import BlockCopy
from shmllm.shared_kv.layout import RegionLayout, Section
from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.region import Region
from shmllm.worker.cpu.group_shared_cache import GroupSharedCache
from shmllm.worker.cpu.shared_cache import CpuSharedCache
from shmllm.worker.group import Alone
from shmllm.worker.ranks import NoRanks

LAYOUT = RegionLayout((Section(8, 3, KV_PART), Section(2, 2, STATE_PART)))


@pytest.fixture
def region() -> Iterator[OwnRegion]:
    with new_region(LAYOUT) as own:
        yield own


def make(is_in_place: bool) -> tuple[GroupSharedCache, list[list[torch.Tensor]]]:
    buffers, arena = make_buffers(is_in_place)
    return GroupSharedCache(CpuSharedCache(buffers, arena, Alone()), NoRanks(1)), buffers


@pytest.mark.parametrize("is_in_place", [True, False])
@pytest.mark.parametrize(("section", "source"), [(0, 4), (1, 3)])
def test_a_saved_block_is_read_from_the_region(
    region: OwnRegion, is_in_place: bool, section: int, source: int
) -> None:
    cache, buffers = make(is_in_place)
    firsts = cache.map(region.fd, LAYOUT)
    target = firsts[section] + 1
    cache.copy([BlockCopy(section, source, target)])
    expected = [buffer[source].clone() for buffer in buffers[section]]
    if is_in_place:
        for buffer, content in zip(buffers[section], expected, strict=True):
            size = buffer.shape[1]
            found = ctypes.string_at(buffer.data_ptr() + target * size, size)
            assert found == bytes(content.numpy())
    else:
        cache.copy([], [BlockCopy(section, target, 0)])
        for buffer, content in zip(buffers[section], expected, strict=True):
            assert torch.equal(buffer[0], content)
    cache.unmap(firsts)
    assert cache.mapped_bytes == 0


def test_several_regions_have_ids_of_their_own(region: OwnRegion) -> None:
    cache, _ = make(True)
    other = Region.open(region.path, 1)
    first, second = cache.map(region.fd, LAYOUT), cache.map(other.fd, LAYOUT)
    assert cache.mapped_bytes == 2 * LAYOUT.data_bytes
    assert second[0] >= first[0] + LAYOUT.sections[0].num_blocks
    cache.unmap(first)
    assert cache.map(region.fd, LAYOUT) == first
    cache.unmap(first)
    cache.unmap(second)
    other.close()


def test_a_region_that_is_open_for_reading_is_not_written(region: OwnRegion) -> None:
    cache, _ = make(False)
    other = Region.open(region.path, 0)
    firsts = cache.map(other.fd, LAYOUT)
    with pytest.raises(OSError, match="Bad file descriptor"):
        cache.copy([BlockCopy(0, 0, firsts[0])])
    cache.unmap(firsts)
    other.close()
