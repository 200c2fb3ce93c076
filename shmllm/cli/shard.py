"""A part of the input on the command line: `--shard K/N`."""

from __future__ import annotations

import click

from shmllm.batch.shard import Shard
from shmllm.errors import RequestError


def _read(context: click.Context, param: click.Parameter, text: str | None) -> Shard | None:
    if text is None:
        return None
    try:
        return Shard.parse(text)
    except RequestError as error:
        raise click.BadParameter(str(error), context, param) from error


shard_option = click.option(
    "--shard",
    metavar="K/N",
    callback=_read,
    help="Only the rows whose index, from 0, is K modulo N: one of N jobs, 0/N to N-1/N.",
)
