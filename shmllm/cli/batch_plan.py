"""Plans a job of records: checks its input and its output before an engine starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from shmllm.batch.journal import journal_of
from shmllm.batch.output import Mode
from shmllm.batch.parquet import ParquetRows
from shmllm.batch.rows import AnyFormat, Rows, TextReader, parse_object
from shmllm.batch.sources import (
    STANDARD_STREAM,
    JsonRows,
    LineInput,
    Parse,
    SourceKind,
    TextRows,
    kind_of,
)
from shmllm.errors import RequestError

PARQUET = ".parquet"
NPY = ".npy"
SEE_RECORDS = "see `error` in their records"
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")

Convert = Callable[[str, str], None]
"""Makes the output of (journal, path of the output)."""


@dataclass(frozen=True)
class Input:
    """The file that --input names.

    Attributes:
        path: its path; "-" for stdin.
        kind: the kind of its content.
        lines: its lines; None for a parquet file.
    """

    path: str
    kind: SourceKind
    lines: LineInput | None


@dataclass(frozen=True)
class BatchPlan:
    """A job: the rows to run and the file for their records.

    Attributes:
        rows: the rows of the input.
        form: the format of rows and records.
        target: the output that the user named.
        mode: what to do with existing records.
        ordered: whether records are written in the order of the rows.
        is_shard: whether the rows are a part of the input, which may have none.
        convert: makes the output of a journal of records; None if the output holds the records.
        without_rows: what to say if the input has no rows.
        about_failures: what to say about rows that failed.
    """

    rows: Rows
    form: AnyFormat
    target: str
    mode: Mode
    ordered: bool
    is_shard: bool = False
    convert: Convert | None = None
    without_rows: str = "the input holds no prompt"
    about_failures: str = SEE_RECORDS

    @property
    def path(self) -> str:
        """The file that records are written to: the output, or a journal beside it."""
        return self.target if self.convert is None else journal_of(self.target)


def look_at(path: str, parse: Parse = parse_object) -> Input:
    """Finds out the kind of the input at `path`.

    Args:
        path: its path; "-" for stdin.
        parse: reads a row in JSON.

    Raises:
        click.FileError: the input cannot be read.
    """
    if path.endswith(PARQUET):
        return Input(path, SourceKind.PARQUET, None)
    try:
        lines = LineInput(path)
        return Input(path, kind_of(lines, parse), lines)
    except OSError as error:
        raise click.FileError(path, error.strerror or str(error)) from error


def rows_of(found: Input, form: TextReader, parse: Parse = parse_object) -> Rows:
    """The rows of an input.

    Args:
        found: the input.
        form: makes rows of its lines.
        parse: reads a row in JSON.

    Raises:
        RequestError: it is no parquet file, although it has the name of one, or pyarrow is missing.
    """
    if found.lines is None:
        return ParquetRows(found.path, form)
    if found.kind is SourceKind.JSON_LINES:
        return JsonRows(found.lines, form, parse)
    return TextRows(found.lines, form)


def check_output(target: str, rows: Rows) -> None:
    """Raises click.UsageError if the output cannot be written, or is the input."""
    if target.endswith(COMPRESSED):
        raise click.UsageError(f"{target}: compressed output is not supported; pipe it instead")
    if os.path.isdir(target):
        raise click.UsageError(f"{target} is a directory")
    check_is_other(target, rows.name if rows.is_file else None)


def check_is_other(target: str, source: str | None) -> None:
    """Raises click.UsageError if the output is the input, a path or None."""
    if source is not None and os.path.exists(target) and os.path.samefile(source, target):
        raise click.UsageError(f"{target} is also the input")


def check_is_new(target: str, overwrite: bool) -> None:
    """Raises RequestError if an output has a content that may not be replaced."""
    if not overwrite and os.path.isfile(target) and os.path.getsize(target):
        raise RequestError(f"{target} is not empty; --overwrite replaces it")


def check_incomplete(target: str, mode: Mode) -> None:
    """Raises RequestError if an output that is made of a journal is there: no rows are missing."""
    if mode is not Mode.OVERWRITE and os.path.exists(target):
        raise RequestError(f"{target} exists and is complete; --overwrite replaces it")


def mode_of(options: dict[str, Any], target: str, rows: Rows) -> Mode:
    """What --resume and --overwrite say about existing records.

    Raises:
        click.UsageError: they contradict each other, or the job cannot be resumed.
    """
    if not options["resume"]:
        return Mode.OVERWRITE if options["overwrite"] else Mode.NEW
    if options["overwrite"]:
        raise click.UsageError(
            "--resume keeps existing records, --overwrite removes them: give one"
        )
    if not rows.is_file:
        raise click.UsageError(f"--resume reads the input twice, and {rows.name} is not a file")
    if target == STANDARD_STREAM or (os.path.exists(target) and not Path(target).is_file()):
        raise click.UsageError("--resume needs a file as --output")
    return Mode.RESUME
