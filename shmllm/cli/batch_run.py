"""Runs a plan on an engine, reports its progress and its outcome.

`shmllm.batch` processes the rows. This module must not know what becomes of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic

import click

from shmllm.batch.job import BatchJob, Output, Prepare, Request, Stream
from shmllm.batch.output import Mode, RecordFile
from shmllm.batch.resume import DoneLines
from shmllm.batch.rows import Row
from shmllm.batch.sources import STANDARD_STREAM
from shmllm.cli.batch_plan import BatchPlan
from shmllm.cli.outcome import EXIT_ENGINE_ENDED, EXIT_FAILED, WHY_ABORTED
from shmllm.cli.session import CommandSession
from shmllm.cli.streams import is_on_screen

if TYPE_CHECKING:
    from shmllm.frontend.llm import LLM


@dataclass(frozen=True)
class Work(Generic[Request, Output]):
    """What becomes of the rows on an engine.

    Attributes:
        prepare: makes a row's request.
        stream: runs requests.
        progress: makes the progress bar, of a number of rows.
    """

    prepare: Prepare[Request]
    stream: Stream[Request, Output]
    progress: Callable[..., Any]


WorkOn = Callable[["LLM"], Work[Any, Any]]


class BatchRun:
    """A plan while it runs.

    Args:
        plan: the plan.
        num_rows: number of rows in the input; None if the input is a pipe.
        done: the lines of the input that already have a record.
        file: the file to write records to.
    """

    def __init__(
        self, plan: BatchPlan, num_rows: int | None, done: DoneLines, file: RecordFile
    ) -> None:
        self._plan = plan
        self._num_rows = num_rows
        self._done = done
        self._file = file
        self._num_failed = done.num_failed
        self._num_written = done.num_done

    @classmethod
    @contextlib.contextmanager
    def open(cls, plan: BatchPlan) -> Iterator[BatchRun]:
        """Claims the output file, and reads the records of an earlier run if the plan resumes it.

        Raises:
            click.UsageError: the input has no rows.
            RequestError: another job writes to the output, or its content does not fit the plan.
        """
        num_rows, num_lines = plan.rows.count()
        if num_rows == 0 and not plan.is_shard:
            raise click.UsageError(plan.without_rows)
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
            raise click.UsageError(self._plan.without_rows)
        return None if first is None else chain([first], left)

    def report_empty_shard(self) -> None:
        """Tells the user if there are no rows, as in a job with more shards than rows."""
        if not self._done.num_done:
            click.echo(f"shmllm: {self._plan.rows.name} has no rows", err=True)

    def begin(self) -> None:
        """Makes the output writable, and removes an incomplete record at its end."""
        self._file.begin(self._done.num_bytes)

    def run(self, rows: Iterator[Row], work: Work[Any, Any]) -> int:
        """Runs rows; returns the number of rows that the engine aborted."""
        is_live = not (self._plan.target == STANDARD_STREAM and is_on_screen())
        with work.progress(
            self._num_rows, True, num_done=self._done.num_done, is_live=is_live
        ) as progress:
            job = BatchJob(
                self._plan.form,
                self._file,
                work.prepare,
                ordered=self._plan.ordered,
                on_result=progress.finish,
            )
            try:
                job.run(rows, work.stream)
            finally:
                self._num_written += job.tally.num_written
                self._num_failed += job.tally.num_failed
        return job.tally.num_lost

    def finish(self) -> int:
        """Completes the output after every row has a record; returns the exit code."""
        self._file.sync()
        if self._plan.convert is not None:
            self._plan.convert(self._plan.path, self._plan.target)
            os.unlink(self._plan.path)
        if not self._num_failed:
            return 0
        counts = f"{self._num_failed:,} of {self._num_written:,}"
        click.echo(f"shmllm: {counts} rows failed; {self._plan.about_failures}", err=True)
        return EXIT_FAILED

    def report_interruption(self) -> None:
        """Tells the user how many records exist, and how to continue the job."""
        if self._plan.target == STANDARD_STREAM:
            return
        total = "" if self._num_rows is None else f" of {self._num_rows:,}"
        hint = "; the same command with --resume continues" if self._plan.rows.is_file else ""
        click.echo(f"{self._num_written:,}{total} rows are in {self._plan.path}{hint}", err=True)


def run_plan(plan: BatchPlan, session: CommandSession, work_on: WorkOn) -> int:
    """Runs a plan and returns the exit code.

    Args:
        plan: the plan.
        session: starts the engine or attaches to it.
        work_on: makes the work for an engine.
    """
    with BatchRun.open(plan) as batch:
        rows = batch.rows_left()
        if rows is None:
            batch.report_empty_shard()
            batch.begin()
            return batch.finish()
        with session.open() as llm:
            session.describe_engine(llm)
            work = work_on(llm)
            batch.begin()
            try:
                num_lost = batch.run(rows, work)
            except BaseException:
                batch.report_interruption()
                raise
        if not num_lost:
            return batch.finish()
        rows_have = "1 row has" if num_lost == 1 else f"{num_lost:,} rows have"
        click.echo(f"shmllm: {WHY_ABORTED}; {rows_have} no record", err=True)
        batch.report_interruption()
        return EXIT_ENGINE_ENDED
