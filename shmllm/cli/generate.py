"""`shmllm generate`: completes one prompt as a stream, several as text, or a file as records."""

from __future__ import annotations

from typing import Any

import click

from shmllm.cli.adapters import lora_option
from shmllm.cli.interrupts import interruptible
from shmllm.cli.items import CommandItems, folder_option, item_options, take_folder
from shmllm.cli.options import engine_options, metrics_port_option, take_engine_options
from shmllm.cli.prompts import (
    as_chat,
    chat_template_option,
    for_encoder,
    read_prompts,
    reply_options,
    take_reply_options,
)
from shmllm.cli.sampling import sampling_options, take_sampling, text_sampling_options
from shmllm.cli.session import CommandSession
from shmllm.cli.shard import shard_option
from shmllm.cli.streams import check_stdout

EPILOG = """\b
Examples:
  shmllm generate "def fibonacci(n):"
  shmllm generate "import os" "import sys" --max-tokens 32
  echo "class Stack:" | shmllm generate --stop "class"
  shmllm generate -m ./my-model --chat --system "Be brief." "Why is the sky blue?"
  shmllm generate -m ./my-model --image cat.png "What is this?"
  shmllm generate "import os" -n 3 --temperature 0.8
  shmllm generate "A date: " --regex "[0-9]{4}-[0-9]{2}-[0-9]{2}"
  shmllm generate -i in.jsonl -o out.jsonl
  shmllm generate -i in.jsonl -o out.jsonl --resume
  shmllm generate -i in.jsonl -o out-3.jsonl --shard 3/8 --resume
  shmllm generate -i prompts.txt -o completions.jsonl
  shmllm generate -i in.parquet -o out.parquet
  shmllm generate -i requests.jsonl -o responses.jsonl --openai-batch
  shmllm generate -m ./my-model --lora sql=./adapters/sql "SELECT"

\b
Files of JSON lines (or .parquet, or either compressed as .gz):
  A line of the input holds `prompt`, `messages` or `prompt_token_ids`, and may hold
  `id`, `images`, `audio`, `videos`, `decoder_prompt`, `cache_salt`, `lora` (the NAME of a
  --lora, or null for the base) and sampling parameters, such as `max_tokens`, by themselves
  or in the object `sampling_params`; they override options. `images`, `audio` and `videos` are
  lists of items for `prompt`: data URLs, or paths below the folder of
  --allowed-local-media-path. Other fields are copied to the output.
  A line of the output holds `id` if the input has one, `line` (from 1), `text`,
  `finish_reason`, `num_prompt_tokens`, `num_output_tokens`, `num_cached_tokens`, or
  instead of these `error`; then the other fields. Each line is written as soon as its
  request has finished.
  An invalid line becomes a record with `error`; the other lines still run. A line whose
  request the engine aborted gets no record, and the exit code is 3.
  --resume adds the missing records after an interrupted run; it does not repeat lines
  whose record has an `error`.
  A row without a seed has that of its line number, and --shard K/N keeps line numbers:
  the records of the N shards, each with its own output, are those of one run.

\b
Exit codes: 0 done, 1 some rows failed, 2 usage or environment, 3 the engine died, or
aborted or refused requests, 130 interrupted, 143 terminated.
"""


@click.command(epilog=EPILOG)
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@sampling_options
@text_sampling_options
@click.option("--chat", is_flag=True, help="Treat each prompt as a user message of a chat.")
@click.option("--system", help="System message; implies --chat.")
@chat_template_option
@reply_options
@click.option(
    "--decoder-prompt",
    metavar="TEXT",
    help="What the decoder of an encoder-decoder begins with, such as a language.  "
    "[default: the model's]",
)
@item_options
@folder_option
@click.option("--echo", is_flag=True, help="Write the prompt before its completion.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object per line.")
@click.option(
    "-i",
    "--input",
    "source",
    metavar="FILE",
    help="Input: JSON lines, .parquet, or one prompt per line; .gz is decompressed, - is stdin.",
)
@click.option(
    "-o",
    "--output",
    "target",
    metavar="FILE",
    help="Output: text, JSON lines (.jsonl) or .parquet.  [default: stdout]",
)
@click.option("--ordered", is_flag=True, help="Write records in the order of the input.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
@click.option("--overwrite", is_flag=True, help="Replace the output of an earlier run.")
@shard_option
@click.option("--token-ids", is_flag=True, help="Add the output's token ids to the records.")
@click.option("--openai-batch", is_flag=True, help="Read and write OpenAI's batch files.")
@click.option("--attach", metavar="NAME", help="Use a running engine (shmllm engine start NAME).")
@click.option(
    "--priority",
    type=click.IntRange(-(2**31), 2**31 - 1),
    metavar="N",
    help="Run before requests of higher numbers; needs --scheduling-policy priority.",
)
@lora_option
@metrics_port_option
@engine_options
def generate(prompts: tuple[str, ...], **options: Any) -> int:
    """Complete PROMPTs with a model.

    A single prompt is streamed; several prompts run as one batch with a progress bar. Text goes to
    stdout, everything else to stderr. Without PROMPT and --input, the prompt is read from stdin;
    with --chat or --system on a terminal, `shmllm chat` begins.
    """
    with interruptible():
        return run(prompts, options)


def run(prompts: tuple[str, ...], options: dict[str, Any]) -> int:
    """Runs the command, with text or records as output; returns the exit code."""
    from shmllm.cli.batch_plan import look_at
    from shmllm.cli.plan import wants_records

    source, target = options["source"], options["target"]
    if prompts and source is not None:
        raise click.UsageError("give prompts as arguments or with --input, not both")
    items = CommandItems.take(options)
    engine, adapters = take_engine_options(options), options["adapters"]
    session = CommandSession(
        options["attach"],
        engine,
        options["metrics_port"],
        options["priority"],
        adapters,
        take_reply_options(options) | take_folder(options),
    )
    sampling = take_sampling(options)
    options["chat"] |= options["system"] is not None or options["chat_template"] is not None
    if options["chat"] and options["decoder_prompt"] is not None:
        raise click.UsageError("--decoder-prompt cannot be used with chats")
    if target in (None, "-"):
        check_stdout()
    found = None if source is None else look_at(source)
    items.check_input(None if found is None else found.kind, options["openai_batch"])
    items.check_model(session)
    if not prompts and not items and _asks_for_chat(options, sampling):
        from shmllm.cli.chat.command import is_interactive, run_chat
        from shmllm.cli.chat.conversation import Conversation

        if is_interactive():
            opening = Conversation.with_system(options["system"])
            return run_chat(session, sampling, opening, options["chat_template"])

    if wants_records(found, options):
        from shmllm.cli.batch import run_batch
        from shmllm.cli.plan import make_plan

        texts = [] if found is not None else [str(p.content) for p in read_prompts(prompts)]
        return run_batch(make_plan(found, texts, options), sampling, session, items)
    from shmllm.cli.text import run_text

    _check_text_target(target, source, options["overwrite"])
    inputs = read_prompts(prompts, None if found is None else found.lines)
    if options["chat"]:
        inputs = [as_chat(item, options["system"]) for item in inputs]
    if options["decoder_prompt"] is not None:
        inputs = [for_encoder(item, options["decoder_prompt"]) for item in inputs]
    template = options["chat_template"]
    return run_text(inputs, sampling, target, options["echo"], session, template, items)


def _check_text_target(target: str | None, source: str | None, overwrite: bool) -> None:
    """Raises click.UsageError or RequestError if texts cannot be written to a file."""
    from shmllm.cli.batch_plan import check_is_new, check_is_other

    if target is not None and target != "-":
        check_is_other(target, None if source == "-" else source)
        check_is_new(target, overwrite)


def _asks_for_chat(options: dict[str, Any], sampling: dict[str, Any]) -> bool:
    """Whether the options are for a chat, and none is for something that a chat does not have."""
    from shmllm.cli.plan import wants_records

    has_files = options["source"] is not None or options["target"] is not None
    has_others = sampling.keys() & {"n", "logprobs"} or options["priority"] is not None
    has_others = has_others or options["adapters"]
    return options["chat"] and not (has_files or has_others or wants_records(None, options))
