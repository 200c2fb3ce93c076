"""`shmllm generate`: one prompt streamed to the terminal, several as text, files as records."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import click

from shmllm.cli.interrupts import interruptible
from shmllm.cli.options import engine_options, metrics_port_option, take_engine_options
from shmllm.cli.prompts import as_chat, read_prompts
from shmllm.cli.session import CommandSession

DEFAULT_MAX_TOKENS = 128
SAMPLING_NAMES = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "ignore_eos",
    "logprobs",
)

EPILOG = """\b
Examples:
  shmllm generate "def fibonacci(n):"
  shmllm generate "import os" "import sys" --max-tokens 32
  echo "class Stack:" | shmllm generate --stop "class"
  shmllm generate -m ./my-model --chat --system "Be brief." "Why is the sky blue?"
  shmllm generate -i in.jsonl -o out.jsonl
  shmllm generate -i in.jsonl -o out.jsonl --resume
  shmllm generate -i prompts.txt -o completions.jsonl
  shmllm generate -i in.parquet -o out.parquet
  shmllm generate -i requests.jsonl -o responses.jsonl --openai-batch

\b
Files of JSON lines (or .parquet, or either compressed as .gz):
  A line of the input holds `prompt`, `messages` or `prompt_token_ids`, and may hold
  `id`, `sampling_params` (an object) and `cache_salt`. Other fields come back.
  A line of the output holds `id` if one was given, `line` (from 1), `text`,
  `finish_reason`, `num_prompt_tokens`, `num_output_tokens`, `num_cached_tokens`, or
  instead of these `error`; then the other fields. Each is written as it is finished.
  A bad line becomes a record with `error`, and the rest goes on.
  After any end, --resume adds the records that are missing; lines with an `error`
  are done.

\b
Exit codes: 0 done, 1 some rows failed, 2 usage or environment, 3 the engine died,
130 interrupted, 143 terminated.
"""


@click.command(epilog=EPILOG)
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@click.option("--max-tokens", type=int, help=f"[default: {DEFAULT_MAX_TOKENS}]")
@click.option("--temperature", type=float, help="0 is greedy.  [default: the model's, else 0]")
@click.option("--top-p", type=float)
@click.option("--top-k", type=int)
@click.option("--min-p", type=float)
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option("--stop", multiple=True, help="End at this text. Can be given several times.")
@click.option("--ignore-eos", is_flag=True, default=None, help="Go on after the end of sequence.")
@click.option("--chat", is_flag=True, help="Prompts are messages of a user.")
@click.option("--system", help="System message; implies --chat.")
@click.option("--echo", is_flag=True, help="Write the prompt before its completion.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option(
    "-i",
    "--input",
    "source",
    metavar="FILE",
    help="JSON lines, .parquet, or one prompt a line; .gz is decompressed. - is stdin.",
)
@click.option(
    "-o",
    "--output",
    "target",
    metavar="FILE",
    help="Write here; JSON lines if the name ends in .jsonl, or .parquet.",
)
@click.option("--ordered", is_flag=True, help="Records in the order of the input.")
@click.option("--resume", is_flag=True, help="Go on where an earlier run ended.")
@click.option("--overwrite", is_flag=True, help="Drop the records of an earlier run.")
@click.option("--token-ids", is_flag=True, help="Records hold the output's token ids.")
@click.option("--logprobs", type=int, help="Records hold the logprobs of this many tokens.")
@click.option("--openai-batch", is_flag=True, help="OpenAI's batch files in and out.")
@click.option("--attach", metavar="NAME", help="Use a running engine (shmllm engine start NAME).")
@metrics_port_option
@engine_options
def generate(prompts: tuple[str, ...], **options: Any) -> int:
    """Complete PROMPTs with a model.

    A single prompt is streamed as it is generated; several run as one batch with a
    progress bar. Text goes to stdout, everything else to stderr. Without PROMPT and
    --input, stdin is the prompt.
    """
    with interruptible():
        return run(prompts, options)


def run(prompts: tuple[str, ...], options: dict[str, Any]) -> int:
    """Text for people, or records for programs."""
    from shmllm.cli.plan import look_at, wants_records

    source, target = options["source"], options["target"]
    if prompts and source is not None:
        raise click.UsageError("give prompts as arguments or with --input, not both")
    engine = take_engine_options(options)
    session = CommandSession(options["attach"], engine, options["metrics_port"])
    sampling = take_sampling(options)
    found = None if source is None else look_at(source)

    with quiet_closed_pipe():
        if wants_records(found, options):
            from shmllm.cli.batch import run_batch
            from shmllm.cli.plan import make_plan

            texts = [] if found is not None else [str(p.content) for p in read_prompts(prompts)]
            return run_batch(make_plan(found, texts, options), sampling, session)
        from shmllm.cli.text import run_text

        inputs = read_prompts(prompts, None if found is None else found.lines)
        if options["chat"] or options["system"] is not None:
            inputs = [as_chat(item, options["system"]) for item in inputs]
        return run_text(inputs, sampling, target, options["echo"], session)
    return 0


def take_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters; bad ones are known before the engine starts."""
    from shmllm.params.sampling import SamplingParams

    sampling = {n: options[n] for n in SAMPLING_NAMES if options[n] is not None}
    sampling |= {"stop": list(options["stop"])} if options["stop"] else {}
    SamplingParams(**sampling)
    return sampling


@contextlib.contextmanager
def quiet_closed_pipe() -> Iterator[None]:
    """A reader that has seen enough (`| head`) is no error."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
