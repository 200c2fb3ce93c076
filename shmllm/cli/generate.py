"""`shmllm generate`: one prompt streamed to the terminal, or many as a batch."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

import click

from shmllm.cli.options import Status, engine_options, take_engine_options
from shmllm.cli.prompts import InputPrompt, read_prompts

if TYPE_CHECKING:
    from shmllm.frontend.input_processor import PreparedRequest
    from shmllm.frontend.llm import LLM
    from shmllm.frontend.request_state import RequestState

DEFAULT_MAX_TOKENS = 128
SEPARATOR = "---"
SAMPLING_NAMES = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos")

EXAMPLES = """\b
Examples:
  shmllm generate "def fibonacci(n):"
  shmllm generate "import os" "import sys" --max-tokens 32
  shmllm generate -i prompts.txt -o completions.jsonl
  echo "class Stack:" | shmllm generate --stop "class"
  shmllm generate -m ./my-model --chat --system "Be brief." "Why is the sky blue?"
"""


@click.command(epilog=EXAMPLES)
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
    type=click.File(encoding="utf-8"),
    help="One prompt a line, or JSON lines with `prompt` or `messages`. - is stdin.",
)
@click.option(
    "-o",
    "--output",
    "target",
    type=click.Path(dir_okay=False, writable=True),
    help="Write here; JSON lines if the name ends in .jsonl.",
)
@click.option("--attach", metavar="NAME", help="Use a running engine (shmllm engine start NAME).")
@engine_options
def generate(
    prompts: tuple[str, ...],
    source: TextIO | None,
    target: str | None,
    as_json: bool,
    echo: bool,
    chat: bool,
    system: str | None,
    attach: str | None,
    stop: tuple[str, ...],
    **options: Any,
) -> int:
    """Complete PROMPTs with a model.

    A single prompt is streamed as it is generated; several run as one batch with a
    progress bar. Text goes to stdout, everything else to stderr. Without PROMPT and
    --input, stdin is the prompt.
    """
    inputs = read_prompts(prompts, source, chat=chat or system is not None, system=system)
    engine = take_engine_options(options)
    sampling = {n: options[n] for n in SAMPLING_NAMES if options[n] is not None}
    sampling |= {"stop": list(stop)} if stop else {}
    check_sampling(sampling)
    as_json = as_json or (target or "").endswith(".jsonl")
    with start(engine) if attach is None else attach_to(attach, engine) as llm:
        requests = prepare(llm, inputs, sampling)
        with open_target(target) as out, quiet_closed_pipe():
            click.echo(describe(llm, attach or engine["model"]), err=True)
            if len(requests) == 1 and not as_json:
                return stream(llm, requests[0], out, echo)
            carried = [item.carried for item in inputs]
            return batch(llm, requests, carried, out, as_json, echo)


def check_sampling(sampling: dict[str, Any]) -> None:
    """Bad parameters are known before the engine starts."""
    from shmllm.sampling_params import SamplingParams

    SamplingParams(**sampling)


def open_target(target: str | None) -> Any:
    """Opened when all prompts are known to be good: an error before that loses no file."""
    if target is None or target == "-":
        return click.open_file("-", "w", encoding="utf-8")
    return open(target, "w", encoding="utf-8")


def start(engine: dict[str, Any]) -> LLM:
    """Start the engine; where stderr is a terminal it shows how that gets on."""
    from shmllm.frontend.llm import LLM

    status = Status()
    status.show(f"starting {engine['model']}")
    try:
        return LLM(**engine, on_load_progress=status.loading)
    finally:
        status.clear()


def describe(llm: LLM, name: str) -> str:
    """One line: what answers here."""
    facts = llm.facts
    return (
        f"{name}: {facts.num_parameters / 1e6:,.1f} M parameters, {facts.dtype}, "
        f"{facts.num_threads} threads, {facts.max_model_len:,} tokens of context, KV cache "
        f"{facts.kv_cache_bytes / 2**20:,.0f} MiB ({facts.num_blocks:,} blocks of "
        f"{facts.block_size})"
    )


@contextlib.contextmanager
def quiet_closed_pipe() -> Iterator[None]:
    """A reader that has seen enough (`| head`) is no error."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def attach_to(name: str, engine: dict[str, Any]) -> LLM:
    """Use a named engine; options that were for it to start with are an error now."""
    from shmllm.frontend.llm import LLM

    context = click.get_current_context()
    given = [
        option
        for option in (*engine, "prefix_caching")
        if context.get_parameter_source(option) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise click.UsageError(f"{flag} is for starting an engine; {name!r} runs already")
    return LLM.attach(name)


def prepare(llm: LLM, inputs: list[InputPrompt], sampling: dict[str, Any]) -> list[PreparedRequest]:
    from shmllm.sampling_params import SamplingParams

    defaults = {"temperature": 0.0, "max_tokens": DEFAULT_MAX_TOKENS}
    params = SamplingParams(**(defaults | llm.model_defaults | sampling))
    prompts: list[Any] = [as_prompt(llm, item) for item in inputs]
    return llm.prepare(prompts, params, [item.origin for item in inputs])


def as_prompt(llm: LLM, item: InputPrompt) -> Any:
    """Messages become a prompt by the model's chat template; the rest is one already."""
    from shmllm.errors import RequestError

    if not isinstance(item.content, list):
        return item.content
    try:
        return llm.chat_prompt(item.content)
    except RequestError as error:
        raise RequestError(f"{item.origin}: {error}") from error


def stream(llm: LLM, request: PreparedRequest, out: TextIO, echo: bool) -> int:
    if echo:
        out.write(request.prompt or "")
    text, error = "", None
    for changed in llm.serve([request], streaming=True):
        for state in changed:
            delta = state.text.take_delta()
            error = state.error
            if delta:
                text = delta
                out.write(delta)
                out.flush()
    if not text.endswith("\n"):
        out.write("\n")
    if error:
        click.echo(f"shmllm: {error}", err=True)
    return 1 if error else 0


def batch(
    llm: LLM,
    requests: list[PreparedRequest],
    carried: list[dict[str, Any]],
    out: TextIO,
    as_json: bool,
    echo: bool,
) -> int:
    """Results are written in the order of the prompts, each as soon as those before it are."""
    from shmllm.frontend.progress import BatchProgress

    waiting: dict[int, RequestState] = {}
    num_written = num_failed = 0
    with BatchProgress(len(requests), enabled=True) as progress:
        for changed in llm.serve(requests):
            progress.update(changed)
            waiting |= {state.index: state for state in changed if state.finish_reason}
            while num_written in waiting:
                state = waiting.pop(num_written)
                num_failed += state.error is not None
                if as_json:
                    write_json(state, carried[num_written], out)
                else:
                    write_text(state, out, echo, is_first=num_written == 0)
                num_written += 1
    if num_failed:
        click.echo(f"shmllm: {num_failed} of {len(requests)} requests failed", err=True)
    return 1 if num_failed else 0


def write_text(state: RequestState, out: TextIO, echo: bool, is_first: bool) -> None:
    """One completion, behind a separator line if it is not the first."""
    prompt = state.request.prompt or "" if echo else ""
    text = f"error: {state.error}" if state.error else prompt + state.text.text
    out.write(("" if is_first else f"{SEPARATOR}\n") + text.rstrip("\n") + "\n")


def write_json(state: RequestState, carried: dict[str, Any], out: TextIO) -> None:
    """One JSON line: the input's own further fields, then the result."""
    result = state.output()
    completion = result.outputs[0]
    said = {"text": completion.text} if result.error is None else {"error": result.error}
    record = carried | {
        "index": state.index,
        "prompt": result.prompt,
        **said,
        "finish_reason": completion.finish_reason,
        "num_prompt_tokens": len(result.prompt_token_ids),
        "num_output_tokens": len(completion.token_ids),
        "num_cached_tokens": result.num_cached_tokens,
    }
    out.write(json.dumps(record, ensure_ascii=False) + "\n")
    out.flush()
