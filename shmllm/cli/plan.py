"""Plans a `shmllm generate` with records: checks its input and output before an engine starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from shmllm.batch.native import NativeFormat
from shmllm.batch.openai import OpenAIFormat
from shmllm.batch.parquet import ParquetRows, require_pyarrow, write_parquet
from shmllm.batch.rows import Rows
from shmllm.batch.shard import ShardRows
from shmllm.batch.sources import STANDARD_STREAM, JsonRows, PromptRows, SourceKind, TextRows
from shmllm.cli.batch_plan import (
    PARQUET,
    BatchPlan,
    Input,
    check_incomplete,
    check_output,
    mode_of,
    rows_of,
)

# Options that only apply to records. Any of them makes the output records.
_RECORD_OPTIONS = (
    "as_json",
    "ordered",
    "resume",
    "token_ids",
    "openai_batch",
    "shard",
)


@dataclass(frozen=True)
class GeneratePlan(BatchPlan):
    """A batch job that completes prompts.

    Attributes:
        chat_template: the source of the chat template; None for the model's.
    """

    chat_template: str | None = None


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
    check_output(target, rows)
    mode = mode_of(options, target, rows)
    convert = write_parquet if target.endswith(PARQUET) else None
    if convert is not None:
        require_pyarrow()
        check_incomplete(target, mode)
    is_text = isinstance(rows, TextRows | PromptRows)
    shard = options["shard"]
    return GeneratePlan(
        rows if shard is None else ShardRows(rows, shard),
        form,
        target,
        mode,
        ordered=options["ordered"] or is_text,
        is_shard=shard is not None,
        convert=convert,
        chat_template=options["chat_template"],
    )


def _make_format(options: dict[str, Any], is_table: bool) -> NativeFormat | OpenAIFormat:
    names = ("echo", "token_ids", "chat", "system", "decoder_prompt")
    if not options["openai_batch"]:
        return NativeFormat(**{n: options[n] for n in names}, texts_are_json=is_table)
    for name in ("echo", "token_ids", "system", "chat_template", "chat", "decoder_prompt"):
        if options[name]:
            flag = "--" + name.replace("_", "-")
            raise click.UsageError(f"{flag} cannot be used with --openai-batch, whose rows set it")
    return OpenAIFormat()


def _make_rows(found: Input | None, prompts: list[str], form: NativeFormat | OpenAIFormat) -> Rows:
    if isinstance(form, NativeFormat):
        return PromptRows(prompts, form) if found is None else rows_of(found, form)
    if found is None:
        raise click.UsageError("--openai-batch needs --input")
    return ParquetRows(found.path, form) if found.lines is None else JsonRows(found.lines, form)
