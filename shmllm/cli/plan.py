"""Plans a `shmllm generate` with records: checks its input and output before an engine starts."""

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
from shmllm.batch.shard import ShardRows
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
# Options that only apply to records. Any of them makes the output records.
_RECORD_OPTIONS = (
    "as_json",
    "ordered",
    "resume",
    "overwrite",
    "token_ids",
    "openai_batch",
    "shard",
)


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
class GeneratePlan:
    """A batch job: the rows to run and the file for their records.

    Attributes:
        rows: the rows of the input.
        form: the format of rows and records.
        target: the output that the user named.
        mode: what to do with existing records.
        ordered: whether records are written in the order of the rows.
        chat_template: the source of the chat template; None for the model's.
        is_shard: whether the rows are a part of the input, which may have none.
    """

    rows: Rows
    form: Format
    target: str
    mode: Mode
    ordered: bool
    chat_template: str | None = None
    is_shard: bool = False

    @property
    def is_parquet(self) -> bool:
        return self.target.endswith(PARQUET)

    @property
    def path(self) -> str:
        """The file that records are written to; for a parquet target a journal beside it."""
        return journal_of(self.target) if self.is_parquet else self.target


def look_at(path: str) -> Input:
    """Finds out the kind of the input at `path`.

    Raises:
        click.FileError: the input cannot be read.
    """
    if path.endswith(PARQUET):
        return Input(path, SourceKind.PARQUET, None)
    try:
        lines = LineInput(path)
        return Input(path, kind_of(lines), lines)
    except OSError as error:
        raise click.FileError(path, error.strerror or str(error)) from error


def wants_records(found: Input | None, options: dict[str, Any]) -> bool:
    """Whether the output is records: the input holds rows, or an option asks for records."""
    if found is not None and found.kind is not SourceKind.TEXT:
        return True
    asked = any(options[name] for name in _RECORD_OPTIONS)
    return asked or (options["target"] or "").endswith((".jsonl", PARQUET))


def make_plan(found: Input | None, prompts: list[str], options: dict[str, Any]) -> GeneratePlan:
    """Makes a plan and checks everything that can be checked without an engine.

    Args:
        found: the input that --input names; None if there is no --input.
        prompts: the prompts if `found` is None.
        options: the command's options by name.

    Raises:
        click.UsageError: two options contradict each other, or the output is not usable.
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
            # A parquet file is created only when its job has ended, so no rows are missing.
            raise RequestError(f"{target} exists and is complete; --overwrite replaces it")
    is_text = isinstance(rows, TextRows | PromptRows)
    ordered = options["ordered"] or is_text
    shard = options["shard"]
    if shard is not None:
        rows = ShardRows(rows, shard)
    template = options["chat_template"]
    return GeneratePlan(rows, form, target, mode, ordered, template, shard is not None)


def _make_format(options: dict[str, Any], is_table: bool) -> Format:
    names = ("echo", "token_ids", "chat", "system")
    if not options["openai_batch"]:
        return NativeFormat(**{n: options[n] for n in names}, texts_are_json=is_table)
    for name in ("echo", "token_ids", "system", "chat_template", "chat"):
        if options[name]:
            flag = "--" + name.replace("_", "-")
            raise click.UsageError(f"{flag} cannot be used with --openai-batch, whose rows set it")
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
        raise click.UsageError(f"{target} is also the input")


def _mode(options: dict[str, Any], target: str, rows: Rows) -> Mode:
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
