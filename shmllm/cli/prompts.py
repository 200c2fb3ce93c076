"""Reads prompts as text from the command line, from a file of lines, or from a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shmllm.cli.sampling import CONSTRAINTS, read_text

if TYPE_CHECKING:
    from shmllm.batch.sources import LineInput
    from shmllm.frontend.replies.formats import ToolChoice

Command = TypeVar("Command", bound=Callable[..., Any])
Messages = list[dict[str, Any]]


def _read_template(context: click.Context, param: click.Parameter, path: str | None) -> str | None:
    """The template in the file at `path`, which is syntactically correct."""
    if path is None:
        return None
    from shmllm.errors import RequestError
    from shmllm.frontend.text.chat_template import check_template

    source = read_text(path, param, context)
    try:
        check_template(source)
    except RequestError as error:
        raise click.BadParameter(f"{path}: {error}", context, param) from error
    return source


chat_template_option = click.option(
    "--chat-template",
    metavar="FILE",
    callback=_read_template,
    help="Chat template in place of the model's; implies --chat.",
)


def _read_tools(
    context: click.Context, param: click.Parameter, path: str | None
) -> list[dict[str, Any]] | None:
    """The tools in the file at `path`."""
    if path is None:
        return None
    try:
        tools = json.loads(read_text(path, param, context))
    except ValueError as error:
        raise click.BadParameter(f"{path} is not JSON: {error}", context, param) from error
    if not isinstance(tools, list) or not tools or not all(map(_is_tool, tools)):
        raise click.BadParameter(
            f'{path} must hold a list of {{"type": "function", "function": {{"name": ...}}}}',
            context,
            param,
        )
    return tools


def _is_tool(value: object) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


_CHOICES = ("auto", "none", "required")


def tool_options(command: Command) -> Command:
    """Add the options that offer tools to a command."""
    command = click.option(
        "--tool-choice",
        metavar="CHOICE",
        help="auto: the model decides; none: no answer has calls; required: a message is answered "
        "with calls; the name of a tool: with a call of it.  [default: auto]",
    )(command)
    return click.option(
        "--tools",
        metavar="FILE",
        callback=_read_tools,
        help="Tools that the model may call: a JSON list of OpenAI's tool definitions.",
    )(command)


def take_tool_choice(options: dict[str, Any], sampling: dict[str, Any]) -> ToolChoice:
    """The `tool_choice` of `LLM.chat` that a command's options ask for.

    Args:
        options: of the command.
        sampling: its sampling parameters.

    Raises:
        click.UsageError: --tools is missing, or has no such tool, or there is another constraint.
    """
    choice, tools = options["tool_choice"], options["tools"]
    if choice is None:
        return None
    if tools is None:
        raise click.UsageError("--tool-choice needs --tools FILE")
    names = [tool["function"]["name"] for tool in tools]
    if choice not in (*_CHOICES, *names):
        raise click.UsageError(
            f"--tool-choice: no tool has the name {choice!r}; give {', '.join(_CHOICES)}, or the "
            f"name of one in --tools: {', '.join(names)}"
        )
    if choice in ("auto", "none"):
        return str(choice)
    constraint = sampling.get("structured_outputs", {})
    if flag := next((each.flag for each in CONSTRAINTS if each.name in constraint), None):
        raise click.UsageError(f"--tool-choice {choice} and {flag} exclude each other: give one")
    if choice == "required":
        return "required"
    return {"type": "function", "function": {"name": choice}}


_PARSERS = {"reasoning_parser": "reasoning", "tool_parser": "tool calls"}


def reply_options(command: Command) -> Command:
    """Add the options that name the formats of replies to a command."""
    for name, part in reversed(_PARSERS.items()):
        command = click.option(
            f"--{name.replace('_', '-')}",
            name,
            metavar="NAME",
            default="auto",
            help=f"Format of {part} in answers; '' for none.  "
            "[default: the one that the chat template shows]",
        )(command)
    return command


def take_reply_options(options: dict[str, Any]) -> dict[str, str]:
    """Move these options from a command's options to keyword arguments of `LLM`."""
    return {name: options.pop(name) for name in _PARSERS}


@dataclass(frozen=True, slots=True)
class InputPrompt:
    """A prompt and its origin.

    Attributes:
        content: a text to complete, messages to answer, or the prompts of an encoder and a decoder.
        origin: its name in error messages, such as "line 3 of prompts.txt".
    """

    content: str | Messages | dict[str, Any]
    origin: str


def read_prompts(prompts: tuple[str, ...], lines: LineInput | None = None) -> list[InputPrompt]:
    """The prompts of a command: one per line, else the arguments, else the whole of stdin.

    Args:
        prompts: the command's arguments.
        lines: the lines of --input; None without --input.

    Raises:
        click.UsageError: there is no prompt.
    """
    if lines is not None:
        found = _read_lines(lines)
    elif prompts:
        found = [InputPrompt(p, f"prompt {i + 1}") for i, p in enumerate(prompts)]
    elif not sys.stdin.isatty():
        found = [InputPrompt(sys.stdin.read(), "standard input")]
    else:
        raise click.UsageError('no prompt; try: shmllm generate "def fibonacci(n):"')
    if not found:
        raise click.UsageError("the input holds no prompt")
    return found


def as_chat(item: InputPrompt, system: str | None) -> InputPrompt:
    """The prompt as a user's message."""
    opening: Messages = [{"role": "system", "content": system}] if system is not None else []
    return InputPrompt([*opening, {"role": "user", "content": item.content}], item.origin)


def for_encoder(item: InputPrompt, decoder_prompt: str) -> InputPrompt:
    """The prompt as what an encoder reads, with one for its decoder."""
    from shmllm.batch.native import with_decoder_prompt

    return InputPrompt(with_decoder_prompt(item.content, decoder_prompt), item.origin)


def _read_lines(lines: LineInput) -> list[InputPrompt]:
    try:
        return [
            InputPrompt(line.decode().rstrip("\r\n"), f"line {number} of {lines.name}")
            for number, line in lines
        ]
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{lines.name} is not UTF-8: {error.reason}") from error
