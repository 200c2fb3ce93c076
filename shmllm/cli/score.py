"""`shmllm score`: the documents of a file, ranked by their scores for a query."""

from __future__ import annotations

from typing import Any

import click

from shmllm.cli import drafts
from shmllm.cli.interrupts import interruptible
from shmllm.cli.options import (
    engine_options,
    metrics_port_option,
    refuse_options,
    take_engine_options,
)
from shmllm.cli.session import CommandSession
from shmllm.cli.streams import check_stdout
from shmllm.cli.texts import input_option

EPILOG = """\b
Examples:
  shmllm score -m ./my-reranker "How do I reverse a list?" -i documents.jsonl --top 10
  shmllm score --attach main "reverse a list" -i documents.txt -o ranked.jsonl
  cat documents.jsonl | shmllm score -m ./my-encoder "reverse a list" --json

\b
The score is what `LLM.score` computes with the model. The best document comes first, and of
equal ones that of the first line.

\b
Input: JSON lines (or .parquet, or either compressed as .gz). A line is a string, or an
  object that holds `text` or `prompt`, and may hold `id`. In a file of plain lines each
  line is a document.
JSON: a line holds `rank` (from 1), `id` if the input has one, `line` (from 1), `score`,
  `text` and the other fields of the input.
A document that cannot be scored does not end the others; stderr has its error.

\b
Exit codes: 0 done, 1 some documents failed, 2 usage or environment, 3 the engine died,
or aborted or refused requests, 130 interrupted, 143 terminated.
"""


@click.command(epilog=EPILOG)
@click.argument("query")
@input_option
@click.option("--top", type=click.IntRange(min=1), metavar="N", help="Only the N best documents.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.option("-o", "--output", "target", metavar="FILE", help="Write JSON lines to a file.")
@click.option("--overwrite", is_flag=True, help="Replace the content of --output.")
@click.option("--attach", metavar="NAME", help="Use a running engine (shmllm engine start NAME).")
@metrics_port_option
@engine_options
def score(query: str, **options: Any) -> int:
    """Rank the documents of a file by their scores for QUERY."""
    with interruptible():
        return run(query, options)


def run(query: str, options: dict[str, Any]) -> int:
    """Runs the command; returns the exit code."""
    from shmllm.cli.scoring import run_scoring

    refuse_options([drafts.OPTION], "is for commands that generate")
    engine = take_engine_options(options)
    session = CommandSession(options["attach"], engine, options["metrics_port"])
    target = options["target"] or ("-" if options["as_json"] else None)
    if target in (None, "-"):
        check_stdout()
    return run_scoring(
        query, options["source"], target, options["top"], options["overwrite"], session
    )
