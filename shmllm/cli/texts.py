"""What commands that read texts without completing them share: their input and their calls."""

from __future__ import annotations

import sys

import click

from shmllm.batch.embeddings import TextFormat, parse_text
from shmllm.batch.rows import Rows, parse_object
from shmllm.batch.sources import STANDARD_STREAM
from shmllm.cli.batch_plan import look_at, rows_of

SHORT_TEXT = "a"
"""A text that every model can read: a call that refuses it refuses its options."""
WITHOUT_ROWS = "the input holds no text"
_PLAIN_NAMES = (".txt", ".txt.gz")

input_option = click.option(
    "-i",
    "--input",
    "source",
    metavar="FILE",
    default=STANDARD_STREAM,
    help="Input: JSON lines, .parquet, or one text per line; .gz is decompressed.  "
    "[default: stdin]",
)


def read_rows(source: str, form: TextFormat) -> Rows:
    """The rows of an input.

    Args:
        source: its path; "-" for stdin.
        form: makes its rows.

    Raises:
        click.UsageError: the input is a terminal, or cannot be read.
        RequestError: it is no parquet file, although it has the name of one, or pyarrow is missing.
    """
    if source == STANDARD_STREAM and sys.stdin.isatty():
        raise click.UsageError("no texts; give a file as --input, or pipe them")
    # A quoted line of plain text is not a JSON string.
    parse = parse_object if source.endswith(_PLAIN_NAMES) else parse_text
    return rows_of(look_at(source, parse), form, parse)
