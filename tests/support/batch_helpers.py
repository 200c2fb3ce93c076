"""A stream of results without an engine, and rows to run over it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shmllm.batch.job import BatchJob
from shmllm.batch.native import NativeFormat
from shmllm.batch.output import Mode, RecordFile
from shmllm.batch.parameters import make_params
from shmllm.batch.resume import DoneLines
from shmllm.batch.rows import AnyFormat, Row, Rows
from shmllm.batch.sources import JsonRows, LineInput
from shmllm.cli.batch import Completion
from shmllm.outputs.request import CompletionOutput, RequestOutput

IN_FLIGHT = 8


def answer(prompt: Any, **changes: Any) -> RequestOutput:
    """What the stand-in model makes of a prompt: the text backwards."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    completion = CompletionOutput(0, text[::-1], [ord(c) for c in text], finish_reason="stop")
    values = {"num_cached_tokens": 0, "error": None} | changes
    return RequestOutput("", text, list(range(len(text))), None, [completion], True, **values)


class FakeStream:
    """Pauses some requests and ends them in random order, or in theirs.

    Attributes:
        most_open: the most requests that it held at once.
    """

    def __init__(
        self, *, ordered: bool = False, seed: int = 0, errors: Iterable[str] = (), die_at: int = -1
    ) -> None:
        self.most_open = 0
        self._ordered = ordered
        self._rng = random.Random(seed)
        self._errors = set(errors)
        self._die_at = die_at

    def __call__(self, requests: Iterator[Completion]) -> Iterator[tuple[int, RequestOutput]]:
        held: list[tuple[int, Any]] = []
        source = enumerate(requests)
        while True:
            for place, (prompt, _, _) in source:
                held.append((place, prompt))
                if len(held) == IN_FLIGHT:
                    break
            if not held:
                return
            self.most_open = max(self.most_open, len(held))
            place, prompt = held.pop(0 if self._ordered else self._rng.randrange(len(held)))
            self._die_at -= 1
            if self._die_at == -1:
                raise ConnectionError("the stream died")
            error = "refused" if prompt in self._errors else None
            yield place, answer(prompt, error=error)


def prepare(row: Row) -> Completion:
    return row.prompt, make_params({"max_tokens": 8}, row.sampling), None


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Rows as JSON lines; text as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def json_rows(path: Path, form: AnyFormat | None = None) -> JsonRows:
    return JsonRows(LineInput(str(path)), form or NativeFormat())


def run_job(
    rows: Rows,
    target: Path,
    stream: FakeStream | None = None,
    *,
    form: AnyFormat | None = None,
    mode: Mode = Mode.NEW,
    ordered: bool = False,
) -> BatchJob[Completion, RequestOutput]:
    """What the command does, without the command."""
    form = form or NativeFormat()
    done = DoneLines(rows.count()[1])
    if mode is Mode.RESUME and target.exists():
        done.read(str(target), form)
        done.check(rows, form)
    file = RecordFile(str(target), mode)
    try:
        file.begin(done.num_bytes)
        job: BatchJob[Completion, RequestOutput] = BatchJob(form, file, prepare, ordered=ordered)
        job.run((r for r in rows if r.line not in done), stream or FakeStream(ordered=ordered))
        return job
    finally:
        file.close()


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]
