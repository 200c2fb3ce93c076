"""Adapters (LoRA) on the command line: `--lora NAME=DIR`."""

from __future__ import annotations

import zlib
from typing import Any

import click

from shmllm.errors import RequestError
from shmllm.params.lora import MAX_ID, LoRARequest

Adapters = dict[str, LoRARequest]
"""The adapters that a command names, by these names."""


def _read(context: click.Context, param: click.Parameter, given: tuple[str, ...]) -> Adapters:
    found: Adapters = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise click.BadParameter(f"{text!r} is not NAME=DIR", context, param)
        if name in found:
            raise click.BadParameter(f"{name!r} is named twice", context, param)
        try:
            lora = LoRARequest(name, 1, path)
            found[name] = LoRARequest(name, _number_of(name, lora.lora_path), path)
        except RequestError as error:
            raise click.BadParameter(str(error), context, param) from error
    return found


def _number_of(name: str, path: str) -> int:
    """The number of an adapter: the same in every command, so that a named engine knows it."""
    return zlib.crc32(f"{name}\0{path}".encode()) % MAX_ID + 1


lora_option = click.option(
    "--lora",
    "adapters",
    multiple=True,
    metavar="NAME=DIR",
    callback=_read,
    help="Adapter in PEFT's files, for all prompts; a row of --input chooses by its field `lora`.",
)


def with_adapters(engine: dict[str, Any], adapters: Adapters) -> dict[str, Any]:
    """The options of an engine for these adapters."""
    if not adapters:
        return engine
    most = max(engine["max_loras"], len(adapters))
    return engine | {"enable_lora": True, "max_loras": most}


def only_adapter(adapters: Adapters) -> LoRARequest | None:
    """The adapter of prompts that cannot choose one.

    Raises:
        click.UsageError: there are several.
    """
    if len(adapters) > 1:
        raise click.UsageError("several --lora are for rows of --input, which choose by `lora`")
    return next(iter(adapters.values()), None)
