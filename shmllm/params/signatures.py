"""The signatures of constructors that take their fields as ``**options``.

Programs ask `inspect.signature` which options exist, and pass no others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from inspect import Parameter, Signature
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)


def takes_fields_of(dataclass: Any, num_positional: int = 0) -> Callable[[_Class], _Class]:
    """Returns a decorator that gives a class's constructor the signature of a dataclass's fields.

    Args:
        dataclass: has the fields.
        num_positional: the number of the first fields that may be passed by position.
    """
    by_position, by_name = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    parameters = [Parameter("self", by_position)]
    for number, each in enumerate(fields(dataclass)):
        kind = by_position if number < num_positional else by_name
        default = _default_of(each)
        parameters.append(Parameter(each.name, kind, default=default, annotation=each.type))
    signature = Signature(parameters, return_annotation=None)

    def decorate(cls: _Class) -> _Class:
        cls.__init__.__signature__ = signature  # type: ignore[misc]
        if "__new__" in vars(cls):  # inspect looks there first
            cls.__new__.__signature__ = signature  # type: ignore[attr-defined]
        return cls

    return decorate


def _default_of(each: Field[Any]) -> Any:
    if each.default_factory is not MISSING:
        return each.default_factory()
    return Parameter.empty if each.default is MISSING else each.default
