"""`shmllm embed`: the vectors of a file of texts, or of images."""

from __future__ import annotations

from typing import Any

import click

from shmllm.cli import drafts
from shmllm.cli.interrupts import interruptible
from shmllm.cli.items import FLAGS, folder_option, take_folder
from shmllm.cli.options import (
    engine_options,
    metrics_port_option,
    refuse_options,
    take_engine_options,
)
from shmllm.cli.session import CommandSession
from shmllm.cli.shard import shard_option
from shmllm.cli.streams import check_stdout
from shmllm.cli.texts import input_option

EPILOG = """\b
Examples:
  shmllm embed -m ./my-encoder -i texts.jsonl -o vectors.parquet
  shmllm embed -m ./my-encoder -i texts.jsonl -o vectors.parquet --resume
  shmllm embed -m ./my-encoder -i texts.txt -o vectors.npy --dimensions 256
  shmllm embed --attach main -i queries.jsonl --prompt-name query > vectors.jsonl
  shmllm embed -m ./my-clip --image cat.png --image dog.png -o images.npy

\b
Input: JSON lines (or .parquet, or either compressed as .gz). A line is a string, or an
  object that holds `text` or `prompt`, and may hold `id`, and `images` beside a text or
  instead of one: a list of data URLs, or paths below the folder of
  --allowed-local-media-path. Other fields are copied to the output. In a file of plain
  lines each line is a text. With --image each image is a row, whose record holds `image`.
Output, in the order of the input:
  .jsonl    a line holds `id` if the input has one, `line` (from 1), `embedding` and
            `num_prompt_tokens`, or instead of these `error`; then the other fields
            The `embedding` of a model of sparse vectors (SPLADE) holds `indices`, the ids of
            tokens, and `values`
  .parquet  the same as columns; `embedding` is a list of float32 with a fixed size
  .npy      an array of float32 of shape (texts, numbers). The row of a text that failed
            consists of NaN, and stderr has its error

\b
  A text that cannot be embedded does not end the others. --resume adds what is missing
  after an interrupted run, in --output or in the journal beside .parquet and .npy.

\b
Exit codes: 0 done, 1 some texts failed, 2 usage or environment, 3 the engine died, or
aborted or refused requests, 130 interrupted, 143 terminated.
"""


@click.command(epilog=EPILOG)
@input_option
@click.option(
    "-o",
    "--output",
    "target",
    metavar="FILE",
    default="-",
    help="Output: JSON lines (.jsonl), .parquet or .npy.  [default: stdout]",
)
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
@click.option("--overwrite", is_flag=True, help="Replace the vectors of an earlier run.")
@shard_option
@click.option(
    FLAGS["image"],
    "image",
    multiple=True,
    metavar="FILE",
    help="Image to compute a vector of, in place of --input. May be given several times.",
)
@click.option("--text", metavar="TEXT", help="Text beside each --image, if the model reads both.")
@folder_option
@click.option(
    "--dimensions",
    type=click.IntRange(min=1),
    metavar="N",
    help="Only the first N numbers, for models that were trained for it.",
)
@click.option(
    "--pooling-type",
    metavar="TYPE",
    help="What vectors are made of, such as LAST, MEAN or CLS.  [default: the model's]",
)
@click.option("--no-normalize", is_flag=True, help="Keep the lengths of vectors.")
@click.option(
    "--prompt-name",
    metavar="NAME",
    help="The prompt of the model (of sentence-transformers) that precedes each text.",
)
@click.option(
    "--truncate-prompt-tokens",
    type=click.IntRange(min=-1),
    metavar="N",
    help="Cut texts to N tokens; -1 is the model's limit.",
)
@click.option("--attach", metavar="NAME", help="Use a running engine (shmllm engine start NAME).")
@metrics_port_option
@engine_options
def embed(**options: Any) -> int:
    """Compute a vector of each text of a file, or of each image."""
    with interruptible():
        return run(options)


def run(options: dict[str, Any]) -> int:
    """Runs the command; returns the exit code."""
    from shmllm.cli.embedding import make_plan, options_of_embed, run_embedding

    refuse_options([drafts.OPTION], "is for commands that generate")
    engine = take_engine_options(options)
    folder = take_folder(options)
    session = CommandSession(options["attach"], engine, options["metrics_port"], replies=folder)
    if options["target"] == "-":
        check_stdout()
    embedding = options_of_embed(options)
    return run_embedding(make_plan(options), embedding, session)
