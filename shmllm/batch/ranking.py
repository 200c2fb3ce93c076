"""Rows of texts with scores, and the best of them."""

from __future__ import annotations

import heapq

from shmllm.batch.embeddings import TextFormat
from shmllm.batch.rows import JsonObject, Row

_RESULTS = {"rank", "line", "score", "text", "prompt"}


class ScoreFormat(TextFormat):
    """Reads rows that hold a text, and makes their records."""

    def __init__(self) -> None:
        super().__init__(_RESULTS)

    def record(self, row: Row, score: float) -> JsonObject:
        """Makes the record of a row's score."""
        found = row.identity | {"line": row.line, "score": score, "text": row.prompt}
        return found | row.carried


class Ranking:
    """The records with the highest scores. Of equal ones, that of the first line is better.

    Args:
        most: how many records to keep; None keeps all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._kept: list[tuple[float, int, JsonObject]] = []  # the worst is first if it is full

    def add(self, record: JsonObject) -> None:
        """Adds a record, which has `score` and a `line` of its own."""
        item = (record["score"], -record["line"], record)
        if self._most is None:
            self._kept.append(item)
        elif len(self._kept) < self._most:
            heapq.heappush(self._kept, item)
        else:
            heapq.heappushpop(self._kept, item)

    def best_first(self) -> list[JsonObject]:
        """The kept records, each with its `rank` from 1. They are not kept any longer."""
        self._kept.sort(reverse=True)
        kept, self._kept = self._kept, []
        return [{"rank": rank} | record for rank, (_, _, record) in enumerate(kept, 1)]
