"""Runs `shmllm embed`: plans the job, and says what becomes of its rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from shmllm.batch.embeddings import EMBEDDING, EmbeddingFormat, ImageFormat
from shmllm.batch.parquet import require_pyarrow, write_parquet
from shmllm.batch.pieces import Refused, run_in_pieces
from shmllm.batch.rows import JsonObject, Row, Rows
from shmllm.batch.shard import ShardRows
from shmllm.batch.sources import STANDARD_STREAM, PromptRows
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
from shmllm.cli.item_prompts import items_of_paths, items_of_row, prompt_with_items
from shmllm.cli.items import check_takes
from shmllm.cli.session import CommandSession
from shmllm.cli.texts import SHORT_TEXT, WITHOUT_ROWS, read_rows
from shmllm.errors import RequestError
from shmllm.frontend.given_items import DATA
from shmllm.params.items import Modality
from shmllm.params.pooling import PoolingParams

if TYPE_CHECKING:
    from shmllm.frontend.front_end import FrontEnd
    from shmllm.frontend.items.ready import ReadyItem
    from shmllm.frontend.llm import LLM
    from shmllm.outputs.pooling import EmbeddingRequestOutput

Prompt = str | dict[str, Any]
ItemsOf = Callable[["FrontEnd", Mapping[Modality, Sequence[str]]], "list[ReadyItem]"]
"""Prepares items that are named by modality."""

_CHARACTER_BYTES = 256
"""The bytes of an image that count as a character: those of a piece have up to 64 MiB together."""
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
    form, rows = _make_rows(options, is_journal=convert is not None)
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


def _make_rows(options: dict[str, Any], *, is_journal: bool) -> tuple[EmbeddingFormat, Rows]:
    """The rows of the input, or of the images that the options name, and their format."""
    images, source = options["image"], options["source"]
    if not images:
        if options["text"] is not None:
            raise click.UsageError("--text is beside an --image; texts are in --input")
        form = EmbeddingFormat(is_journal=is_journal)
        return form, read_rows(source, form)
    if source != STANDARD_STREAM:
        raise click.UsageError(
            "--image and --input exclude each other: a row of a file names its images in `images`"
        )
    for path in images:
        if not os.path.exists(path):
            raise click.UsageError(f"--image: there is no file {path!r}")
    form = ImageFormat(options["text"] or "", is_journal=is_journal)
    return form, PromptRows(list(images), form)


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

    items_of = items_of_row
    if isinstance(plan.form, ImageFormat):
        items_of = items_of_paths
        check_takes(session, ["image"])

    def work(llm: LLM) -> Work[Prompt, EmbeddingRequestOutput]:
        if llm.facts.pooling.head == "sparse":
            _expect_sparse(plan)
        return work_on(llm, items_of, **options)

    return run_plan(plan, session, work)


def _expect_sparse(plan: BatchPlan) -> None:
    """Raises RequestError if the output is none for sparse vectors."""
    assert isinstance(plan.form, EmbeddingFormat), "it is the format of the command"
    if plan.convert is not None:
        raise RequestError("sparse vectors are written to .jsonl, not to .parquet or .npy")
    plan.form.is_sparse = True


def work_on(
    llm: LLM, items_of: ItemsOf = items_of_row, **options: Any
) -> Work[Prompt, EmbeddingRequestOutput]:
    """The work that embeds texts and images on an engine.

    Args:
        llm: the engine's front end.
        items_of: prepares the items of a row.
        options: keyword arguments of `LLM.embed`.

    Raises:
        RequestError: an option does not suit the model.
    """
    from shmllm.frontend.progress import TextProgress

    def prompt_of(row: Row) -> Prompt:
        text = str(row.prompt)
        if not row.items:
            return text
        return prompt_with_items(llm.front_end, text, items_of(llm.front_end, row.items))

    def call(prompts: Sequence[Any]) -> list[EmbeddingRequestOutput]:
        return llm.embed(prompts, use_tqdm=False, **options)

    def stream(
        prompts: Iterator[Prompt],
    ) -> Iterator[tuple[int, EmbeddingRequestOutput | Refused | None]]:
        for place, output in run_in_pieces(call, prompts, _length):
            is_lost = not isinstance(output, Refused) and output.is_aborted
            yield place, None if is_lost else output

    call([SHORT_TEXT])
    return Work(prompt_of, stream, partial(TextProgress, label="embedding"))


def _length(prompt: Prompt) -> int:
    """How many characters a prompt counts as, for the size of a piece."""
    if isinstance(prompt, str):
        return len(prompt)
    items: list[ReadyItem] = [each for own in prompt[DATA].values() for each in own]
    num_bytes = sum(each.prepared.nbytes for each in items)
    return len(prompt["prompt"]) + num_bytes // _CHARACTER_BYTES
