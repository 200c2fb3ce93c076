"""Runs `shmllm score`: scores the documents of an input and writes the best."""

from __future__ import annotations

import re
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import click

from shmllm.batch.output import Mode, RecordFile
from shmllm.batch.pieces import Refused, run_in_pieces
from shmllm.batch.ranking import Ranking, ScoreFormat
from shmllm.batch.rows import JsonObject, Row, Rows, encode
from shmllm.cli.batch_plan import NPY, PARQUET, check_is_new, check_output
from shmllm.cli.listing import print_records
from shmllm.cli.outcome import EXIT_ENGINE_ENDED, EXIT_FAILED, WHY_ABORTED
from shmllm.cli.session import CommandSession
from shmllm.cli.texts import SHORT_TEXT, WITHOUT_ROWS, read_rows
from shmllm.errors import EnginePausedError, RequestError

if TYPE_CHECKING:
    from shmllm.frontend.llm import LLM
    from shmllm.outputs.pooling import ScoringRequestOutput

_QUERY = re.compile("^prompt 0 ")
_DOCUMENT = re.compile("^prompt 1 ")


def run_scoring(
    query: str,
    source: str,
    target: str | None,
    most: int | None,
    overwrite: bool,
    session: CommandSession,
) -> int:
    """Scores documents and writes the best; returns the exit code.

    Args:
        query: what the documents are compared with.
        source: the path of the documents; "-" for stdin.
        target: the path of a file for JSON lines, "-" for stdout; None prints a table.
        most: how many documents to write; None for all.
        overwrite: whether the file may have a content.
        session: starts the engine or attaches to it.
    """
    form = ScoreFormat()
    rows = read_rows(source, form)
    num_rows, _ = rows.count()
    if num_rows == 0:
        raise click.UsageError(WITHOUT_ROWS)
    with open_target(target, rows, overwrite) as file:
        found = iter(rows)
        first = next(found, None)
        if first is None:
            raise click.UsageError(WITHOUT_ROWS)
        scoring = Scoring(query, Ranking(most), form)
        with session.open() as llm:
            session.describe_engine(llm)
            scoring.run(llm, chain([first], found), num_rows)
        best = scoring.ranking.best_first()
        if file is None:
            print_table(best)
        else:
            write(best, file)
        return scoring.report()


class Scoring:
    """Scores documents, and keeps the best.

    Args:
        query: what they are compared with.
        ranking: keeps their records.
        form: makes their records.
    """

    def __init__(self, query: str, ranking: Ranking, form: ScoreFormat) -> None:
        self.ranking = ranking
        self._query = query
        self._form = form
        self._num_rows = self._num_failed = self._num_lost = 0

    def run(self, llm: LLM, rows: Iterable[Row], num_rows: int | None) -> None:
        """Scores the documents of an input.

        Args:
            llm: the engine's front end.
            rows: the documents.
            num_rows: how many they are; None if it is unknown.

        Raises:
            RequestError: the model cannot read the query.
        """
        from shmllm.frontend.progress import TextProgress

        def call(texts: Sequence[str]) -> list[ScoringRequestOutput]:
            return llm.score(self._query, texts, use_tqdm=False)

        self._check_query(call)
        in_flight: deque[Row] = deque()
        with TextProgress(num_rows, True, label="scoring") as progress:
            texts = self._texts(rows, in_flight, progress.finish)
            for _, output in run_in_pieces(call, texts):
                self._finish(in_flight.popleft(), output)
                progress.finish(None if isinstance(output, Refused) else output)

    def report(self) -> int:
        """Says on stderr how many documents have no score; returns the exit code."""
        if self._num_failed:
            counts = f"{self._num_failed:,} of {self._num_rows:,}"
            click.echo(f"shmllm: {counts} documents failed", err=True)
        if self._num_lost:
            lost = f"{self._num_lost:,} of {self._num_rows:,}"
            click.echo(f"shmllm: {WHY_ABORTED}; {lost} documents were not scored", err=True)
            return EXIT_ENGINE_ENDED
        return EXIT_FAILED if self._num_failed else 0

    def _check_query(self, call: Callable[[Sequence[str]], Any]) -> None:
        try:
            call([SHORT_TEXT])
        except EnginePausedError:
            raise
        except RequestError as error:
            raise RequestError(_QUERY.sub("the query ", str(error))) from error

    def _texts(
        self, rows: Iterable[Row], in_flight: deque[Row], on_failure: Callable[[None], None]
    ) -> Iterator[str]:
        """The texts of the rows, which are put in flight, but for invalid ones."""
        for row in rows:
            self._num_rows += 1
            if row.error is None:
                in_flight.append(row)
                yield str(row.prompt)
            else:
                self._fail(row, row.error)
                on_failure(None)

    def _finish(self, row: Row, output: ScoringRequestOutput | Refused) -> None:
        if output.error is None:
            assert not isinstance(output, Refused)
            self.ranking.add(self._form.record(row, output.outputs.score))
        elif isinstance(output, Refused) or not output.is_aborted:
            self._fail(row, _DOCUMENT.sub("the document ", output.error))
        else:
            self._num_lost += 1

    def _fail(self, row: Row, message: str) -> None:
        self._num_failed += 1
        click.echo(f"shmllm: line {row.line:,}: {message}", err=True)


@contextmanager
def open_target(target: str | None, rows: Rows, overwrite: bool) -> Iterator[RecordFile | None]:
    """Claims the file for JSON lines, whose content stays until `write`.

    Args:
        target: its path; "-" is stdout, and None is no file.
        rows: the input, which must be another file.
        overwrite: whether the file may have a content.

    Raises:
        click.UsageError, RequestError: the file is not usable.
    """
    if target is None:
        yield None
        return
    check_output(target, rows)
    if target.endswith((PARQUET, NPY)):
        raise click.UsageError(f"{target}: scores are written as JSON lines")
    check_is_new(target, overwrite)
    file = RecordFile(target, Mode.OVERWRITE)
    try:
        yield file
    finally:
        file.close()


def write(best: list[JsonObject], file: RecordFile) -> None:
    """Writes records as JSON lines."""
    file.begin(0)
    for record in best:
        file.write(encode(record))
    file.sync()


def print_table(best: list[JsonObject]) -> None:
    """Prints records as a table, and shortens their texts if stdout is a terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for record in best:
        record["score"] = f"{record['score']:.4f}"
        record["text"] = " ".join(record["text"].split())[:width]
    name = "id" if all("id" in record for record in best) else "line"
    print_records(("rank", "score", name, "text"), best, shrinking=("text",))
