"""What a `shmllm generate` is to read and write, decided and checked before an engine starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from shmllm.batch.native import NativeFormat
from shmllm.batch.openai import OpenAIFormat
from shmllm.batch.output import Mode
from shmllm.batch.parquet import ParquetRows, journal_of, require_pyarrow
from shmllm.batch.rows import Format, Rows
from shmllm.batch.sources import (
    STANDARD_STREAM,
    JsonRows,
    LineInput,
    PromptRows,
    SourceKind,
    TextRows,
    kind_of,
)
from shmllm.errors import RequestError

PARQUET = ".parquet"
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# Options that mean something for records only.
_RECORD_OPTIONS = ("as_json", "ordered", "resume", "overwrite", "token_ids", "openai_batch")


@dataclass(frozen=True)
class Input:
    """What --input names.

    Attributes:
        lines: None if it is a parquet file.
    """

    path: str
    kind: SourceKind
    lines: LineInput | None


@dataclass(frozen=True)
class GeneratePlan:
    """A job with records.

    Attributes:
        target: where the user wants them.
        mode: what becomes of records that are there.
        ordered: in the order of the rows.
    """

    rows: Rows
    form: Format
    target: str
    mode: Mode
    ordered: bool

    @property
    def is_parquet(self) -> bool:
        return self.target.endswith(PARQUET)

    @property
    def path(self) -> str:
        """Where records are written."""
        return journal_of(self.target) if self.is_parquet else self.target


def look_at(path: str) -> Input:
    """Find out what an input is.

    Raises:
        click.FileError: it cannot be read.
    """
    if path.endswith(PARQUET):
        return Input(path, SourceKind.PARQUET, None)
    try:
        lines = LineInput(path)
        return Input(path, kind_of(lines), lines)
    except OSError as error:
        raise click.FileError(path, error.strerror or str(error)) from error


def wants_records(found: Input | None, options: dict[str, Any]) -> bool:
    """Whether a command's output is for programs: records in, or records asked for."""
    if found is not None and found.kind is not SourceKind.TEXT:
        return True
    asked = any(options[name] for name in _RECORD_OPTIONS) or options["logprobs"] is not None
    return asked or (options["target"] or "").endswith((".jsonl", PARQUET))


def make_plan(found: Input | None, prompts: list[str], options: dict[str, Any]) -> GeneratePlan:
    """Check what can be checked without an engine.

    Args:
        found: what --input names.
        prompts: used if `found` is None.
        options: the command's, by name.

    Raises:
        click.UsageError: options that do not go together.
        RequestError: the input cannot be read, or a package is missing.
    """
    target = options["target"] or STANDARD_STREAM
    is_table = found is not None and found.kind is SourceKind.PARQUET
    form = _make_format(options, is_table)
    rows = _make_rows(found, prompts, form)
    _check_output(target, rows)
    mode = _mode(options, target, rows)
    if target.endswith(PARQUET):
        require_pyarrow()
        if mode is not Mode.OVERWRITE and os.path.exists(target):
            # It appears only when its job has ended, so there is nothing to go on with.
            raise RequestError(f"{target} is there, and complete; --overwrite starts anew")
    is_text = isinstance(rows, TextRows | PromptRows)
    return GeneratePlan(rows, form, target, mode, options["ordered"] or is_text)


def _make_format(options: dict[str, Any], is_table: bool) -> Format:
    names = ("echo", "token_ids", "chat", "system")
    if not options["openai_batch"]:
        return NativeFormat(**{n: options[n] for n in names}, texts_are_json=is_table)
    for name in names:
        if options[name]:
            flag = "--" + name.replace("_", "-")
            raise click.UsageError(f"{flag} does not go with --openai-batch: a row says it all")
    return OpenAIFormat()


def _make_rows(found: Input | None, prompts: list[str], form: Format) -> Rows:
    if found is not None and found.lines is None:
        return ParquetRows(found.path, form)
    if isinstance(form, OpenAIFormat):
        if found is None or found.lines is None:
            raise click.UsageError("--openai-batch needs --input")
        return JsonRows(found.lines, form)
    assert isinstance(form, NativeFormat)
    if found is None or found.lines is None:
        return PromptRows(prompts, form)
    kind = JsonRows if found.kind is SourceKind.JSON_LINES else TextRows
    return kind(found.lines, form)


def _check_output(target: str, rows: Rows) -> None:
    if target.endswith(COMPRESSED):
        raise click.UsageError(f"{target}: compressed output is not supported; pipe it instead")
    if os.path.isdir(target):
        raise click.UsageError(f"{target} is a directory")
    if rows.is_file and os.path.exists(target) and os.path.samefile(rows.name, target):
        raise click.UsageError(f"{target} is the input, too")


def _mode(options: dict[str, Any], target: str, rows: Rows) -> Mode:
    if not options["resume"]:
        return Mode.OVERWRITE if options["overwrite"] else Mode.NEW
    if options["overwrite"]:
        raise click.UsageError("--resume keeps what is there, --overwrite does not: give one")
    if not rows.is_file:
        raise click.UsageError(f"--resume reads the input twice, and {rows.name} is no file")
    if target == STANDARD_STREAM or (os.path.exists(target) and not Path(target).is_file()):
        raise click.UsageError("--resume needs a file as --output")
    return Mode.RESUME
