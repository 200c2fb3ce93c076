"""Divides the rows of an input between jobs that know nothing of each other.

This module owns which rows a job takes. A row keeps its line number, so its id, its seed and its
record are those that it has in a job of all rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from shmllm.errors import RequestError

if TYPE_CHECKING:
    from shmllm.batch.rows import Row, Rows


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of an input: the rows whose index, from 0, is `index` modulo `count`.

    The rows of each shard are known without the length of the input, which may be a pipe, and
    shards have the same number of rows, give or take one.

    Attributes:
        index: from 0 to `count` - 1.
        count: number of shards.
    """

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Reads "K/N".

        Raises:
            RequestError: the text has another form, or there is no such shard.
        """
        found = re.fullmatch(r"([0-9]{1,18})/([0-9]{1,18})", text)
        if found is None:
            raise RequestError(f"{text!r} is not K/N, two whole numbers such as 0/8")
        index, count = int(found[1]), int(found[2])
        if count == 0:
            raise RequestError(f"{text}: there must be at least one shard, as in 0/1")
        if index >= count:
            raise RequestError(
                f"{text}: shards are counted from 0, so the last of {count} is {count - 1}/{count}"
            )
        return cls(index, count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


class ShardRows:
    """The rows of one shard of an input. An invalid row counts, a blank line does not.

    Args:
        rows: all rows of the input.
        shard: which of them to take.
    """

    def __init__(self, rows: Rows, shard: Shard) -> None:
        self.name = f"shard {shard} of {rows.name}"
        self.is_file = rows.is_file
        self._rows = rows
        self._shard = shard

    def __iter__(self) -> Iterator[Row]:
        return islice(self._rows, self._shard.index, None, self._shard.count)

    def count(self) -> tuple[int | None, int]:
        """The number of the shard's rows, and the number of lines of the input."""
        num_rows, num_lines = self._rows.count()
        if num_rows is None:
            return None, num_lines
        return len(range(self._shard.index, num_rows, self._shard.count)), num_lines
