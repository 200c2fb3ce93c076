"""What a tier needs of a disk: BlockDisk, and NO_DISK, which has nothing."""

from __future__ import annotations

from typing import Protocol

FINISH_S = 60.0
"""How long a disk goes on to write after the engine has left, while the process works on something
else."""


class BlockDisk(Protocol):
    """Copies of shared blocks that outlive the regions."""

    def refresh(self) -> None:
        """A prefix is going to be looked up."""

    def contains(self, section: int, key: bytes) -> bool:
        """Whether there is a copy of a block now."""

    def read_ahead(self, section: int, key: bytes) -> None:
        """A contained block is going to be read soon."""

    def read(self, section: int, key: bytes) -> memoryview | None:
        """The undamaged data of a block, until the next call; None: there is none."""

    def refuse(self, section: int, key: bytes) -> None:
        """There is no room for this block: it does not count as contained until `refresh`."""

    def save(self, section: int, key: bytes) -> None:
        """The own region has a new block."""

    def used(self, section: int, key: bytes) -> None:
        """A request reads a block."""

    def clear(self) -> None:
        """Forget all copies."""

    def finish(self, within_s: float = FINISH_S) -> None:
        """Write what waits, as far as the time allows, and end. It does not wait for that."""


class NoDisk:
    """There are no copies."""

    def refresh(self) -> None:
        pass

    def contains(self, section: int, key: bytes) -> bool:
        return False

    def read_ahead(self, section: int, key: bytes) -> None:
        pass

    def read(self, section: int, key: bytes) -> memoryview | None:
        return None

    def refuse(self, section: int, key: bytes) -> None:
        pass

    def save(self, section: int, key: bytes) -> None:
        pass

    def used(self, section: int, key: bytes) -> None:
        pass

    def clear(self) -> None:
        pass

    def finish(self, within_s: float = FINISH_S) -> None:
        pass


NO_DISK = NoDisk()
