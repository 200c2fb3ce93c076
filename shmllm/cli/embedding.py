"""Runs `shmllm embed`: plans the job, and says what becomes of its rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from shmllm.batch.embeddings import EMBEDDING, EmbeddingFormat
from shmllm.batch.parquet import require_pyarrow, write_parquet
from shmllm.batch.pieces import Refused, run_in_pieces
from shmllm.batch.rows import JsonObject
from shmllm.batch.shard import ShardRows
from shmllm.batch.sources import STANDARD_STREAM
from shmllm.batch.vectors import write_npy
from shmllm.cli.batch_plan import (
    NPY,
    PARQUET,
    SEE_RECORDS,
    BatchPlan,
    Convert,
    check_incomplete,
    check_output,
    mode_of,
)
from shmllm.cli.batch_run import Work, run_plan
from shmllm.cli.session import CommandSession
from shmllm.cli.texts import SHORT_TEXT, WITHOUT_ROWS, read_rows
from shmllm.errors import RequestError
from shmllm.params.pooling import PoolingParams

if TYPE_CHECKING:
    from shmllm.frontend.llm import LLM
    from shmllm.outputs.pooling import EmbeddingRequestOutput

_JSON_LINES = (".jsonl", ".ndjson")
_PASSED_ON = ("prompt_name", "truncate_prompt_tokens")


def options_of_embed(options: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `LLM.embed` that the command's options ask for.

    Raises:
        RequestError: a value is out of its range.
    """
    params = PoolingParams(
        dimensions=options["dimensions"],
        pooling_type=options["pooling_type"],
        use_activation=False if options["no_normalize"] else None,
    )
    given = {name: options[name] for name in _PASSED_ON if options[name] is not None}
    return {"pooling_params": params, **given}


def make_plan(options: dict[str, Any]) -> BatchPlan:
    """Makes a plan and checks everything that can be checked without an engine.

    Raises:
        click.UsageError: two options contradict each other, or the output is not usable.
        RequestError: the input cannot be read, a package is missing, or the output is complete.
    """
    target, shard = options["target"], options["shard"]
    convert = _convert_for(target)
    form = EmbeddingFormat(is_journal=convert is not None)
    rows = read_rows(options["source"], form)
    check_output(target, rows)
    mode = mode_of(options, target, rows)
    if convert is not None:
        check_incomplete(target, mode)
    return BatchPlan(
        rows if shard is None else ShardRows(rows, shard),
        form,
        target,
        mode,
        ordered=True,
        is_shard=shard is not None,
        convert=convert,
        without_rows=WITHOUT_ROWS,
        about_failures="their rows are NaN" if target.endswith(NPY) else SEE_RECORDS,
    )


def _convert_for(target: str) -> Convert | None:
    """What makes the output of a journal; None if it holds the records."""
    if target.endswith(PARQUET):
        require_pyarrow()
        return partial(write_parquet, vectors=EMBEDDING)
    if target.endswith(NPY):
        return _write_npy
    is_other = os.path.exists(target) and not os.path.isfile(target)
    if is_other or target == STANDARD_STREAM or target.endswith(_JSON_LINES):
        return None
    raise click.UsageError(f"{target}: vectors are written to .jsonl, .parquet or .npy")


def _write_npy(journal: str, path: str) -> None:
    """Makes a .npy file of a journal, and reports each text that failed on stderr."""

    def report(record: JsonObject) -> None:
        click.echo(f"shmllm: line {record['line']:,}: {record['error']}", err=True)

    write_npy(journal, path, EMBEDDING, report)


def run_embedding(plan: BatchPlan, options: dict[str, Any], session: CommandSession) -> int:
    """Runs a plan and returns the exit code.

    Args:
        plan: the plan.
        options: keyword arguments of `LLM.embed`.
        session: starts the engine or attaches to it.
    """

    def work(llm: LLM) -> Work[str, EmbeddingRequestOutput]:
        if llm.facts.pooling.head == "sparse":
            _expect_sparse(plan)
        return work_on(llm, **options)

    return run_plan(plan, session, work)


def _expect_sparse(plan: BatchPlan) -> None:
    """Raises RequestError if the output is none for sparse vectors."""
    assert isinstance(plan.form, EmbeddingFormat), "it is the format of the command"
    if plan.convert is not None:
        raise RequestError("sparse vectors are written to .jsonl, not to .parquet or .npy")
    plan.form.is_sparse = True


def work_on(llm: LLM, **options: Any) -> Work[str, EmbeddingRequestOutput]:
    """The work that embeds texts on an engine.

    Args:
        llm: the engine's front end.
        options: keyword arguments of `LLM.embed`.

    Raises:
        RequestError: an option does not suit the model.
    """
    from shmllm.frontend.progress import TextProgress

    def call(texts: Sequence[str]) -> list[EmbeddingRequestOutput]:
        return llm.embed(texts, use_tqdm=False, **options)

    def stream(
        texts: Iterator[str],
    ) -> Iterator[tuple[int, EmbeddingRequestOutput | Refused | None]]:
        for place, output in run_in_pieces(call, texts):
            is_lost = not isinstance(output, Refused) and output.is_aborted
            yield place, None if is_lost else output

    call([SHORT_TEXT])
    return Work(lambda row: str(row.prompt), stream, partial(TextProgress, label="embedding"))
