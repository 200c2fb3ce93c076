"""Drafted tokens on the command line: `--draft` and `--draft-tokens`.

Both together are the option `speculative_config` of an engine.
"""

from __future__ import annotations

from typing import Any

import click

from shmllm.config.options import options_in
from shmllm.config.speculative import METHODS_WITHOUT_MODEL, SpeculativeConfig

OPTION = "speculative_config"
DRAFT_TOKENS = next(
    each for each in options_in(SpeculativeConfig) if each.name == "num_speculative_tokens"
)


class Drafter(click.ParamType):  # type: ignore[type-arg]
    """A method, or a model that drafts, as the mapping that an engine takes."""

    name = "drafter"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        return {"method" if value in METHODS_WITHOUT_MODEL else "model": value}


def with_count(drafter: dict[str, Any] | None, count: int | None) -> dict[str, Any] | None:
    """The drafter, as `Drafter` reads it, with the number of tokens that it drafts.

    Raises:
        click.UsageError: there is a number, but nobody drafts.
    """
    if count is None:
        return drafter
    if drafter is None:
        raise click.UsageError(f"{DRAFT_TOKENS.flag} needs --draft")
    return drafter | {DRAFT_TOKENS.name: count}
