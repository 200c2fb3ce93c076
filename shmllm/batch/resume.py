"""Finds the lines of an input that already have a record from an earlier run.

It needs one bit and four bytes of memory per line, independent of the size of the records.
"""

from __future__ import annotations

from array import array

from shmllm.batch.rows import AnyFormat, Row, Rows, fingerprint, parse_object
from shmllm.errors import RequestError


class DoneLines:
    """The set of lines that have a record.

    Args:
        num_lines: number of lines in the input.

    Attributes:
        num_done: number of lines with a record.
        num_failed: number of these records that are errors.
        num_bytes: size of the complete records in the file; an incomplete line may follow them.
    """

    def __init__(self, num_lines: int = 0) -> None:
        self.num_done = self.num_failed = self.num_bytes = 0
        self._num_lines = num_lines
        self._bits = bytearray(num_lines // 8 + 1)
        self._tags = array("I", bytes(4 * (num_lines + 1)))

    def __contains__(self, line: int) -> bool:
        return line <= self._num_lines and bool(self._bits[line >> 3] & 1 << (line & 7))

    def read(self, path: str, form: AnyFormat) -> None:
        """Adds the records of a file.

        Raises:
            RequestError: the file holds other data, or records of another input.
        """
        with open(path, "rb") as stream:
            for number, text in enumerate(stream, 1):
                if not text.endswith(b"\n"):
                    return
                self._add(f"line {number} of {path}", text, form)
                self.num_bytes += len(text)

    def check(self, rows: Rows, form: AnyFormat) -> None:
        """Checks that the records belong to these rows.

        Raises:
            RequestError: a record has another id or other fields than its row.
        """
        num_found = 0
        for row in rows:
            if row.line in self:
                self._check_row(row, rows.name, form)
                num_found += 1
                if num_found == self.num_done:
                    return
        if num_found != self.num_done:
            raise RequestError(
                f"cannot resume: {self.num_done - num_found} records belong to no row of "
                f"{rows.name}; is this the input of the earlier run?"
            )

    def _add(self, where: str, text: bytes, form: AnyFormat) -> None:
        try:
            record = parse_object(text)
        except RequestError as error:
            raise RequestError(f"cannot resume: {where} is {error}") from error
        line = form.line_of(record)
        if line is None:
            raise RequestError(f"cannot resume: {where} is not a record of a batch job")
        if line > self._num_lines:
            raise RequestError(
                f"cannot resume: {where} belongs to line {line:,} of the input, which has "
                f"{self._num_lines:,}; is this the input of the earlier run?"
            )
        if line in self:
            raise RequestError(
                f"cannot resume: {where} belongs to line {line:,} of the input, which already has "
                "a record"
            )
        self._bits[line >> 3] |= 1 << (line & 7)
        self._tags[line] = fingerprint(form.tag_of_record(record))
        self.num_done += 1
        self.num_failed += form.is_failure(record)

    def _check_row(self, row: Row, name: str, form: AnyFormat) -> None:
        tag = form.tag_of_row(row)
        if self._tags[row.line] != fingerprint(tag):
            shown = f" ({tag})" if len(str(tag)) < 100 else ""
            raise RequestError(
                f"cannot resume: the record of line {row.line:,} has another id or other fields "
                f"than that line of {name}{shown}; is this the input of the earlier run?"
            )
