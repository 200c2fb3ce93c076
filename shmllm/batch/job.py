"""Runs a batch job: sends the rows to a `Stream` and writes a record for each result.

This module owns a row from its request to its record; it must not know the engine. Memory holds the
rows in flight and, with `ordered`, the records that wait for earlier rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from shmllm.batch.output import RecordFile
from shmllm.batch.pieces import Refused
from shmllm.batch.rows import Format, JsonObject, Row, encode
from shmllm.errors import RequestError


class Result(Protocol):
    """What becomes of a request.

    Attributes:
        error: the reason why it was refused or failed; None if it did not.
    """

    error: str | None


Request = TypeVar("Request")
Output = TypeVar("Output", bound=Result)
Prepare = Callable[[Row], Request]
Stream = Callable[[Iterator[Request]], Iterable[tuple[int, Output | Refused | None]]]
"""Takes requests when it has room for them, and yields (index of the request, result).

The results come as requests finish, or in the order of the requests. The result of a refused
request has an `error`. None means that the engine aborted the request.
"""


@dataclass(slots=True)
class Tally:
    """The counts of a job.

    Attributes:
        num_written: number of written records, including errors.
        num_failed: number of records that are errors.
        num_lost: number of requests that the engine aborted; they have no record and can be run
            again.
    """

    num_written: int = 0
    num_failed: int = 0
    num_lost: int = 0


class BatchJob(Generic[Request, Output]):
    """A batch job.

    Args:
        form: the format that makes records.
        target: the file to write records to.
        prepare: makes a row's request; the record of a row for which it raises RequestError holds
            the error.
        ordered: whether to write records in the order of the rows; `stream` must then yield results
            in order too.
        on_result: is called with each result, and with None for a row that did not become a
            request.

    Attributes:
        tally: the counts so far.
    """

    def __init__(
        self,
        form: Format[Output],
        target: RecordFile,
        prepare: Prepare[Request],
        *,
        ordered: bool = False,
        on_result: Callable[[Output | None], None] = lambda result: None,
    ) -> None:
        self.tally = Tally()
        self._form = form
        self._target = target
        self._prepare = prepare
        self._ordered = ordered
        self._on_result = on_result
        self._in_flight: dict[int, Row] = {}
        self._num_sent = 0
        # With `ordered`: failed rows, each with the index of the next request after it.
        self._delayed_failures: deque[tuple[int, Row]] = deque()

    def run(self, rows: Iterable[Row], stream: Stream[Request, Output]) -> None:
        """Runs all rows until each has a result."""
        for index, output in stream(self._requests(rows)):
            self._write_failures_before(index)
            self._finish(self._in_flight.pop(index), output)
        self._write_failures_before(self._num_sent)

    def _requests(self, rows: Iterable[Row]) -> Iterator[Request]:
        for row in rows:
            request = self._request(row)
            if request is not None:
                self._in_flight[self._num_sent] = row
                self._num_sent += 1
                yield request
            elif self._ordered and self._in_flight:
                self._delayed_failures.append((self._num_sent, row))
            else:
                self._fail(row)

    def _request(self, row: Row) -> Request | None:
        if row.error is None:
            try:
                request = self._prepare(row)
                row.prompt = None  # the request has it, and texts of images are long
                return request
            except RequestError as error:
                row.error = str(error)
        return None

    def _write_failures_before(self, index: int) -> None:
        """Writes the delayed failures of rows that precede the request at `index`."""
        while self._delayed_failures and self._delayed_failures[0][0] <= index:
            self._fail(self._delayed_failures.popleft()[1])

    def _fail(self, row: Row) -> None:
        self.tally.num_failed += 1
        self._write(self._form.failure(row, row.error or "unknown error"))
        self._on_result(None)

    def _finish(self, row: Row, output: Output | Refused | None) -> None:
        if output is None:
            self.tally.num_lost += 1
        elif isinstance(output, Refused) or output.error is not None:
            row.error = output.error
            self._fail(row)
        else:
            self._write(self._form.record(row, output))
            self._on_result(output)

    def _write(self, record: JsonObject) -> None:
        self._target.write(encode(record))
        self.tally.num_written += 1
