"""The regions of other engines: which there are, where their blocks are read, and whose pins count.

An engine keeps the regions open whose blocks it reads, and those of all living engines, because it
has to look at their pins before it overwrites a block of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shmllm.errors import IpcError, ProtocolMismatchError
from shmllm.ipc.segment import is_locked
from shmllm.shared_kv.folder import places, region_path
from shmllm.shared_kv.layout import RegionLayout
from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.region import Region, open_regular


class BlockMemory(Protocol):
    """Where the engine reads the blocks of regions."""

    def map(self, fd: int, layout: RegionLayout) -> tuple[int, ...]:
        """Provide the data of a region.

        Args:
            fd: the file, which may be closed afterwards.
            layout: its layout.

        Returns:
            For each section the id of its first block.

        Raises:
            OSError: it cannot be mapped.
        """

    def unmap(self, firsts: Sequence[int]) -> None:
        """End that. No block of it is read any more.

        Args:
            firsts: what `map` returned.
        """


class SharedCache(BlockMemory, Protocol):
    """A `BlockMemory` of a runner."""

    @property
    def is_in_place(self) -> bool:
        """Whether steps read the blocks by their ids. Else they are copied first."""


class Loan(NamedTuple):
    """A block that requests of this engine read: of which region, section and number."""

    peer: Peer
    section: int
    block: int


@dataclass(slots=True, eq=False)
class Peer:
    """A region of the folder.

    Attributes:
        region: the region.
        firsts: for each section the id of its first block; None: its data is not mapped.
        num_lent: the number of its blocks that are lent.
    """

    region: Region
    firsts: tuple[int, ...] | None = None
    num_lent: int = 0


class Peers:
    """
    Args:
        own: the region of this engine.
        memory: where blocks are read.
    """

    def __init__(self, own: OwnRegion, memory: BlockMemory) -> None:
        self._own, self._memory = own, memory
        self._folder = own.path.parent
        self._peers: dict[int, Peer] = {}
        self._bad: set[int] = set()

    @property
    def readers(self) -> list[Region]:
        """The regions of the living engines, whose pins count."""
        return [each.region for each in self._peers.values() if each.region.is_owned]

    def look(self) -> None:
        """Look which regions there are.

        Raises:
            IpcError, OSError: that of a living engine cannot be read, so nobody knows its pins.
        """
        found = places(self._folder)
        found.pop(self._own.place, None)
        inodes = set(found.values())
        if inodes != self._peers.keys() | self._bad:
            for inode in self._peers.keys() - inodes:
                if not self._peers[inode].num_lent:
                    self._drop(inode)
            self._bad &= inodes
            for place, inode in found.items():
                if inode not in self._peers and inode not in self._bad:
                    self._open(place)
        for peer in [*self._peers.values()]:
            if peer.firsts is None and not peer.region.is_removed:
                self._map(peer)

    def find(self, section: int, key: bytes) -> Loan | None:
        """Return where a block of this key is now, not lent yet; None: nowhere.

        Raises:
            ProtocolMismatchError: a region is damaged.
        """
        for peer in self._peers.values():
            if peer.firsts is not None:
                block = peer.region.find(section, key)
                if block is not None:
                    return Loan(peer, section, block)
        return None

    def close(self) -> None:
        """Close all regions; no block is read any more."""
        for peer in self._peers.values():
            self._unmap(peer)
            peer.region.close()
        self._peers.clear()

    def _open(self, place: int) -> None:
        path = region_path(self._folder, place)
        try:
            fd = open_regular(path, os.O_RDONLY)
        except FileNotFoundError:
            return  # it was removed meanwhile
        inode = os.fstat(fd).st_ino
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            try:
                region = Region(fd, path, place)
            except ProtocolMismatchError:
                if is_locked(fd):
                    raise
                self._bad.add(inode)  # nobody reads by it, and who would adopt it removes it
                return
            undo.pop_all()  # the region closes it
        self._peers[inode] = Peer(region)

    def _map(self, peer: Peer) -> None:
        region = peer.region
        others = self._peers.values()
        if any(each.firsts is not None and each.region.place == region.place for each in others):
            return  # it has the place of a region that was removed, whose blocks are still lent
        if region.layout.shape != self._own.layout.shape or not region.layout.data_bytes:
            return
        try:
            self._own.keep_pins_of(region)
            peer.firsts = self._memory.map(region.fd, region.layout)
        except (IpcError, OSError):  # its blocks cannot be read now, perhaps later
            self._own.drop_pins_of(region.place)

    def _unmap(self, peer: Peer) -> None:
        if peer.firsts is not None:
            self._memory.unmap(peer.firsts)
            self._own.drop_pins_of(peer.region.place)
            peer.firsts = None

    def _drop(self, inode: int) -> None:
        """Read a region no more that has lost its name. If somebody has removed the name while its
        engine lives, the engine's pins count as before."""
        peer = self._peers[inode]
        self._unmap(peer)
        if not peer.region.is_owned:
            peer.region.close()
            del self._peers[inode]
