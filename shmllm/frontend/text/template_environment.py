"""The sandboxed Jinja environment for Hugging Face chat templates.

Besides Jinja's own names, the environment has those that transformers provides: `raise_exception`,
`strftime_now`, `tojson` without HTML escapes, loop controls and the `{% generation %}` block. This
module must not know messages.
"""

from __future__ import annotations

import datetime
import functools
import json
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class _GenerationBlock(Extension):
    """Renders `{% generation %}...{% endgeneration %}` as its content.

    Training code uses the block to mark the assistant's text. As in transformers, variables that
    are set inside the block are not visible outside.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _SafeDict:
    """Constructs dicts like `dict`, but gives templates no access to the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _SafeNamespace(Namespace):
    """A Jinja namespace that refuses names with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # Without named parameters, so that a template may use the keyword argument `self`.
        self, *initial = args
        attributes = dict(*initial, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not set {name!r} on a namespace; rename it")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.datetime.now().strftime(format_)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _SafeDict(),
        "namespace": _SafeNamespace,
    }
    return environment


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> Template:
    """Compile a template. A cache keeps the last 32 templates.

    Raises:
        jinja2.TemplateError: the source has a syntax error.
    """
    return _environment().from_string(source)
