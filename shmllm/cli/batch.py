"""`shmllm generate` with records: runs a plan on an engine and reports its outcome.

`shmllm.batch` processes the rows.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections import deque
from collections.abc import Iterator
from itertools import chain, count
from typing import TYPE_CHECKING, Any

import click

from shmllm.batch.job import BatchJob, Request
from shmllm.batch.output import Mode, RecordFile
from shmllm.batch.parameters import make_params, seed_of
from shmllm.batch.parquet import write_parquet
from shmllm.batch.resume import DoneLines
from shmllm.batch.rows import JsonObject, Row
from shmllm.batch.sources import STANDARD_STREAM
from shmllm.cli.adapters import Adapters
from shmllm.cli.outcome import EXIT_ENGINE_ENDED, EXIT_FAILED, WHY_ABORTED
from shmllm.cli.plan import GeneratePlan
from shmllm.cli.sampling import completed
from shmllm.cli.session import CommandSession
from shmllm.cli.streams import is_on_screen
from shmllm.errors import EnginePausedError, RequestError

if TYPE_CHECKING:
    from shmllm.frontend.llm import LLM
    from shmllm.outputs.request import RequestOutput
    from shmllm.params.lora import LoRARequest
    from shmllm.params.sampling import SamplingParams

NO_PROMPT = "the input holds no prompt"


class Batch:
    """A plan while it runs.

    Args:
        plan: the plan.
        num_rows: number of rows in the input; None if the input is a pipe.
        done: the lines of the input that already have a record.
        file: the file to write records to.
    """

    def __init__(
        self, plan: GeneratePlan, num_rows: int | None, done: DoneLines, file: RecordFile
    ) -> None:
        self._plan = plan
        self._num_rows = num_rows
        self._done = done
        self._file = file
        self._num_failed = done.num_failed
        self._num_written = done.num_done

    @classmethod
    @contextlib.contextmanager
    def open(cls, plan: GeneratePlan) -> Iterator[Batch]:
        """Claims the output file, and reads the records of an earlier run if the plan resumes it.

        Raises:
            click.UsageError: the input has no rows.
            RequestError: another job writes to the output, or its content does not fit the plan.
        """
        num_rows, num_lines = plan.rows.count()
        if num_rows == 0 and not plan.is_shard:
            raise click.UsageError(NO_PROMPT)
        file = RecordFile(plan.path, plan.mode)
        try:
            done = DoneLines(num_lines)
            if plan.mode is Mode.RESUME:
                done.read(plan.path, plan.form)
                done.check(plan.rows, plan.form)
            yield cls(plan, num_rows, done, file)
        finally:
            file.close()

    def rows_left(self) -> Iterator[Row] | None:
        """The rows without a record; None if all rows have one. Reads up to the first of them.

        Raises:
            click.UsageError: the input has no rows.
        """
        left = (row for row in self._plan.rows if row.line not in self._done)
        first = next(left, None)
        if first is None and not self._done.num_done and not self._plan.is_shard:
            raise click.UsageError(NO_PROMPT)
        return None if first is None else chain([first], left)

    def report_empty_shard(self) -> None:
        """Tells the user if there are no rows, as in a job with more shards than rows."""
        if not self._done.num_done:
            click.echo(f"shmllm: {self._plan.rows.name} has no rows", err=True)

    def begin(self) -> None:
        """Makes the output writable, and removes an incomplete record at its end."""
        self._file.begin(self._done.num_bytes)

    def run(
        self, rows: Iterator[Row], llm: LLM, sampling: JsonObject, session: CommandSession
    ) -> int:
        """Runs rows; returns the number of rows that the engine aborted."""
        from shmllm.frontend.progress import BatchProgress

        ordered, priority = self._plan.ordered, session.priority
        is_live = not (self._plan.target == STANDARD_STREAM and is_on_screen())
        with BatchProgress(
            self._num_rows, True, num_done=self._done.num_done, is_live=is_live
        ) as progress:
            job = BatchJob(
                self._plan.form,
                self._file,
                Preparation(llm, sampling, self._plan.chat_template, session.adapters),
                ordered=ordered,
                on_result=progress.finish,
            )
            try:
                job.run(rows, lambda requests: stream(llm, requests, ordered, priority))
            finally:
                self._num_written += job.tally.num_written
                self._num_failed += job.tally.num_failed
        return job.tally.num_lost

    def finish(self) -> int:
        """Completes the output after every row has a record; returns the exit code."""
        self._file.sync()
        if self._plan.is_parquet:
            write_parquet(self._plan.path, self._plan.target)
            os.unlink(self._plan.path)
        if not self._num_failed:
            return 0
        counts = f"{self._num_failed:,} of {self._num_written:,}"
        click.echo(f"shmllm: {counts} rows failed; see `error` in their records", err=True)
        return EXIT_FAILED

    def report_interruption(self) -> None:
        """Tells the user how many records exist, and how to continue the job."""
        if self._plan.target == STANDARD_STREAM:
            return
        total = "" if self._num_rows is None else f" of {self._num_rows:,}"
        hint = "; the same command with --resume continues" if self._plan.rows.is_file else ""
        click.echo(f"{self._num_written:,}{total} rows are in {self._plan.path}{hint}", err=True)


def run_batch(plan: GeneratePlan, sampling: JsonObject, session: CommandSession) -> int:
    """Runs a plan and returns the exit code.

    Args:
        plan: the plan.
        sampling: the sampling parameters from the command line; they override the model's defaults.
        session: starts the engine or attaches to it.
    """
    with Batch.open(plan) as batch:
        rows = batch.rows_left()
        if rows is None:
            batch.report_empty_shard()
            batch.begin()
            return batch.finish()
        with session.open() as llm:
            session.describe_engine(llm)
            batch.begin()
            try:
                num_lost = batch.run(rows, llm, sampling, session)
            except BaseException:
                batch.report_interruption()
                raise
        if not num_lost:
            return batch.finish()
        rows_have = "1 row has" if num_lost == 1 else f"{num_lost:,} rows have"
        click.echo(f"shmllm: {WHY_ABORTED}; {rows_have} no record", err=True)
        batch.report_interruption()
        return EXIT_ENGINE_ENDED


class Preparation:
    """Makes requests from rows.

    Args:
        llm: the engine's front end; it has the chat template and the model's defaults.
        sampling: the sampling parameters from the command line.
        chat_template: the source of the chat template; None for the model's.
        adapters: those that rows can choose.
    """

    def __init__(
        self,
        llm: LLM,
        sampling: JsonObject,
        chat_template: str | None,
        adapters: Adapters | None = None,
    ) -> None:
        self._llm = llm
        self._adapters = adapters or {}
        self._only = next(iter(self._adapters.values())) if len(self._adapters) == 1 else None
        self._given = llm.model_defaults | sampling
        self._common = make_params(completed(self._given), {})
        self._template: JsonObject = (
            {} if chat_template is None else {"chat_template": chat_template}
        )

    def __call__(self, row: Row) -> Request:
        prompt, adapter = row.prompt, self._adapter(row)
        if isinstance(prompt, list):
            prompt = dict(self._llm.front_end.chat_prompt(prompt, **self._template, **row.template))
        if not row.sampling and not row.defaults:
            params = self._common
        else:
            defaults = completed(row.defaults, self._given, row.sampling)
            params = make_params(defaults, row.sampling)
        if params.seed is None and params.temperature > 0:
            params = copy.copy(params)
            params.seed = seed_of(row.line)
        return prompt, params, adapter

    def _adapter(self, row: Row) -> LoRARequest | None:
        if row.lora is None:
            return self._only
        if row.lora and row.lora not in self._adapters:
            raise RequestError(f"'lora' names no adapter: pass --lora {row.lora}=DIR")
        return self._adapters.get(row.lora)


def stream(
    llm: LLM, requests: Iterator[Request], ordered: bool, priority: int | None
) -> Iterator[tuple[int, RequestOutput]]:
    """Runs requests with `LLM.stream`, which takes prompts and parameters separately.

    Raises:
        EnginePausedError: the engine takes no requests now. No row is to blame.
    """
    params: deque[SamplingParams] = deque()
    adapters: deque[LoRARequest | None] = deque()

    def prompts() -> Iterator[Any]:
        for prompt, own, adapter in requests:
            params.append(own)
            adapters.append(adapter)
            yield prompt

    outputs = llm.stream(
        prompts(),
        iter(params.popleft, None),
        ordered=ordered,
        on_error="yield",
        priority=priority,
        lora_request=(adapters.popleft() for _ in count()),
    )
    for output in outputs:
        if output.is_retryable:
            raise EnginePausedError(output.error or "the engine is paused")
        place = output.prompt_index
        if output.error is not None:
            output.error = output.error.replace(f"prompt {place} ", "the prompt ", 1)
        yield place, output
