"""Journals: records in JSON lines beside a file of another kind, which is made of them at the end.

A file that is unreadable until its end is written, and to which nothing can be appended, cannot be
resumed. A job therefore writes its records to a journal, and converts it when it is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from shmllm.batch.rows import JsonObject

RECORDS_AT_ONCE = 1024


def journal_of(path: str) -> str:
    """The path of the journal for the file `path`."""
    return f"{path}.partial.jsonl"


def pieces_of(journal: str) -> Iterator[list[JsonObject]]:
    """The records of a journal in their order, up to RECORDS_AT_ONCE at a time."""
    with open(journal, "rb") as lines:
        while piece := [_record(line) for line in islice(lines, RECORDS_AT_ONCE)]:
            yield piece


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """The path of a new file, which takes the place of `path` if the block ends without an error.

    The new file is on the disk before it gets its name: the journal may be removed afterwards.
    """
    part = f"{path}.part"
    try:
        yield part
        with open(part, "rb") as written:
            os.fsync(written.fileno())
        os.replace(part, path)
    finally:
        Path(part).unlink(missing_ok=True)


def _record(line: bytes) -> JsonObject:
    record: JsonObject = json.loads(line)
    return _as_unicode(record) if rb"\ud" in line else record


def _as_unicode(value: Any) -> Any:
    """Replaces unpaired surrogates, which only JSON's escapes can express, by "?"."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_as_unicode(key): _as_unicode(item) for key, item in value.items()}
    return [_as_unicode(item) for item in value] if isinstance(value, list) else value
