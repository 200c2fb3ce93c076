"""A batch job: every row that is not done goes in, every result is written as it comes.

Owns what becomes of a row. Must not know the engine: it runs over a `Stream`. Memory holds
the rows that are on their way, and with `ordered` what waits for the ones before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from shmllm.batch.output import RecordFile
from shmllm.batch.rows import Format, JsonObject, Row, encode
from shmllm.errors import RequestError
from shmllm.outputs.request import RequestOutput
from shmllm.params.sampling import SamplingParams

ABORTED = "abort"

Request = tuple[Any, SamplingParams]
Prepare = Callable[[Row], Request]
# Takes requests as there is room for them and yields (place in the input, result) as they
# end, or in order. A request that is refused is a result whose `error` says why.
Stream = Callable[[Iterator[Request]], Iterable[tuple[int, RequestOutput]]]


@dataclass(slots=True)
class Tally:
    """
    Attributes:
        num_written: records, errors included.
        num_failed: of these, errors.
        num_lost: requests that the engine gave up; no record says so, and they can be run again.
    """

    num_written: int = 0
    num_failed: int = 0
    num_lost: int = 0


class BatchJob:
    """
    Args:
        form: reads rows and makes records.
        target: where records go.
        prepare: makes a row's request; a RequestError becomes the row's record.
        ordered: records in the order of the rows; `stream` yields in order, too.
        on_result: called with each result, and with None for a row that never was a request.
    """

    def __init__(
        self,
        form: Format,
        target: RecordFile,
        prepare: Prepare,
        *,
        ordered: bool = False,
        on_result: Callable[[RequestOutput | None], None] = lambda result: None,
    ) -> None:
        self.tally = Tally()
        self._form = form
        self._target = target
        self._prepare = prepare
        self._ordered = ordered
        self._on_result = on_result
        self._open: dict[int, Row] = {}
        self._num_sent = 0
        # (place in the stream, row that failed before it got one), while `ordered`
        self._held: deque[tuple[int, Row]] = deque()

    def run(self, rows: Iterable[Row], stream: Stream) -> None:
        """Run rows to the end of all of them."""
        for place, output in stream(self._requests(rows)):
            self._release(place)
            self._finish(self._open.pop(place), output)
        self._release(self._num_sent)

    def _requests(self, rows: Iterable[Row]) -> Iterator[Request]:
        for row in rows:
            request = self._request(row)
            if request is not None:
                self._open[self._num_sent] = row
                self._num_sent += 1
                yield request
            elif self._ordered and self._open:
                self._held.append((self._num_sent, row))
            else:
                self._fail(row)

    def _request(self, row: Row) -> Request | None:
        if row.error is None:
            try:
                return self._prepare(row)
            except RequestError as error:
                row.error = str(error)
        return None

    def _release(self, place: int) -> None:
        """Write the failed rows that come before this place in the stream."""
        while self._held and self._held[0][0] <= place:
            self._fail(self._held.popleft()[1])

    def _fail(self, row: Row) -> None:
        self.tally.num_failed += 1
        self._write(self._form.failure(row, row.error or "unknown error"))
        self._on_result(None)

    def _finish(self, row: Row, output: RequestOutput) -> None:
        if output.error is not None:
            row.error = output.error
            self._fail(row)
        elif any(one.finish_reason in (None, ABORTED) for one in output.outputs):
            self.tally.num_lost += 1
        else:
            self._write(self._form.record(row, output))
            self._on_result(output)

    def _write(self, record: JsonObject) -> None:
        self._target.write(encode(record))
        self.tally.num_written += 1
