"""Reads rows from JSON lines or plain lines in a file, a compressed file or a pipe.

This module owns the choice between the kinds of input. It holds one line in memory at a time.
"""

from __future__ import annotations

import gzip
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from enum import Enum
from typing import IO, Generic, TypeVar

from shmllm.batch.rows import JsonObject, Row, RowReader, TextReader, parse_object
from shmllm.errors import RequestError

AnyReader = TypeVar("AnyReader", bound=RowReader)
Parse = Callable[[bytes], JsonObject]
"""Parses a line of JSON. Raises RequestError if it holds no row."""

STANDARD_STREAM = "-"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_JSON_NAMES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")


class SourceKind(Enum):
    """The kind of an input's content."""

    JSON_LINES = "JSON lines"
    TEXT = "plain lines"
    PARQUET = "parquet"


class LineInput:
    """Iterates over (line number, line) of the lines that are not blank.

    Args:
        path: the file, which is decompressed if its name ends in .gz; - is stdin.

    Attributes:
        is_file: whether it is a regular file, which can be read several times.
        name: its name in messages.
    """

    def __init__(self, path: str) -> None:
        self.is_file = path != STANDARD_STREAM and stat.S_ISREG(os.stat(path).st_mode)
        self.name = "standard input" if path == STANDARD_STREAM else path
        self._path = path
        # A pipe can be read only once, so lines that `first` reads are kept.
        self._pipe = None if self.is_file else self._open()
        self._peeked: list[bytes] = []

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        for number, line in enumerate(self._lines(), 1):
            if line.strip():
                yield number, line

    def count(self) -> tuple[int | None, int]:
        """The number of lines that are not blank, and the number of all lines; (None, 0) for a
        pipe, which can be read only once."""
        if not self.is_file:
            return None, 0
        num_used = num_lines = 0
        for line in self._lines():
            num_lines += 1
            num_used += bool(line.strip())
        return num_used, num_lines

    def first(self) -> bytes | None:
        """The first line that is not blank; None if there is none. Iteration still yields it."""
        if self._pipe is None:
            return next((line for _, line in self), None)
        while not self._peeked or not self._peeked[-1].strip():
            line = self._pipe.readline()
            if not line:
                return None
            self._peeked.append(line if self._peeked else line.removeprefix(_BYTE_ORDER_MARK))
        return self._peeked[-1]

    def _open(self) -> IO[bytes] | gzip.GzipFile:
        if self._path == STANDARD_STREAM:
            return sys.stdin.buffer
        if self._path.endswith(".gz"):
            return gzip.open(self._path, "rb")
        return open(self._path, "rb")

    def _lines(self) -> Iterator[bytes]:
        """All lines, without the byte order mark of the first one."""
        lines = self._read()
        for first in lines:
            yield first.removeprefix(_BYTE_ORDER_MARK)
            yield from lines

    def _read(self) -> Iterator[bytes]:
        if self._pipe is not None:
            with self._pipe:
                yield from self._peeked
                yield from self._pipe
            return
        with self._open() as stream:
            try:
                yield from stream
            except (EOFError, zlib.error) as error:
                raise OSError(f"{self.name} is damaged: {error}") from error


def kind_of(lines: LineInput, parse: Parse = parse_object) -> SourceKind:
    """The kind of an input: by its name, or else JSON lines if its first line is a row in JSON."""
    if lines.name.endswith(_JSON_NAMES):
        return SourceKind.JSON_LINES
    first = lines.first()
    if first is None:
        return SourceKind.TEXT
    try:
        parse(first)
    except RequestError:
        return SourceKind.TEXT
    return SourceKind.JSON_LINES


class _LineRows(Generic[AnyReader]):
    """Rows that are made from the lines of an input.

    Args:
        lines: the lines.
        form: reads the rows.
    """

    def __init__(self, lines: LineInput, form: AnyReader) -> None:
        self.name = lines.name
        self.is_file = lines.is_file
        self.count = lines.count
        self._lines = lines
        self._form = form


class JsonRows(_LineRows[RowReader]):
    """One row per line; the row of a line that `parse` refuses is an error."""

    def __init__(self, lines: LineInput, form: RowReader, parse: Parse = parse_object) -> None:
        super().__init__(lines, form)
        self._parse = parse

    def __iter__(self) -> Iterator[Row]:
        for number, line in self._lines:
            try:
                fields = self._parse(line)
            except RequestError as error:
                yield Row(number, error=str(error))
            else:
                yield self._form.row(number, fields)


class TextRows(_LineRows[TextReader]):
    """One row per line; the line is the prompt."""

    def __iter__(self) -> Iterator[Row]:
        for index, (number, line) in enumerate(self._lines):
            try:
                text = line.decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                message = f"not UTF-8: {error.reason} at byte {error.start + 1}"
                yield Row(number, carried={"index": index}, error=message)
            else:
                yield self._form.text_row(number, index, text)


class PromptRows:
    """One row per prompt of a list."""

    is_file = False
    name = "the command line"

    def __init__(self, prompts: list[str], form: TextReader) -> None:
        self._prompts = prompts
        self._form = form

    def __iter__(self) -> Iterator[Row]:
        for index, prompt in enumerate(self._prompts):
            yield self._form.text_row(index + 1, index, prompt)

    def count(self) -> tuple[int, int]:
        return len(self._prompts), len(self._prompts)
