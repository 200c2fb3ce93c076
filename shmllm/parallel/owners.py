"""The memory of all ranks of a group: what one releases or restores, all do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple
from typing import Any

from shmllm.errors import RequestError
from shmllm.outputs.sleep_report import OwnedBytes, SleepState
from shmllm.worker.memory_owners import MemoryOwners

Everywhere = Callable[..., list[Any]]
"""(what this process does, the name of what the others do, arguments) -> the results."""


class GroupOwners:
    """See `worker.memory_owners.OwnedMemory`.

    Args:
        own: the memory of this process.
        everywhere: `Ranks.everywhere`.
    """

    def __init__(self, own: MemoryOwners, everywhere: Everywhere) -> None:
        self._own = own
        self._everywhere = everywhere

    @property
    def num_missing(self) -> int:
        """The number of weights that were lost and have not been written since; each rank has its
        part of all of them."""
        return self._own.num_missing

    def release(self, part: SleepState, keep: bool) -> None:
        """See `MemoryOwners.release`. All ranks release a part, or none if it is to be kept."""
        try:
            self._release(part, keep)
        except Exception:
            if keep:
                self._restore(part)
            raise

    def restore(self, part: SleepState) -> None:
        """See `MemoryOwners.restore`. All ranks restore a part, or none; what was kept stays so."""
        keep = not self._own.has_lost(part)
        try:
            self._restore(part)
        except Exception:
            with suppress(RequestError):  # what cannot be kept again stays restored
                self._release(part, keep)
            raise

    def _release(self, part: SleepState, keep: bool) -> None:
        self._everywhere(lambda: self._own.release(part, keep), "release", part, keep)

    def _restore(self, part: SleepState) -> None:
        self._everywhere(lambda: self._own.restore(part), "restore", part)

    def tidy(self) -> None:
        """See `MemoryOwners.tidy`."""
        self._everywhere(self._own.tidy, "tidy")

    def measure(self) -> OwnedBytes:
        """Return the bytes that each owner takes now, in all processes."""
        found = self._everywhere(self._own.measure, "measure")
        return OwnedBytes(*(sum(each) for each in zip(*map(astuple, found), strict=True)))
