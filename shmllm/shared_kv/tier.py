"""SharedTier: the full KV blocks that the engines of one folder share, as one of them uses them.

A block outside of the engine's own cache has an id there behind its own blocks. The tier finds
blocks by their keys, lends them while requests read them, and takes copies of the engine's own
blocks into its region. It must not know requests or devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shmllm.errors import IpcError, ProtocolMismatchError, SegmentError
from shmllm.shared_kv.block_disk import NO_DISK, BlockDisk
from shmllm.shared_kv.block_io import write_block
from shmllm.shared_kv.layout import NUM_SECTIONS
from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.peers import BlockMemory, Loan, Peer, Peers
from shmllm.shared_kv.store import Store

TOUCH_PERIOD_S = 60.0
"""How often the file of the own region says that it is used."""


@dataclass(slots=True)
class TierStats:
    """What a tier has done so far, in blocks.

    Attributes:
        lent: how often a block was lent to requests, by its own region and by others.
        saved: how many blocks it has published.
        reused: how many of its blocks gave way to others.
    """

    lent: int = 0
    saved: int = 0
    reused: int = 0


class SharedTier:
    """
    Args:
        own: the region of this engine; the tier closes it.
        memory: where blocks are read.
        on_problem: called with one sentence if a region is damaged.
        stats: the counters to go on with; None: new ones.
        disk: copies of blocks, which are read when no region has them.

    Attributes:
        stats: counters.
        is_open: whether blocks are lent and saved. After `leave`, or damage, they are not.

    Raises:
        SegmentError: the own region cannot be mapped.
    """

    def __init__(
        self,
        own: OwnRegion,
        memory: BlockMemory,
        on_problem: Callable[[str], None],
        stats: TierStats | None = None,
        disk: BlockDisk = NO_DISK,
    ) -> None:
        self._own, self._memory, self._on_problem = own, memory, on_problem
        self._disk = disk
        self._stores = [Store(own, section) for section in range(NUM_SECTIONS)]
        self._loans: dict[tuple[int, int], Loan] = {}
        self._peers = Peers(own, memory)
        self._is_unwanted = False
        self._is_closed = False
        self.stats = stats or TierStats()
        self._next_touch = time.monotonic() + TOUCH_PERIOD_S
        self.is_open = True
        try:
            self._firsts = memory.map(own.fd, own.layout)
        except OSError as error:
            disk.finish()
            own.close()
            raise SegmentError(f"cannot map {own.path}: {error.strerror}") from error
        self._home = Peer(own, self._firsts)
        self.refresh()
        for store in self._stores:
            store.look_again(self._peers.readers)

    @property
    def path(self) -> Path:
        """The path of the own region."""
        return self._own.path

    @property
    def num_bytes(self) -> int:
        """The size of the blocks of the own region."""
        return self._own.layout.data_bytes

    @property
    def num_lent(self) -> int:
        """The number of blocks that are lent now."""
        return len(self._loans)

    @property
    def num_readable(self) -> int:
        """The number of blocks of the own region that have contents."""
        return sum(map(len, self._stores))

    def refresh(self) -> None:
        """Look which regions there are. Called when a request looks for its prefix."""
        if not self.is_open:
            return
        if (now := time.monotonic()) >= self._next_touch:
            self._next_touch = now + TOUCH_PERIOD_S
            self._own.touch()
        self._disk.refresh()
        self._look()

    def _look(self) -> None:
        try:
            if self._own.is_removed:  # then engines that join later do not see its pins
                raise SegmentError(f"somebody has removed {self._own.path}")
            self._peers.look()
        except (IpcError, OSError) as problem:
            self._give_up(problem)

    def contains(self, section: int, key: bytes) -> bool:
        """Whether a region, or the disk, has a block of this key now."""
        if self._is_in_region(section, key):
            return True
        is_on_disk = self.is_open and self._disk.contains(section, key)
        if is_on_disk:
            self._disk.read_ahead(section, key)
        return is_on_disk

    def borrow(self, section: int, key: bytes) -> int | None:
        """Lend a block, until `give_back`: its contents do not change meanwhile. A block that is
        lent must not be asked for, because its pin has no count.

        Returns:
            Its id; None: nobody has it, or it is on disk and the own region has no room.
        """
        if not self.is_open:
            return None
        store = self._stores[section]
        if key not in store:
            found = self._find(section, key)
            if found is not None and self._own.pin(found.peer.region, section, found.block, key):
                self._disk.used(section, key)
                return self._lend(found)
            if not self._read_from_disk(section, key):
                return None
        block = store.borrow(key)
        assert block is not None
        self._disk.used(section, key)
        return self._lend(Loan(self._home, section, block))

    def give_back(self, section: int, block_id: int) -> None:
        """End the loan of a block."""
        if self._is_closed:
            return
        peer, _, block = self._loans.pop((section, block_id))
        peer.num_lent -= 1
        if peer is self._home:
            self._stores[section].give_back(block)
        else:
            self._own.unpin(peer.region.place, section, block)
        self._close_if_unused()

    def reserve(self, wanted: Sequence[tuple[int, bytes]]) -> list[int | None]:
        """Find blocks of the own region for copies of blocks with these sections and keys.

        Returns:
            The id of each; None: no copy is needed, or there is no room for it. `publish` has to be
            called for each id.
        """
        is_new = [not self._is_in_region(*each) for each in wanted]
        for section, store in enumerate(self._stores):
            count = sum(new for each, new in zip(wanted, is_new, strict=True) if each[0] == section)
            self._make_room(store, count - store.num_free)
        ids: list[int | None] = []
        for (section, key), new in zip(wanted, is_new, strict=True):
            block = self._stores[section].reserve(key) if new and self.is_open else None
            ids.append(None if block is None else self._firsts[section] + block)
        return ids

    def publish(self, section: int, block_id: int) -> None:
        """Let everybody read a reserved block, which has been written."""
        store, block = self._stores[section], block_id - self._firsts[section]
        if self.is_open:
            key = store.reserved_key(block)
            if store.publish(block):
                self.stats.saved += 1
                self._disk.save(section, key)
        else:
            store.cancel(block)
            self._close_if_unused()

    def leave(self) -> None:
        """Lend and save nothing any more: the engine computes something else from now on. What is
        lent stays so until it is given back, and `publish` has still to be called for what is
        reserved. Others go on reading the own region."""
        if self.is_open:
            self.is_open = False
            self._disk.finish()
            self._close_if_unused()

    def remove(self) -> None:
        """Leave, and give the memory of the own region back. What others read now stays until they
        no longer read it."""
        if self.is_open:
            for store in self._stores:
                self._make_room(store, len(store))
                if self.is_open:
                    store.discard()
            self._is_unwanted = True
            self.leave()

    def clear(self) -> None:
        """Forget the blocks of the own region that nobody reads, and those on disk."""
        if self.is_open:
            self._disk.clear()
            for store in self._stores:
                self._make_room(store, len(store))

    def close(self) -> None:
        """Leave at once: the engine runs no step any more."""
        self.is_open = False
        self._disk.finish()
        self._loans.clear()
        self._close()

    def _close_if_unused(self) -> None:
        """Close all regions, if nothing is lent and no step writes a block. Until then others have
        to see the pins of the own region, under its name."""
        is_writing = any(store.num_reserved for store in self._stores)
        if not self.is_open and not self._loans and not is_writing:
            self._close()

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._peers.close()
        self._memory.unmap(self._firsts)
        if self._is_unwanted:
            self._own.unlink()
        self._own.close()

    def _lend(self, loan: Loan) -> int:
        peer, section, block = loan
        assert peer.firsts is not None, "blocks are found in mapped regions"
        block_id = peer.firsts[section] + block
        assert (section, block_id) not in self._loans, "a lent block is asked for"
        self._loans[section, block_id] = loan
        peer.num_lent += 1
        self.stats.lent += 1
        return block_id

    def _is_in_region(self, section: int, key: bytes) -> bool:
        return self.is_open and (
            key in self._stores[section] or self._find(section, key) is not None
        )

    def _read_from_disk(self, section: int, key: bytes) -> bool:
        """Copy a block from the disk into the own region. Returns whether that was possible."""
        if not self.is_open or not self._disk.contains(section, key):
            return False
        store = self._stores[section]
        self._make_room(store, 1 - store.num_free)
        data = self._disk.read(section, key) if self.is_open and store.num_free else None
        block = None if data is None else store.reserve(key)
        if block is not None and data is not None:
            try:
                write_block(self._own.fd, self._own.layout, section, block, data)
            except OSError:
                store.cancel(block)  # shared memory is full
            else:
                store.publish(block)
        if key in store:
            return True
        self._disk.refuse(section, key)
        return False

    def _find(self, section: int, key: bytes) -> Loan | None:
        try:
            return self._peers.find(section, key)
        except ProtocolMismatchError as problem:
            self._give_up(problem)
            return None

    def _make_room(self, store: Store, count: int) -> None:
        """Free up to `count` blocks."""
        if count <= 0 or not self.is_open:
            return
        before = store.num_free
        store.look_again(self._peers.readers)
        candidates = store.candidates(count, self._peers.readers)
        # An engine that is not in this list joins later, and sees that the candidates are invalid.
        self._look()
        if self.is_open:
            store.settle(candidates, self._peers.readers)
            self.stats.reused += store.num_free - before

    def _give_up(self, problem: Exception) -> None:
        """A region is damaged. Whether its engine reads blocks of the own region cannot be told, so
        the engine shares nothing any more."""
        self._on_problem(f"the shared KV cache is not used any more: {problem}")
        self.leave()
