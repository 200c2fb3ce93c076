"""Sampling parameters on the command line: a table of options, and what they mean together.

Each option sets a field of `SamplingParams`; those of `CONSTRAINTS` set one of
`StructuredOutputsParams`. This module must not know what a command does with the parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

# The model's generation_config.json overrides these, and options override both.
DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 128}
SEVERAL_TEMPERATURE = 1.0
"""The default temperature of several completions: greedy ones would all be the same."""


@dataclass(frozen=True, slots=True)
class SamplingOption:
    """A row of the table.

    Attributes:
        flag: the option.
        name: the field that it sets.
        kind: the type of its value; bool for an option without a value.
        help: its description.
        default: the value without the option and without a value of the model, in words.
        metavar: the name of the value in the help; None takes the name of the type.
        multiple: whether it may be given several times.
    """

    flag: str
    name: str
    kind: Any
    help: str
    default: str = ""
    metavar: str | None = None
    multiple: bool = False

    def add_to(self, command: Command) -> Command:
        """Add the option to a command, as a parameter called `name`."""
        is_flag = self.kind is bool
        decorate = click.option(
            self.flag,
            self.name,
            type=None if is_flag else self.kind,
            is_flag=is_flag,
            default=None,
            multiple=self.multiple,
            metavar=self.metavar,
            help=self.help + (f"  [default: {self.default}]" if self.default else ""),
        )
        return decorate(command)


class _Bias(click.ParamType):  # type: ignore[type-arg]
    """A token id and the number that is added to its logit, as "ID=BIAS"."""

    name = "id=bias"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        token, separator, bias = value.partition("=")
        try:
            if separator:
                return int(token), float(bias)
        except ValueError:
            pass
        return self.fail(f"{value!r} is not a token id and a number, as in 42=-1.5", param, ctx)


class _FileOrText(click.ParamType):  # type: ignore[type-arg]
    """The content of a file if there is one of that name; otherwise the text itself.

    Args:
        what: what the text is.
        mark: what every such text contains, and hardly a mistyped name of a file.
    """

    name = "file|text"

    def __init__(self, what: str, mark: str) -> None:
        self._what = what
        self._mark = mark

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if os.path.exists(value):
            return read_text(value, param, ctx)
        if self._mark not in value:
            self.fail(f"{value!r} is neither a file nor {self._what}", param, ctx)
        return value


def read_text(path: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
    """The content of a text file.

    Raises:
        click.BadParameter: the file cannot be read, or is not UTF-8.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}", ctx, param) from error
    except UnicodeDecodeError as error:
        raise click.BadParameter(f"{path} is not UTF-8: {error.reason}", ctx, param) from error


OPTIONS = (
    SamplingOption(
        "--max-tokens", "max_tokens", int, "Tokens per completion.", str(DEFAULTS["max_tokens"])
    ),
    SamplingOption(
        "--temperature",
        "temperature",
        float,
        "Sampling temperature; 0 is greedy.",
        "the model's, else 0, or 1 for several completions",
    ),
    SamplingOption(
        "--top-p",
        "top_p",
        float,
        "Sample from the tokens with this total probability.",
        "the model's, else 1",
    ),
    SamplingOption(
        "--top-k",
        "top_k",
        int,
        "Sample from this many most likely tokens.",
        "the model's, else all",
    ),
    SamplingOption(
        "--min-p",
        "min_p",
        float,
        "Drop tokens below this part of the highest probability.",
        "the model's, else 0",
    ),
    SamplingOption(
        "--presence-penalty",
        "presence_penalty",
        float,
        "Subtract this from the logits of tokens that the output contains; -2 to 2.",
        "0",
    ),
    SamplingOption(
        "--frequency-penalty",
        "frequency_penalty",
        float,
        "Subtract this for each time that the output contains the token; -2 to 2.",
        "0",
    ),
    SamplingOption(
        "--repetition-penalty",
        "repetition_penalty",
        float,
        "Above 1, make tokens of the prompt and the output less likely.",
        "the model's, else 1",
    ),
    SamplingOption(
        "--logit-bias",
        "logit_bias",
        _Bias(),
        "Add BIAS to the logit of token ID; -inf forbids it. May be given several times.",
        metavar="ID=BIAS",
        multiple=True,
    ),
    SamplingOption("--seed", "seed", int, "Seed, for repeatable sampling.", "none"),
    SamplingOption(
        "--stop", "stop", str, "End before this text. May be given several times.", multiple=True
    ),
    SamplingOption("--ignore-eos", "ignore_eos", bool, "Continue after the end-of-sequence token."),
    SamplingOption(
        "--thinking-token-budget",
        "thinking_token_budget",
        int,
        "End the model's reasoning after this many tokens of it.",
        "none",
        metavar="N",
    ),
)
CONSTRAINTS = (
    SamplingOption(
        "--json-schema",
        "json",
        _FileOrText("a JSON schema", "{"),
        "The output is JSON of this schema.",
        metavar="FILE|TEXT",
    ),
    SamplingOption(
        "--regex", "regex", str, "The whole output matches this expression.", metavar="TEXT"
    ),
    SamplingOption(
        "--choice",
        "choice",
        str,
        "The output is one of these. Give it for each.",
        metavar="TEXT",
        multiple=True,
    ),
    SamplingOption(
        "--grammar",
        "grammar",
        _FileOrText("a grammar", ":"),
        "The output matches this grammar, EBNF or Lark.",
        metavar="FILE|TEXT",
    ),
)
# A conversation has one answer to each message, as text; so these are not among its options.
OPTIONS_OF_TEXTS = (
    SamplingOption("-n", "n", int, "Completions of each prompt.", "1"),
    SamplingOption(
        "--logprobs",
        "logprobs",
        int,
        "Show the log-probabilities of each token and of this many alternatives.",
        metavar="N",
    ),
)


def sampling_options(command: Command) -> Command:
    """Add the sampling options that every command with sampling has."""
    return _add((*OPTIONS, *CONSTRAINTS), command)


def text_sampling_options(command: Command) -> Command:
    """Add the sampling options of commands that complete texts."""
    return _add(OPTIONS_OF_TEXTS, command)


def _add(options: tuple[SamplingOption, ...], command: Command) -> Command:
    for each in reversed(options):
        command = each.add_to(command)
    return command


def take_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters among the command's options.

    Raises:
        click.UsageError: two constraints are given.
        RequestError: a value is invalid. This is found before the engine starts.
    """
    from shmllm.params.sampling import SamplingParams

    given = {each.name: options.get(each.name) for each in (*OPTIONS, *OPTIONS_OF_TEXTS)}
    sampling = {name: value for name, value in given.items() if value not in (None, ())}
    if "stop" in sampling:
        sampling["stop"] = list(sampling["stop"])
    if "logit_bias" in sampling:
        sampling["logit_bias"] = dict(sampling["logit_bias"])
    if constraint := _take_constraint(options):
        sampling["structured_outputs"] = constraint
    SamplingParams(**completed(sampling))
    return sampling


def _take_constraint(options: dict[str, Any]) -> dict[str, Any]:
    """The fields of StructuredOutputsParams among the options; {} without one.

    Raises:
        click.UsageError: two constraints are given, or one cannot be enforced.
    """
    given = [each for each in CONSTRAINTS if options.get(each.name) not in (None, ())]
    if len(given) > 1:
        raise click.UsageError(f"{given[0].flag} and {given[1].flag} exclude each other: give one")
    if not given:
        return {}
    from shmllm.errors import RequestError
    from shmllm.frontend.constraints.structured_outputs import grammar_of
    from shmllm.params.structured_outputs import StructuredOutputsParams

    (each,) = given
    value = options[each.name]
    constraint: dict[str, Any] = {each.name: list(value) if each.multiple else value}
    try:
        grammar_of(StructuredOutputsParams(**constraint))
    except RequestError as error:
        message = str(error).replace(f"structured_outputs.{each.name}", each.flag)
        raise click.UsageError(message) from error
    return constraint


def completed(*given: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `SamplingParams`: the given ones, and the commands' defaults.

    Args:
        given: parameters by name; later ones override earlier ones.
    """
    merged: dict[str, Any] = {}
    for each in given:
        merged |= each
    several = {} if merged.get("n", 1) == 1 else {"temperature": SEVERAL_TEMPERATURE}
    return DEFAULTS | several | merged
