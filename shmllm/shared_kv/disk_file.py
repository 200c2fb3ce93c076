"""DiskFile: the file on disk that has copies of shared blocks of one kind; see disk_layout.py.

Processes that write take a lock on WRITER_BYTE for a few blocks at a time. A writer clears the
entry, writes the data, then the entry. Readers take no lock: they compare the digest of what they
have read with that in the entry. So nobody needs fsync(2), and a writer may be killed at any time.
Everybody who has the file open holds a shared lock on USER_BYTE, so that nobody removes it.

This module must not know regions, threads or limits.
"""

from __future__ import annotations

import fcntl
import hashlib
import heapq
import os
from contextlib import suppress
from pathlib import Path

from shmllm.errors import ProtocolMismatchError
from shmllm.ipc.segment import set_lock
from shmllm.shared_kv.disk_layout import (
    COUNTER_OFFSET,
    ENTRY_BYTES,
    HEADER_BYTES,
    NO_ENTRY,
    PAGE_BYTES,
    SLOTS_PER_GROUP,
    USER_BYTE,
    WRITER_BYTE,
    DiskLayout,
    Record,
)

VICTIMS_AT_ONCE = 256
"""How many records are chosen at once to give way, because choosing looks at all."""


class DiskFile:
    """One thread may call methods that change the file or `records`; others may read meanwhile.

    Args:
        path: its path. The file is made if there is none.
        key: the key of the folder of regions, 16 hexadecimal digits.
        section: the section of its blocks.
        block_bytes: their size.

    Attributes:
        records: the copies by their keys.
        path, block_bytes: as given.

    Raises:
        ProtocolMismatchError: it is another file, of another version, or damaged.
        OSError: it cannot be opened, read, or locked.
    """

    def __init__(self, path: Path, key: str, section: int, block_bytes: int) -> None:
        self.path, self.block_bytes = path, block_bytes
        self._layout = DiskLayout(key, section, block_bytes)
        self.records: dict[bytes, Record] = {}
        self._keys: dict[int, bytes] = {}
        self._pages: list[bytes] = []
        self._free: list[int] = []
        self._victims: list[tuple[int, bytes]] = []
        self._num_slots = 0
        self._next = 1
        self._counter = -1
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self.fd = os.open(path, flags, 0o600)
        try:
            self._check_owner()
            if not set_lock(self.fd, USER_BYTE, fcntl.F_RDLCK):
                raise BlockingIOError(0, "another process removes the file now")
            self._begin()
            self.scan()
        except BaseException:
            os.close(self.fd)
            raise

    # reading

    @property
    def is_changed(self) -> bool:
        """Whether anybody has changed the file since the last scan."""
        return self._read_counter() != self._counter

    @property
    def is_intact(self) -> bool:
        """Whether the file still has its name and its header."""
        try:
            is_named = os.path.samestat(self.path.lstat(), os.fstat(self.fd))
        except FileNotFoundError:
            return False
        return is_named and self._has_header()

    @property
    def num_slots(self) -> int:
        """How many slots there are."""
        return self._num_slots

    def scan(self) -> None:
        """Read the entries that have changed since the last scan."""
        self._counter = self._read_counter()
        self._num_slots = self._layout.num_slots(os.fstat(self.fd).st_size)
        num_groups = -(-self._num_slots // SLOTS_PER_GROUP)
        for slot in [slot for slot in self._keys if slot >= self._num_slots]:
            self._forget(slot)
        del self._pages[num_groups:]
        for group in range(num_groups):
            page = os.pread(self.fd, PAGE_BYTES, self._layout.group(group))
            if group == len(self._pages):
                self._pages.append(b"")
            if page != self._pages[group]:
                self._pages[group] = page
                self._scan_group(group, page)
        self._free = [slot for slot in range(self._num_slots) if slot not in self._keys]
        self._free.reverse()
        self._victims = []

    def read_ahead(self, key: bytes) -> None:
        """Let the kernel begin to read a record, which `read` is going to ask for."""
        record = self.records.get(key)
        if record is not None:
            offset = self._layout.data(record.slot)
            with suppress(OSError):  # it is only a hint
                os.posix_fadvise(self.fd, offset, self.block_bytes, os.POSIX_FADV_WILLNEED)

    def read(self, key: bytes, target: memoryview) -> bool | None:
        """Read the data of a record.

        Args:
            key: its key.
            target: for the data, `block_bytes` bytes.

        Returns:
            False: there is no such record any more; None: it is damaged. Then the target has
            anything, and the record is forgotten. Its entry stays until `discard`.
        """
        record = self.records.get(key)
        if record is None:
            return False
        with suppress(OSError):  # a medium that cannot be read
            count = os.preadv(self.fd, [target], self._layout.data(record.slot))
            if count == len(target) and hashlib.sha256(target).digest() == record.digest:
                return True
        self.records.pop(key, None)
        try:
            return None if self._has_entry(key, record) else False
        except OSError:
            return None

    # writing

    def try_lock(self) -> bool:
        """Become the only one who writes, until `unlock`. Returns False if somebody else is."""
        if not set_lock(self.fd, WRITER_BYTE, fcntl.F_WRLCK):
            return False
        if self.is_changed:
            self.scan()
        self._count_change()  # a process that scans between now and `unlock` scans again
        return True

    def unlock(self) -> None:
        """Let others write."""
        self._count_change()
        set_lock(self.fd, WRITER_BYTE, fcntl.F_UNLCK)

    def growth_bytes(self, count: int = 1, most: int | None = None) -> int:
        """By how much the file grows with further records: free slots are used first.

        Args:
            count: the number of records.
            most: the largest number of slots; None: any.
        """
        new = count - len(self._free)
        if most is not None:
            new = min(new, most - self._num_slots)
        if new <= 0:
            return 0
        groups = [
            -(-slots // SLOTS_PER_GROUP) for slots in (self._num_slots, self._num_slots + new)
        ]
        return new * self._layout.slot_bytes + (groups[1] - groups[0]) * PAGE_BYTES

    def write(self, key: bytes, data: memoryview, may_grow: bool) -> bool:
        """Write a record, in place of the one that was used longest ago if need be.

        Args:
            key: its key, of which there is no record.
            data: its data.
            may_grow: whether the file may get another slot.

        Returns:
            False: it has no slot, and may not grow.

        Raises:
            OSError: it cannot be written.
        """
        if not self._free and not may_grow:
            self._make_way()
        if self._free:
            slot = self._free.pop()
        elif may_grow:
            slot = self._num_slots
        else:
            return False
        try:
            _write(self.fd, NO_ENTRY, self._layout.entry(slot))  # a killed process left it, maybe
            _write(self.fd, data, self._layout.data(slot))
            self._put(key, Record(slot, self._next, hashlib.sha256(data).digest()))
        except OSError:
            if slot < self._num_slots:
                self._free.append(slot)
            raise
        self._num_slots = max(self._num_slots, slot + 1)
        return True

    def touch(self, key: bytes) -> None:
        """Take note that a record was used.

        Raises:
            OSError: it cannot be written.
        """
        record = self.records.get(key)
        if record is not None:
            self._put(key, record._replace(sequence=self._next))

    def is_recent(self, key: bytes) -> bool:
        """Whether a record is among the half that was used last."""
        record = self.records.get(key)
        return record is not None and record.sequence >= self._next - (len(self.records) + 1) // 2

    def discard(self, key: bytes, record: Record) -> None:
        """Remove the entry of a damaged record, unless its slot has another one by now.

        Raises:
            OSError: it cannot be written.
        """
        if self._has_entry(key, record):
            self._remove(record.slot)

    def truncate(self, num_slots: int) -> None:
        """Remove the slots from `num_slots` on.

        Raises:
            OSError: it cannot be written.
        """
        if num_slots < self._num_slots:
            last = self._layout.data(num_slots - 1) + self.block_bytes
            os.ftruncate(self.fd, last if num_slots else HEADER_BYTES)
            self.scan()

    def close(self) -> None:
        """Close the file; its locks end."""
        os.close(self.fd)

    # the parts of these

    def _check_owner(self) -> None:
        status = os.fstat(self.fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(1, "it belongs to another user, or others may write it")

    def _begin(self) -> None:
        """Write the header of a new file, or check that of an old one."""
        if not os.fstat(self.fd).st_size:
            if not set_lock(self.fd, WRITER_BYTE, fcntl.F_WRLCK):
                raise BlockingIOError(0, "another process begins the file now")
            try:
                if not os.fstat(self.fd).st_size:
                    _write(self.fd, self._layout.header.ljust(HEADER_BYTES, b"\0"), 0)
            finally:
                set_lock(self.fd, WRITER_BYTE, fcntl.F_UNLCK)
        if not self._has_header():
            found = os.pread(self.fd, len(self._layout.header), 0)
            raise ProtocolMismatchError(self._layout.difference(found))
        os.utime(self.fd)  # the files that were used longest ago are removed first

    def _has_header(self) -> bool:
        header = self._layout.header
        return os.pread(self.fd, len(header), 0) == header

    def _read_counter(self) -> int:
        return int.from_bytes(os.pread(self.fd, 8, COUNTER_OFFSET), "little")

    def _count_change(self) -> None:
        self._counter = (self._read_counter() + 1) % 2**64
        _write(self.fd, self._counter.to_bytes(8, "little"), COUNTER_OFFSET)

    def _has_entry(self, key: bytes, record: Record) -> bool:
        """Whether the file still has the entry of a record.

        Raises:
            OSError: it cannot be read.
        """
        entry = os.pread(self.fd, ENTRY_BYTES, self._layout.entry(record.slot))
        found = self._layout.parse(record.slot, entry)
        return found is not None and found[0] == key and found[1].digest == record.digest

    def _scan_group(self, group: int, page: bytes) -> None:
        first = group * SLOTS_PER_GROUP
        for slot in range(first, min(first + SLOTS_PER_GROUP, self._num_slots)):
            begin = (slot - first) * ENTRY_BYTES
            found = self._layout.parse(slot, page[begin : begin + ENTRY_BYTES])
            if found is None:
                self._forget(slot)
                continue
            key, record = found
            if self._keys.get(slot) != key:
                self._forget(slot)
            known = self.records.get(key)
            if known is not None and known.slot != slot:  # one of them was missed by its successor
                if known.sequence > record.sequence:
                    continue
                del self._keys[known.slot]
            self._next = max(self._next, record.sequence + 1)
            self._keys[slot] = key
            self.records[key] = record

    def _forget(self, slot: int) -> None:
        key = self._keys.pop(slot, None)
        if key is not None:
            record = self.records.get(key)
            if record is not None and record.slot == slot:
                self.records.pop(key, None)  # who reads may have done so at this moment

    def _put(self, key: bytes, record: Record) -> None:
        _write(self.fd, self._layout.pack(key, record), self._layout.entry(record.slot))
        self._keys[record.slot] = key
        self.records[key] = record
        self._next = max(self._next, record.sequence + 1)

    def _remove(self, slot: int) -> None:
        _write(self.fd, NO_ENTRY, self._layout.entry(slot))
        self._forget(slot)
        self._free.append(slot)

    def _make_way(self) -> None:
        """Remove the record that was used longest ago."""
        while self.records:
            if not self._victims:
                oldest = ((record.sequence, key) for key, record in [*self.records.items()])
                self._victims = heapq.nsmallest(VICTIMS_AT_ONCE, oldest)[::-1]
            sequence, key = self._victims.pop()
            record = self.records.get(key)
            if record is not None and record.sequence == sequence:
                self._remove(record.slot)
                return


def _write(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of the data: the kernel writes less if the medium gets full meanwhile."""
    left = memoryview(data)
    while left:
        count = os.pwrite(fd, left, offset)
        left, offset = left[count:], offset + count
