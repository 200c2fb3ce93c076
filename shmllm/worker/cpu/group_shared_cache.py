"""The blocks that engines share, as all ranks of a group read and write them together.

A block has a part in each rank, under the same id. This module must not know processes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from shmllm.core.shared_blocks import BlockCopy
from shmllm.errors import RankDeadError, ShmLLMError
from shmllm.shared_kv.layout import RegionLayout
from shmllm.shared_kv.memory_calls import is_writable
from shmllm.worker.cpu.shared_cache import MOST_COPIES, CpuSharedCache
from shmllm.worker.group import Kind
from shmllm.worker.id_ranges import RegionIds
from shmllm.worker.ranks import Ranks


class GroupSharedCache:
    """See `shared_kv.peers.BlockMemory`.

    Args:
        own: the part of this process, which is rank 0.
        ranks: the other ranks, which have a part each; there may be none.

    Attributes:
        is_in_place: whether steps read the blocks of regions by their ids, in all ranks.
    """

    def __init__(self, own: CpuSharedCache, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        self._ids = RegionIds(own.ids)
        self.is_in_place = all(self._in_all("reads_in_place"))
        if not self.is_in_place:
            self._in_all("use_copies")

    @property
    def mapped_bytes(self) -> int:
        """The size of all that this process has mapped."""
        return self._own.mapped_bytes

    def map(self, fd: int, layout: RegionLayout) -> tuple[int, ...]:
        """See `shared_kv.peers.BlockMemory.map`."""
        firsts = self._ids.take(layout)
        path = f"/proc/{os.getpid()}/fd/{fd}"  # also if the file has no name any more
        try:
            self._in_all("map", path, is_writable(fd), layout, firsts)
        except ShmLLMError as problem:
            self.unmap(firsts)
            raise OSError(0, str(problem)) from problem
        return firsts

    def unmap(self, firsts: Sequence[int]) -> None:
        """See `shared_kv.peers.BlockMemory.unmap`."""
        with suppress(RankDeadError):
            self._in_all("unmap", tuple(firsts))
        self._own.unmap(tuple(firsts))
        self._ids.give_back(firsts)

    def copy(self, saves: Sequence[BlockCopy], loads: Sequence[BlockCopy] = ()) -> None:
        """Copy blocks of the engine into its region, and then blocks of regions into those of the
        engine. All ranks have done so afterwards.

        Raises:
            RankDeadError: one has ended.
        """
        for begin in range(0, len(saves), MOST_COPIES):
            self._copy(saves[begin : begin + MOST_COPIES], is_load=False)
        for begin in range(0, len(loads), MOST_COPIES):
            self._copy(loads[begin : begin + MOST_COPIES], is_load=True)

    def _copy(self, copies: Sequence[BlockCopy], is_load: bool) -> None:
        own, group = self._own, self._ranks.memory
        with group.turn:
            group.settle()  # the others have read the copies before
            own.copies[: len(copies)] = copies
            own.num_copies[0], own.are_loads[0] = len(copies), is_load
            group.begin(Kind.SHARING)
            own.copy()
            group.settle()

    def _in_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `CpuSharedCache` in all ranks. Returns the results."""

        def own() -> Any:
            return getattr(self._own, method)(*arguments)

        return self._ranks.everywhere(own, "share", method, *arguments)
