"""Reads the recordings of a trace, including those of processes that were killed.

This module must not know the use of the records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shmllm.tracing.layout import (
    FACTS_OFFSET,
    HEADER,
    MAGIC,
    RECORD,
    RECORDS_OFFSET,
    SUFFIX,
    VERSION,
    Type,
)

_TYPES = frozenset(Type)


class Record(NamedTuple):
    """One record of a recording; `layout` describes the fields."""

    type: int
    name: int
    thread: int
    begin_ns: int
    end_ns: int
    a: int
    b: int
    c: int
    d: int
    e: int


@dataclass
class Recording:
    """The recording of one process.

    Attributes:
        pid: the pid of the process.
        facts: facts about the process: its role and its command.
        num_dropped: the number of records that found no room.
        records: the records in the order of their creation, which is nearly that of their ends.
    """

    pid: int
    facts: dict[str, Any]
    num_dropped: int
    records: list[Record] = field(default_factory=list)


def read_all(directory: Path) -> list[Recording]:
    """All readable recordings of a trace, sorted by pid."""
    found = [read(path) for path in sorted(directory.glob("*" + SUFFIX))]
    return sorted((r for r in found if r is not None), key=lambda recording: recording.pid)


def pid_of(path: Path) -> int:
    """The pid of the process that writes a recording; 0 if the file has no complete header."""
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    return HEADER.unpack(head)[2] if len(head) == HEADER.size else 0


def read(path: Path) -> Recording | None:
    """Read one recording; None if the process was killed before the header was complete, or if the
    file has another version."""
    content = path.read_bytes()
    if len(content) < RECORDS_OFFSET:
        return None
    magic, version, pid, num_dropped, size = HEADER.unpack_from(content)
    if magic != MAGIC or version != VERSION:
        return None
    facts = json.loads(content[FACTS_OFFSET : FACTS_OFFSET + size])
    return Recording(pid, facts, num_dropped, list(_records(content)))


def _records(content: bytes) -> Iterator[Record]:
    length = (len(content) - RECORDS_OFFSET) // RECORD.size * RECORD.size
    body = memoryview(content)[RECORDS_OFFSET : RECORDS_OFFSET + length]
    for values in RECORD.iter_unpack(body):
        # A claimed record that was never written has type 0. A record that its process was killed
        # in the middle of has no end time.
        if values[0] in _TYPES and 0 < values[3] <= values[4]:
            yield Record(*values)
