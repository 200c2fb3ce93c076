"""Disk: the copies on disk of shared blocks, as the tier of one engine uses them.

The engine's thread asks what there is, and reads it. A thread of the disk's own writes: it takes
keys from a queue, copies their blocks from the own region, and drops those that were reused before
it came to them. Nothing here raises an error for a request: a problem is a sentence, and then there
are fewer copies. This module must not know requests or devices.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections import deque
from pathlib import Path

from shmllm.errors import ProtocolMismatchError
from shmllm.ipc.segment import set_lock
from shmllm.shared_kv.block_disk import FINISH_S
from shmllm.shared_kv.block_io import read_block
from shmllm.shared_kv.disk_file import DiskFile
from shmllm.shared_kv.disk_folder import file_path, make_room, set_aside
from shmllm.shared_kv.disk_layout import USER_BYTE, Record, slots_in
from shmllm.shared_kv.folder import key_of
from shmllm.shared_kv.layout import RegionLayout
from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.region import Region

BATCH = 16
"""How many blocks are written under one lock."""
TRIES = 3
"""How often a block is read whose generation changes meanwhile: it may stay valid."""
REST = 3.0
"""How long the thread rests after each batch, as a multiple of the time that the batch took. It
takes a core 0.9 ms for a block of 737 KB, mostly for the digest, and decoding waits for it."""
MOST_REST_S = 0.5
OPENINGS = 20
LOCK_AGAIN_S = 0.02
CLEAR_S = 1.0


class Disk:
    """
    Args:
        directory: where the files are.
        own: the own region, whose blocks are copied.
        limit_bytes: the most bytes of all files in the directory.

    Attributes:
        num_read: how many blocks were read.
        num_written: how many were written.
        num_damaged: how many had another digest than they should.

    Raises:
        OSError: there is no file that can be used.
    """

    def __init__(self, directory: Path, own: OwnRegion, limit_bytes: int) -> None:
        self._directory, self._limit_bytes = directory, limit_bytes
        self._key = key_of(own.path.parent)
        self._layout = own.layout
        self.num_read = self.num_written = self.num_damaged = 0
        self._problems: deque[str] = deque()
        self._is_writing = True
        self._has_reported_damage = self._has_reported_full = False
        self._is_busy = self._is_clearing = self._is_flushing = False
        self._retired: list[DiskFile] = []
        self._refused: set[tuple[int, bytes]] = set()
        self._bad: deque[tuple[int, bytes, Record]] = deque()
        num_blocks = sum(each.num_blocks for each in own.layout.sections)
        self._queue: deque[tuple[int, bytes]] = deque(maxlen=max(num_blocks, BATCH))
        """More would be of blocks that the region has no longer."""
        self._wake = threading.Event()
        self._deadline: float | None = None
        sizes = [each.block_bytes if each.num_blocks else 0 for each in own.layout.sections]
        self._read_buffers = [memoryview(bytearray(size)) for size in sizes]
        self._write_buffers = [memoryview(bytearray(size)) for size in sizes]
        self._most = _most_slots(own.layout, limit_bytes)
        # A mapping of its own: the tier closes the region without waiting for the thread.
        self._source = Region.open(own.path, own.place)
        self._files: dict[int, DiskFile] = {}
        try:
            for section, size in enumerate(sizes):
                if size:
                    self._files[section] = self._open(section, size)
            self._shrink()
        except BaseException:
            self._close()
            raise
        if any(size and not most for size, most in zip(sizes, self._most, strict=True)):
            self._stop_writing(f"a limit of {limit_bytes:,} bytes has no room for a block")
        for section, file in self._files.items():  # what an engine that was killed has not written
            for _, key in own.entries(section):
                if key not in file.records:
                    self.save(section, key)
        self._thread = threading.Thread(target=self._run, name="shmllm-kv-disk", daemon=True)
        self._thread.start()

    def take_problems(self) -> list[str]:
        """What went wrong since the last call, in sentences."""
        return [self._problems.popleft() for _ in range(len(self._problems))]

    # what the engine's thread calls

    def refresh(self) -> None:
        self._refused.clear()
        try:
            is_changed = any(file.is_changed for file in [*self._files.values()])
        except OSError:
            is_changed = True  # the thread reports it
        if is_changed:
            self._wake.set()

    def contains(self, section: int, key: bytes) -> bool:
        file = self._files.get(section)
        if file is None or key not in file.records or self._is_clearing:
            return False
        return (section, key) not in self._refused

    def read_ahead(self, section: int, key: bytes) -> None:
        file = self._files.get(section)
        if file is not None:  # the thread may have closed it since `contains`
            file.read_ahead(key)

    def read(self, section: int, key: bytes) -> memoryview | None:
        file, buffer = self._files.get(section), self._read_buffers[section]
        if file is None:
            return None
        record = file.records.get(key)
        found = file.read(key, buffer)
        if found:
            self.num_read += 1
            return buffer
        if found is None and record is not None:
            self._bad.append((section, key, record))
            self._wake.set()
            self.num_damaged += 1
            if not self._has_reported_damage:
                self._has_reported_damage = True
                self._problems.append(
                    f"{file.path} has a damaged block: what was read has another digest. The block "
                    "is computed again; further ones are not reported"
                )
        return None

    def refuse(self, section: int, key: bytes) -> None:
        self._refused.add((section, key))

    def save(self, section: int, key: bytes) -> None:
        if self._is_writing:
            self._queue.append((section, key))
            self._wake.set()

    def used(self, section: int, key: bytes) -> None:
        file = self._files.get(section)
        if file is not None and self._is_writing and not file.is_recent(key):
            self._queue.append((section, key))
            self._wake.set()

    def clear(self) -> None:
        self._is_clearing = True
        self._queue.clear()
        self._wake.set()
        deadline = time.monotonic() + CLEAR_S
        while self._is_clearing and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)

    def flush(self, within_s: float) -> None:
        """Wait until what waits is written, or the time is over."""
        deadline = time.monotonic() + within_s
        self._is_flushing = True
        while (self._queue or self._is_busy) and self._thread.is_alive():
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
        self._is_flushing = False

    def finish(self, within_s: float = FINISH_S) -> None:
        deadline = time.monotonic() + within_s
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
        self._wake.set()

    def join(self) -> None:
        """Wait until `finish` is done. A medium that does not answer is not waited for."""
        if self._deadline is not None:
            self._thread.join(max(self._deadline - time.monotonic(), 0.0) + 1.0)

    # what the own thread calls

    def _run(self) -> None:
        try:
            self._work_until_finished()
        except Exception as problem:
            self._stop_writing(f"{type(problem).__name__}: {problem}")
            raise
        finally:
            self._is_busy = self._is_clearing = False
            self._close()

    def _work_until_finished(self) -> None:
        while self._deadline is None or time.monotonic() < self._deadline:
            began = time.monotonic()
            try:
                has_more = self._work()
            except (OSError, ProtocolMismatchError) as problem:
                self._stop_writing(str(problem))
                has_more = False
            if has_more:
                self._rest(time.monotonic() - began)
                continue
            if self._deadline is not None:
                return
            self._wake.wait()
            self._wake.clear()

    def _rest(self, worked_s: float) -> None:
        """Leave the cores to the engine for a while, unless somebody waits."""
        if self._deadline is None and not self._is_flushing and not self._is_clearing:
            time.sleep(min(REST * worked_s, MOST_REST_S))

    def _close(self) -> None:
        self._source.close()
        files, self._files = self._files, {}
        for file in (*files.values(), *self._retired):
            file.close()

    def _work(self) -> bool:
        """Do a part of what there is to do. Returns whether there may be more."""
        for section, file in [*self._files.items()]:
            if self._is_writing and not file.is_intact:
                fresh = self._open(section, file.block_bytes)
                self._retired.append(file)  # the engine's thread may read it now
                file = self._files[section] = fresh
            if file.is_changed:
                file.scan()
        if self._is_clearing:
            return self._clear()
        if not self._is_writing:
            return False
        self._is_busy = True
        try:
            return self._discard_bad() or self._write_batch()
        finally:
            self._is_busy = False

    def _write_batch(self) -> bool:
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), BATCH))]
        for section, file in self._files.items():
            keys = [key for of, key in batch if of == section and not file.is_recent(key)]
            if not keys:
                continue
            self._lock(file)
            try:
                self._write(section, file, keys)
            finally:
                file.unlock()
        return bool(batch)

    def _write(self, section: int, file: DiskFile, keys: list[bytes]) -> None:
        buffer = self._write_buffers[section]
        count = sum(key not in file.records for key in keys)
        needed = file.growth_bytes(count, self._most[section])
        free = make_room(self._directory, self._limit_bytes, needed) if needed else 0
        for key in keys:
            if self._is_clearing:
                return
            if key in file.records:
                file.touch(key)
                continue
            if not any(read_block(self._source, section, key, buffer) for _ in range(TRIES)):
                continue  # the region has reused it
            growth = file.growth_bytes()
            may_grow = growth <= free and file.num_slots < self._most[section]
            before = file.num_slots
            if file.write(key, buffer, may_grow):
                self.num_written += 1
                free -= growth if file.num_slots > before else 0
            else:
                self._report_full()
                return

    def _discard_bad(self) -> bool:
        if not self._bad:
            return False
        section, key, record = self._bad.popleft()
        file = self._files[section]
        self._lock(file)
        try:
            file.discard(key, record)
        finally:
            file.unlock()
        return True

    def _clear(self) -> bool:
        try:
            for file in self._files.values():
                self._lock(file)
                try:
                    file.truncate(0)
                finally:
                    file.unlock()
        finally:
            self._is_clearing = False
        return True

    def _lock(self, file: DiskFile) -> None:
        """Become the writer of a file.

        Raises:
            OSError: the time is over, or the file cannot be locked.
        """
        while not file.try_lock():
            if self._deadline is not None and time.monotonic() > self._deadline:
                raise TimeoutError(0, "another engine has locked it", str(file.path))
            time.sleep(LOCK_AGAIN_S)

    def _open(self, section: int, block_bytes: int) -> DiskFile:
        path = file_path(self._directory, self._key, section)
        for _ in range(OPENINGS):
            try:
                file = DiskFile(path, self._key, section, block_bytes)
            except ProtocolMismatchError as problem:
                aside = set_aside(path)
                self._problems.append(
                    f"{path} cannot be used: {problem}. It is renamed to {aside.name}, and the "
                    "KV cache on disk begins anew"
                )
                continue
            except BlockingIOError:
                time.sleep(LOCK_AGAIN_S)
                continue
            if file.is_intact:
                return file
            file.close()  # another engine has removed it meanwhile
        raise OSError(0, "other processes remove it again and again", str(path))

    def _shrink(self) -> None:
        """Remove the end of files that are larger than the limit, unless other engines use them."""
        if sum(os.fstat(file.fd).st_size for file in self._files.values()) <= self._limit_bytes:
            return
        for section, file in self._files.items():
            if set_lock(file.fd, USER_BYTE, fcntl.F_WRLCK):
                if file.try_lock():
                    file.truncate(min(self._most[section], file.num_slots))
                    file.unlock()
                set_lock(file.fd, USER_BYTE, fcntl.F_RDLCK)

    def _stop_writing(self, reason: str) -> None:
        if self._is_writing:
            self._is_writing = False
            self._problems.append(f"the KV cache on disk is not written any more: {reason}")
        self._queue.clear()

    def _report_full(self) -> None:
        if not self._has_reported_full:
            self._has_reported_full = True
            self._problems.append(
                f"the KV cache on disk is not written: the files of other engines that run fill "
                f"{self._directory} up to shared_kv_cache_path_bytes, {self._limit_bytes:,}"
            )


def _most_slots(layout: RegionLayout, limit_bytes: int) -> list[int]:
    """How many blocks of each section fit on disk, in the proportions of the region."""
    most = []
    for section in layout.sections:
        share = section.num_blocks * section.block_bytes / max(layout.data_bytes, 1)
        most.append(slots_in(int(limit_bytes * share), section.block_bytes) if share else 0)
    return most
