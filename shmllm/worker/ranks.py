"""The interface of the other ranks of a tensor parallel group, and a runner that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from torch import Tensor

from shmllm.worker.adapters import AdapterMaker, GroupAdapterMaker, OwnAdapters
from shmllm.worker.group import Alone, Group
from shmllm.worker.memory_owners import MemoryOwners, OwnedMemory

T = TypeVar("T")


class Ranks(Protocol):
    """The other ranks, which do what this process does, each with its part of the model.

    Attributes:
        memory: what the ranks share.
        num_threads: the number of compute threads of each rank.
    """

    @property
    def memory(self) -> Group: ...

    num_threads: int

    def everywhere(self, own: Callable[[], T], name: str, *arguments: Any) -> list[T]:
        """Run a method of each other rank, and meanwhile `own`. Returns all results, by rank.

        Raises:
            Exception: what `own` raised, or else the first of the others.
        """

    def elsewhere(self, name: str, *arguments: Any) -> list[Any]:
        """As `everywhere`, in the others only. Returns their results."""

    def together(self, own: Callable[[], T], name: str, *arguments: Any) -> list[T]:
        """As `everywhere`, where all wait for each other: if one raises, the group ends, so that
        none waits for ever."""

    def call(self, own: Callable[[], Any], pickled: Callable[[], bytes]) -> list[Any]:
        """See `LoadedRunner.everywhere`."""

    def watch(self, report: Callable[[int], None]) -> None:
        """Call `report`, on another thread, with the pid of a rank that a signal has stopped, and
        with 0 when it goes on."""

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write weights into the others' models, which have been checked."""

    def owners(self, own: MemoryOwners) -> OwnedMemory:
        """Return the memory of all ranks."""

    def adapters(self, own: AdapterMaker) -> GroupAdapterMaker:
        """Return what makes adapters in all ranks, of what makes them in this one."""

    def close(self) -> None:
        """End the others. Idempotent."""


class NoRanks:
    """A runner that computes the whole model.

    Args:
        num_threads: the number of its compute threads.
    """

    def __init__(self, num_threads: int) -> None:
        self.memory = Alone()
        self.num_threads = num_threads

    def everywhere(self, own: Callable[[], T], name: str, *arguments: Any) -> list[T]:
        return [own()]

    def elsewhere(self, name: str, *arguments: Any) -> list[Any]:
        return []

    def together(self, own: Callable[[], T], name: str, *arguments: Any) -> list[T]:
        return [own()]

    def call(self, own: Callable[[], Any], pickled: Callable[[], bytes]) -> list[Any]:
        return [own()]

    def watch(self, report: Callable[[int], None]) -> None:
        pass

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        pass

    def owners(self, own: MemoryOwners) -> OwnedMemory:
        return own

    def adapters(self, own: AdapterMaker) -> GroupAdapterMaker:
        return OwnAdapters(own)

    def close(self) -> None:
        pass
