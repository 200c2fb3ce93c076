"""Writes the records of this process into its recording.

This module owns the file, its growth and its maximum size, and the end of the recording. It must
not know the meaning of a record. A recorder never raises an error and never waits, except for
another thread that extends the file. It counts and drops a record that finds no room.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from shmllm.tracing.directory import SharedDirectory
from shmllm.tracing.layout import (
    CHUNK_BYTES,
    DROPPED_OFFSET,
    FACTS_OFFSET,
    HEADER,
    MAGIC,
    RECORD,
    RECORD_BYTES,
    RECORDS_OFFSET,
    RECORDS_PER_CHUNK,
    SUFFIX,
    VERSION,
)

CHECK_PERIOD_NS = 250_000_000
GROW_TIMEOUT_S = 0.1
_SHIFT = RECORDS_PER_CHUNK.bit_length() - 1
_MASK = RECORDS_PER_CHUNK - 1

_pack = RECORD.pack_into
_thread_id = threading.get_native_id


class Recorder:
    """Writes one recording.

    `add` may be called in any thread, and even by the garbage collector during another call of
    `add`: it claims a record's place with `next` on a counter, which is atomic.

    Args:
        directory: the directory of the trace; the recorder closes it.
        facts: facts about this process; as JSON they must be below 4,000 bytes.

    Attributes:
        path: the path of the recording.
        is_over: whether the recording has ended; then `add` does nothing.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, directory: SharedDirectory, facts: Mapping[str, Any]) -> None:
        self._directory = directory
        self._settings = directory.settings
        self._owner_pid = os.getpid()
        self.path = directory.path / f"{os.getpid()}-{time.monotonic_ns()}{SUFFIX}"
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._fd, 0, RECORDS_OFFSET)
        self._header: mmap.mmap | bytearray = mmap.mmap(self._fd, RECORDS_OFFSET)
        text = json.dumps(dict(facts), ensure_ascii=False).encode(errors="replace")
        self._header[FACTS_OFFSET : FACTS_OFFSET + len(text)] = text
        HEADER.pack_into(self._header, 0, MAGIC, VERSION, os.getpid(), 0, len(text))
        self._most_chunks = max(self._settings.most_bytes // CHUNK_BYTES, 1)
        self._chunks: list[mmap.mmap] = []
        self._claims = itertools.count()
        self._num_ends = itertools.count()
        self._growing = threading.Lock()
        self._grower = 0
        self._num_dropped = 0
        self._next_check_ns = 0
        self._endings: list[Callable[[], object]] = []
        self.is_over = False

    def add(
        self,
        type_: int,
        name: int,
        begin_ns: int,
        end_ns: int,
        a: int = 0,
        b: int = 0,
        c: int = 0,
        d: int = 0,
        e: int = 0,
    ) -> None:
        """Add a record; `layout` describes the values. Times are on CLOCK_MONOTONIC in ns."""
        if end_ns >= self._next_check_ns:
            self.end_if_over(end_ns)
        place = next(self._claims)
        index = place >> _SHIFT
        chunks = self._chunks  # `end` may assign an empty list in another thread
        if index >= len(chunks) and not self._grow(index):
            return
        offset = (place & _MASK) * RECORD_BYTES
        _pack(chunks[index], offset, type_, name, _thread_id(), begin_ns, end_ns, a, b, c, d, e)

    def at_end(self, ending: Callable[[], object]) -> None:
        """Call `ending` once when the recording ends."""
        self._endings.append(ending)

    def end_if_over(self, now_ns: int) -> None:
        """End the recording if its time is over, or if the trace's owner no longer wants it. `add`
        calls this if the last check is 250 ms old."""
        until_ns = self._settings.until_ns
        self._next_check_ns = min(now_ns + CHECK_PERIOD_NS, until_ns or now_ns + CHECK_PERIOD_NS)
        if self.is_over or (until_ns and now_ns >= until_ns):
            self.end()
        elif not self._directory.is_wanted():
            self.end()
            with contextlib.suppress(OSError):  # the owner was killed before it could do this
                self.path.unlink()
                self._remove_directory()

    def end(self) -> None:
        """End the recording; idempotent. The last user of a mapping unmaps it."""
        # Only one thread may pass: a second close could hit another file with the same descriptor.
        if next(self._num_ends):
            return
        self.is_over = True
        self._chunks = []
        self._header = bytearray(RECORDS_OFFSET)
        endings, self._endings = self._endings, []
        for ending in endings:
            ending()
        if os.getpid() == self._owner_pid:
            os.close(self._fd)
            self._directory.close()

    def _grow(self, index: int) -> bool:
        """Extend the file until it has the chunk `index`; False if that is not possible, for
        example because this call interrupted another one in the same thread."""
        if self.is_over:
            return False
        if self._grower != _thread_id() and self._growing.acquire(timeout=GROW_TIMEOUT_S):
            try:
                self._grower = _thread_id()
                while not self.is_over and len(self._chunks) <= index < self._most_chunks:
                    begin = RECORDS_OFFSET + len(self._chunks) * CHUNK_BYTES
                    # Without allocation, a later store would end in SIGBUS if the disk is full.
                    os.posix_fallocate(self._fd, begin, CHUNK_BYTES)
                    self._chunks.append(mmap.mmap(self._fd, CHUNK_BYTES, offset=begin))
            except OSError:
                self._most_chunks = len(self._chunks)
            finally:
                self._grower = 0
                self._growing.release()
        if index < len(self._chunks):
            return True
        self._num_dropped += 1
        self._header[DROPPED_OFFSET : DROPPED_OFFSET + 8] = self._num_dropped.to_bytes(8, "little")
        return False

    def _remove_directory(self) -> None:
        for path in self._directory.path.iterdir():
            if path.suffix == SUFFIX:
                return
        for path in self._directory.path.iterdir():
            path.unlink()
        self._directory.path.rmdir()
