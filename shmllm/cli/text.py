"""`shmllm generate` with text output: one completion as a stream, or several as a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO

import click

from shmllm.cli.prompts import InputPrompt
from shmllm.cli.sampling import DEFAULTS
from shmllm.cli.session import CommandSession

if TYPE_CHECKING:
    from shmllm.frontend.input_processor import PreparedRequest
    from shmllm.frontend.llm import LLM
    from shmllm.frontend.request_state import RequestState

SEPARATOR = "---"


def run_text(
    inputs: list[InputPrompt],
    sampling: dict[str, Any],
    target: str | None,
    echo: bool,
    session: CommandSession,
) -> int:
    """Completes prompts and returns the exit code.

    Args:
        inputs: the prompts.
        sampling: the sampling parameters from the command line.
        target: the file to write to; None or "-" is stdout.
        echo: whether to write the prompts too.
        session: starts the engine or attaches to it.
    """
    with session.open() as llm:
        requests = prepare(llm, inputs, sampling)
        with open_target(target) as out:
            session.describe_engine(llm)
            if len(requests) == 1:
                return stream(llm, requests[0], out, echo)
            return batch(llm, requests, out, echo)


def open_target(target: str | None) -> Any:
    """Opens the output. Call it after all prompts are checked: it truncates an existing file."""
    if target is None or target == "-":
        return click.open_file("-", "w", encoding="utf-8")
    return open(target, "w", encoding="utf-8")


def prepare(llm: LLM, inputs: list[InputPrompt], sampling: dict[str, Any]) -> list[PreparedRequest]:
    """Checks and tokenizes the prompts; the model's defaults apply to parameters not given."""
    from shmllm.params.sampling import SamplingParams

    params = SamplingParams(**(DEFAULTS | llm.model_defaults | sampling))
    prompts: list[Any] = [as_prompt(llm, item) for item in inputs]
    return llm.front_end.prepare(prompts, params, [item.origin for item in inputs])


def as_prompt(llm: LLM, item: InputPrompt) -> Any:
    """The prompt for the engine; the model's chat template turns messages into one."""
    from shmllm.errors import RequestError

    if not isinstance(item.content, list):
        return item.content
    try:
        return llm.front_end.chat_prompt(item.content)
    except RequestError as error:
        raise RequestError(f"{item.origin}: {error}") from error


def stream(llm: LLM, request: PreparedRequest, out: TextIO, echo: bool) -> int:
    """Writes the text of one request as it is generated; returns the exit code."""
    if echo:
        out.write(request.prompt or "")
    text, error = "", None
    for changed in llm.front_end.serve([request], streaming=True):
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


def batch(llm: LLM, requests: list[PreparedRequest], out: TextIO, echo: bool) -> int:
    """Writes the texts of a batch in the order of the prompts; returns the exit code.

    Each text is written as soon as it and all texts before it are complete.
    """
    from shmllm.frontend.progress import BatchProgress

    waiting: dict[int, RequestState] = {}
    num_written = num_failed = 0
    with BatchProgress(len(requests), enabled=True) as progress:
        for changed in llm.front_end.serve(requests):
            progress.update(changed)
            waiting |= {state.index: state for state in changed if state.finish_reason}
            while num_written in waiting:
                state = waiting.pop(num_written)
                num_failed += state.error is not None
                write_text(state, out, echo, is_first=num_written == 0)
                num_written += 1
    if num_failed:
        click.echo(f"shmllm: {num_failed} of {len(requests)} requests failed", err=True)
    return 1 if num_failed else 0


def write_text(state: RequestState, out: TextIO, echo: bool, is_first: bool) -> None:
    """Writes one completion, after a separator line if it is not the first."""
    prompt = state.request.prompt or "" if echo else ""
    text = f"error: {state.error}" if state.error else prompt + state.text.text
    out.write(("" if is_first else f"{SEPARATOR}\n") + text.rstrip("\n") + "\n")
