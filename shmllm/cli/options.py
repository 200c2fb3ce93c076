"""The engine's options on the command line, made from the table of options."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from shmllm.cli import drafts
from shmllm.config import options as kinds
from shmllm.config.engine import OPTIONS
from shmllm.config.options import Option
from shmllm.config.plugins import ClassNames
from shmllm.errors import EngineStartError

Command = TypeVar("Command", bound=Callable[..., Any])

ENGINE_OPTIONS = tuple(each for each in OPTIONS if each.flag and each.in_llm)
NAMED_ENGINE_OPTIONS = tuple(each for each in OPTIONS if each.flag and not each.in_llm)
ITEM_OPTIONS = ("limit_mm_per_prompt", "mm_processor_kwargs")
"""Those that a front end reads, also one of a named engine."""

_MODEL = next(each for each in ENGINE_OPTIONS if each.name == "model")
_DRAFT = next(each for each in ENGINE_OPTIONS if each.name == drafts.OPTION)
MODEL_VARIABLE = "SHMLLM_MODEL"

_METAVARS = {
    "Bytes": "BYTES",
    "ClassNames": "MODULE:CLASS,...",
    "ConnectorName": "MODULE:CLASS",
    "Device": "DEVICE",
    "JsonObject": "JSON",
    "Names": "NAME,...",
}

metrics_port_option = click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Serve statistics as Prometheus text on 127.0.0.1:PORT.",
)


class _Checked(click.ParamType):  # type: ignore[type-arg]
    """A value that an option's kind checks and converts."""

    def __init__(self, each: Option) -> None:
        self._option = each
        self.name = each.kind.__class__.__name__.lower()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._option.kind.parse(self._option.name, value)
        except EngineStartError as problem:
            self.fail(str(problem), param, ctx)


def _type_of(each: Option) -> click.ParamType[Any]:
    match each.kind:
        case kinds.OneOf(values=values) if isinstance(values[0], int):
            return click.Choice([str(value) for value in values])
        case kinds.OneOf(values=values):
            return click.Choice(values)
        case kinds.Whole(minimum=minimum, maximum=maximum):
            return click.IntRange(min=minimum, max=maximum)
        case kinds.Number(maximum=maximum, or_zero=or_zero):
            bound = None if maximum == float("inf") else maximum
            return click.FloatRange(min=0, min_open=not or_zero, max=bound)
        case kinds.Bytes() | kinds.Device() | ClassNames() | kinds.JsonObject() | kinds.Names():
            return _Checked(each)
    return click.STRING


def _click_option(each: Option) -> Callable[[Command], Command]:
    default = each.default_text or ("" if each.default is None else str(each.default))
    help = f"{each.help}  [default: {default}]" if default else each.help
    if isinstance(each.kind, kinds.Flag):
        if each.default is False:
            return click.option(each.flag, each.name, is_flag=True, help=each.help)
        flags = f"{each.flag}/--no-{each.flag.removeprefix('--')}"
        words = default.replace("True", "on")
        return click.option(
            flags, each.name, default=each.default, help=f"{each.help}  [default: {words}]"
        )
    value = str(each.default) if isinstance(_type_of(each), click.Choice) else each.default
    return click.option(
        each.flag,
        each.name,
        type=_type_of(each),
        default=None if each.default is None else value,
        metavar=_METAVARS.get(type(each.kind).__name__),
        help=help,
    )


def _model_option(default: str | Callable[[], str], words: str) -> Callable[[Command], Command]:
    return click.option(
        "-m",
        _MODEL.flag,
        _MODEL.name,
        default=default,
        envvar=MODEL_VARIABLE,
        help=f"{_MODEL.help}  [default: ${MODEL_VARIABLE}, or {words}]",
    )


def _draft_options(command: Command) -> Command:
    subject, _, _ = _DRAFT.help.partition(":")
    return click.option(
        _DRAFT.flag,
        _DRAFT.name,
        type=drafts.Drafter(),
        metavar="ngram|suffix|mtp|MODEL",
        help=f"{subject}: by earlier tokens, layers of the model itself, or a smaller MODEL.",
    )(_click_option(drafts.DRAFT_TOKENS)(command))


def _add(options: tuple[Option, ...], command: Command) -> Command:
    for each in reversed(options):
        if each is _DRAFT:
            command = _draft_options(command)
        elif each is not _MODEL:
            command = _click_option(each)(command)
    return command


def engine_options(command: Command) -> Command:
    """Add the options of `LLM` to a command. Without -m, the model is one that answers, if there is
    one."""
    words = "smollm2 if it is installed, otherwise tiny"
    return _model_option(_default_model, words)(_add(ENGINE_OPTIONS, command))


def bench_engine_options(command: Command) -> Command:
    """Add the options of `LLM` to a benchmark, whose default model is the same everywhere."""
    return _model_option(_MODEL.default, _MODEL.default)(_add(ENGINE_OPTIONS, command))


def _default_model() -> str:
    from shmllm.frontend.model_files import default_model

    return default_model()


def named_engine_options(command: Command) -> Command:
    """Add the options that only a named engine has to a command."""
    return _add(NAMED_ENGINE_OPTIONS, command)


def take_engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """Move the options of the table from a command's options to keyword arguments of `LLM`.

    Raises:
        click.UsageError: an option needs another one.
    """
    taken: dict[str, Any] = {}
    for each in (*ENGINE_OPTIONS, *NAMED_ENGINE_OPTIONS):
        if each.name in options:
            value = options.pop(each.name)
            is_number = isinstance(each.kind, kinds.OneOf) and isinstance(each.default, int)
            taken[each.name] = int(value) if is_number else value
    if drafts.DRAFT_TOKENS.name in options:
        drafter, count = taken[drafts.OPTION], options.pop(drafts.DRAFT_TOKENS.name)
        taken[drafts.OPTION] = drafts.with_count(drafter, count)
    return taken


def given_options(names: Iterable[str]) -> list[str]:
    """Those of a command's options that are on the command line."""
    context = click.get_current_context()
    typed = click.core.ParameterSource.COMMANDLINE
    return [name for name in names if context.get_parameter_source(name) is typed]


def flag_of(name: str) -> str:
    """The flag of an option of the engine."""
    return next(each.flag for each in ENGINE_OPTIONS if each.name == name)


def refuse_options(names: Iterable[str], why: str) -> None:
    """Raises click.UsageError if options of the engine are on the command line.

    Args:
        names: the options that the command cannot honour.
        why: the end of the message, behind a flag.
    """
    if useless := given_options(names):
        raise click.UsageError(f"{flag_of(useless[0])} {why}")


class Status:
    """A progress line on stderr, shown only if stderr is a terminal."""

    def __init__(self) -> None:
        self._shown = ""
        self._visible = os.isatty(2)

    def show(self, text: str) -> None:
        """Replace the line."""
        if self._visible and text != self._shown:
            click.echo(f"\r\x1b[K{text}", err=True, nl=False)
            self._shown = text

    def loading(self, done: int, total: int) -> None:
        """Show how many bytes of the weights are loaded."""
        self.show(f"loading weights {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB")

    def capturing(self, done: int, total: int) -> None:
        """Show how many sizes of CUDA graphs are captured."""
        self.show(f"capturing graphs {done} of {total}")

    def clear(self) -> None:
        """Remove the line."""
        if self._shown:
            click.echo("\r\x1b[K", err=True, nl=False)
            self._shown = ""
