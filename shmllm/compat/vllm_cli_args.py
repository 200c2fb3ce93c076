"""The options of `EngineArgs` as command-line arguments, for programs with vLLM's arguments.

This module makes one argument from each option of shmllm and of
`frontend.options.foreign_tables`; the classes of the configurations decide which values are valid.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

from shmllm.frontend.options.engine_args import EngineArgs
from shmllm.frontend.options.engine_options import LLM_OPTIONS

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_COUNT = re.compile(r"(-?\d+(?:\.\d+)?)([kmgKMG]?)")
_HELP = {each.name: each.help for each in LLM_OPTIONS}
_TYPES = {each.name: each.annotation.removesuffix(" | None") for each in LLM_OPTIONS}
_NO_ARGUMENTS = ("on_load_progress", "on_capture_progress", "chat_template")
"""Functions, and what vLLM's `LLM` takes and its `EngineArgs` do not: programs may have an argument
of this name."""
_SHORT = {
    "quantization": "-q",
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "prefill_context_parallel_size": "-pcp",
    "decode_context_parallel_size": "-dcp",
    "enable_expert_parallel": "-ep",
    "speculative_config": "-sc",
    "compilation_config": "-cc",
    "attention_config": "-ac",
}
"""vLLM's short names of options."""
_LISTS = (
    *("cudagraph_capture_sizes", "logits_processors"),
    *("served_model_name", "allowed_media_domains", "lora_target_modules"),
)
"""Options that take several values, or one list in JSON."""


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser whose options may be written with underscores as well as with dashes, and
    not with fewer letters, so that an option of vLLM's never means another one.

    Args:
        options: those of ArgumentParser.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        import sys

        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([_with_dashes(each) for each in given], namespace)


def _with_dashes(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else argument


def add_arguments(
    parser: argparse.ArgumentParser, options: Iterable[str]
) -> argparse.ArgumentParser:
    """Adds an argument for each of the options, and returns the parser."""
    group = parser.add_argument_group("engine", "The options of LLM.")
    defaults = {each.name: each.default for each in fields(EngineArgs)}
    for name in options:
        if name in _NO_ARGUMENTS:
            continue
        default = defaults[name]
        how: dict[str, Any] = {"default": default, "help": _help_text(name)}
        if _TYPES.get(name) == "bool" or isinstance(default, bool):
            how["action"] = argparse.BooleanOptionalAction
        else:
            how["type"] = _converter(name, default)
        if name in _LISTS:
            how |= {"nargs": "+", "action": _AsList}
        if name == "hf_token":
            how |= {"nargs": "?", "const": True}
        short = (_SHORT[name],) if name in _SHORT else ()
        group.add_argument(f"--{name.replace('_', '-')}", *short, **how)
    return parser


class _AsList(argparse.Action):
    """Stores the values of an argument as a list; a single list, or None, as it is."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        is_whole = len(values) == 1 and (values[0] is None or isinstance(values[0], list))
        setattr(namespace, self.dest, values[0] if is_whole else values)


def _help_text(name: str) -> str:
    text = _HELP.get(name, "An option of vLLM; docs/vllm.md says which values are accepted.")
    return text.replace("%", "%%")


def _converter(name: str, default: Any) -> Callable[[str], Any]:
    kind = _TYPES.get(name, type(default).__name__)
    if name == "kv_cache_memory_bytes":
        return str  # the option itself reads "512M"
    converters: dict[str, Callable[[str], Any]] = {"int": count, "float": float, "str": str}
    return converters.get(kind, json_or_text)


def count(text: str) -> int:
    """A whole number, also as "32k" (32,000), "32K" (32,768) or "auto" (-1).

    Raises:
        argparse.ArgumentTypeError: the text is no whole number.
    """
    if text == "auto":
        return -1
    found = _COUNT.fullmatch(text)
    number = float(found[1]) * _SUFFIXES.get(found[2], 1) if found is not None else 0.5
    if number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(number)


def json_or_text(text: str) -> Any:
    """JSON if the text begins like an object, a list or a number, None for "None", else the text.

    Raises:
        argparse.ArgumentTypeError: the text begins like an object or a list, but is no JSON.
    """
    if text == "None":
        return None
    try:
        return json.loads(text)
    except ValueError:
        if text[:1] in ("{", "["):
            raise argparse.ArgumentTypeError(f"{text!r} is no JSON") from None
        return text
