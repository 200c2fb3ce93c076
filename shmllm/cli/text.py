"""`shmllm generate` with text output: one completion as a stream, or several as a batch."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, TextIO

import click

from shmllm.cli.adapters import only_adapter
from shmllm.cli.item_prompts import prompt_with_items
from shmllm.cli.outcome import TextOutcome
from shmllm.cli.prompts import InputPrompt
from shmllm.cli.sampling import completed
from shmllm.cli.session import CommandSession
from shmllm.cli.streams import is_on_screen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shmllm.cli.items import CommandItems
    from shmllm.frontend.input_processor import PreparedRequest
    from shmllm.frontend.items.ready import ReadyItem
    from shmllm.frontend.llm import LLM
    from shmllm.outputs.logprobs import Logprob
    from shmllm.outputs.request import CompletionOutput, RequestOutput

SEPARATOR = "---"


def run_text(
    inputs: list[InputPrompt],
    sampling: dict[str, Any],
    target: str | None,
    echo: bool,
    session: CommandSession,
    chat_template: str | None = None,
    items: CommandItems | None = None,
) -> int:
    """Completes prompts and returns the exit code.

    Args:
        inputs: the prompts.
        sampling: the sampling parameters from the command line.
        target: the file to write to; None or "-" is stdout.
        echo: whether to write the prompts too.
        session: starts the engine or attaches to it.
        chat_template: the source of the chat template; None for the model's.
        items: the items of each prompt; None for none.
    """
    from shmllm.frontend.priorities import set_priorities
    from shmllm.params.sampling import SamplingParams

    adapter = only_adapter(session.adapters)
    with session.open() as llm:
        params = SamplingParams(**completed(llm.model_defaults, sampling))
        ready = items.ready(llm) if items else []
        prompts: list[Any] = [as_prompt(llm, item, chat_template, ready) for item in inputs]
        names = [item.origin for item in inputs]
        requests = llm.front_end.prepare(prompts, params, names)
        llm.front_end.add_adapters(llm.front_end.adapters.set(requests, adapter))
        set_priorities(requests, session.priority, llm.facts)
        outcome = TextOutcome(params, llm.facts.max_model_len)
        with open_target(target) as out:
            session.describe_engine(llm)
            if len(requests) == params.n == 1:
                stream(llm, requests[0], out, echo, outcome)
            else:
                batch(llm, requests, out, echo, outcome)
        return outcome.report()


def open_target(target: str | None) -> Any:
    """Opens the output. Call it after all prompts are checked: it truncates an existing file."""
    if target is None or target == "-":
        return click.open_file("-", "w", encoding="utf-8")
    return open(target, "w", encoding="utf-8")


def as_prompt(
    llm: LLM, item: InputPrompt, chat_template: str | None, items: Sequence[ReadyItem] = ()
) -> Any:
    """The prompt for the engine, with these items; the chat template turns messages into one."""
    from shmllm.errors import RequestError

    try:
        if items:
            return prompt_with_items(
                llm.front_end, item.content, items, chat_template=chat_template
            )
        if isinstance(item.content, list):
            return llm.front_end.chat_prompt(item.content, chat_template=chat_template)
        return item.content
    except RequestError as error:
        raise RequestError(f"{item.origin}: {error}") from error


def stream(
    llm: LLM, request: PreparedRequest, out: TextIO, echo: bool, outcome: TextOutcome
) -> None:
    """Writes the text of one request as it is generated."""
    from shmllm.frontend.request_outputs import request_output

    if echo:
        out.write(_echo(request.encoder_prompt, request.prompt))
    text = ""
    output: RequestOutput | None = None
    for changed in llm.front_end.serve([request], streaming=True):
        for state in changed:
            if state.is_retryable:
                state.raise_error()
            delta = state.text.take_delta()
            if delta:
                text = delta
                out.write(delta)
                out.flush()
            if state.ends_request:
                output = request_output(state)
    if not text.endswith("\n"):
        out.write("\n")
    assert output is not None
    write_logprobs(output.outputs[0], out)
    out.flush()
    if output.error is not None:
        click.echo(f"shmllm: {output.error}", err=True)
    outcome.add(output)


def batch(
    llm: LLM, requests: list[PreparedRequest], out: TextIO, echo: bool, outcome: TextOutcome
) -> None:
    """Writes the texts of a batch in the order of the prompts.

    The texts of a prompt are written as soon as they and all texts before them are complete.
    """
    from shmllm.frontend.progress import BatchProgress
    from shmllm.frontend.request_outputs import request_output

    waiting: dict[int, RequestOutput] = {}
    num_written = 0
    is_live = not (out.isatty() and is_on_screen())
    with (
        BatchProgress(len(requests), True, is_live=is_live) as progress,
        contextlib.closing(llm.front_end.run_each(requests, False)) as ended,
    ):
        for state in ended:
            waiting[state.index] = request_output(state)
            progress.finish(waiting[state.index])
            while num_written in waiting:
                output = waiting.pop(num_written)
                if num_written:
                    out.write(f"{SEPARATOR}\n")
                write_texts(output, out, echo)
                outcome.add(output)
                num_written += 1
    out.flush()


def write_texts(output: RequestOutput, out: TextIO, echo: bool) -> None:
    """Writes the completions of a prompt, each after a line with its number if there are several.

    A request that failed has its error in place of them.
    """
    if output.error is not None:
        out.write(f"error: {output.error}\n")
        return
    prompt = _echo(output.encoder_prompt, output.prompt) if echo else ""
    for one in output.outputs:
        if len(output.outputs) > 1:
            out.write(f"[{one.index + 1} of {len(output.outputs)}]\n")
        out.write((prompt + one.text).rstrip("\n") + "\n")
        write_logprobs(one, out)


def _echo(encoder_prompt: str | None, prompt: str | None) -> str:
    """What stands before a completion: what an encoder has read is a line of its own."""
    return (f"{encoder_prompt}\n" if encoder_prompt is not None else "") + (prompt or "")


def write_logprobs(completion: CompletionOutput, out: TextIO) -> None:
    """Writes a table of the log-probabilities, one token a line, if they were asked for."""
    if completion.logprobs is not None and completion.token_ids:
        out.write("\n" + logprob_table(completion.logprobs))


def logprob_table(positions: Iterable[Mapping[int, Logprob]]) -> str:
    """A line for each position: the token, its log-probability, and the alternatives."""
    rows = [("token", "logprob", "alternatives")]
    for position in positions:
        chosen, *others = position.values()
        shown = "  ".join(f"{_quoted(one)} {one.logprob:.3f}" for one in others)
        rows.append((_quoted(chosen), f"{chosen.logprob:.3f}", shown))
    width = max(len(row[0]) for row in rows)
    return "".join(f"{t:<{width}}  {p:>8}  {others}".rstrip() + "\n" for t, p, others in rows)


def _quoted(entry: Logprob) -> str:
    """The text of a token on one line, in quotation marks."""
    return json.dumps(entry.decoded_token or "", ensure_ascii=False)
