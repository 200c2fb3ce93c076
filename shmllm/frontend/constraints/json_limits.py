"""Refuses what llguidance takes in a JSON schema and does not enforce.

llguidance computes with 64-bit floats, and writes numbers of more than 15 digits as another number
in some cases; at -2**63 it recurses without an end. It counts a property that occurs twice as two,
and takes a name with an escaped letter ("\\u0061") for a name that `properties` does not list. This
module must not know requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

from shmllm.errors import RequestError
from shmllm.frontend.constraints.json_schema import subschemas

ESCAPES_WITHOUT_CODES = 'nrbtf\\"'
"""llguidance's option `json_allowed_escapes` without `\\uXXXX`."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LARGEST_EXACT = 2**53
_NUM_EXACT_DIGITS = 15
_LOWEST = -(2.0**63)

CanWrite = Callable[[int | float, str], bool]
"""`can_write(number, text)`: whether the output for the constant `number` is `text`."""


def check_limits(schema: dict[str, Any], can_write: CanWrite) -> None:
    """Raise RequestError for the first number or count that would not be enforced."""
    for path, part in subschemas(schema):
        for keyword, number in _numbers(part):
            if not _is_exact(number, can_write):
                raise RequestError(
                    f"structured_outputs.json has the number {number} {_place(path, keyword)}, "
                    "which has more digits than can be enforced"
                )
        _check_count(path, part)


def has_unlisted_names(schema: dict[str, Any]) -> bool:
    """Whether a schema has rules for some properties of an object that may have others."""
    rules = ("properties", "patternProperties", "required")
    return any(
        any(part.get(name) for name in rules) and part.get("additionalProperties") is not False
        for _, part in subschemas(schema)
    )


def _place(path: str, keyword: str) -> str:
    return f"at {path}.{keyword}" if path else f"at {keyword}"


def _check_count(path: str, part: dict[str, Any]) -> None:
    least, required = part.get("minProperties"), part.get("required", [])
    if isinstance(least, int) and isinstance(required, list) and least > len(required) + 1:
        raise RequestError(
            f"structured_outputs.json has the value {least} {_place(path, 'minProperties')}, which "
            f"can be enforced up to {len(required) + 1}, one more than the names that are "
            "'required': further names may be equal"
        )


def _numbers(part: dict[str, Any]) -> Iterator[tuple[str, int | float]]:
    """The numbers of a subschema that may have too many digits, each with its keyword."""
    for keyword in _BOUNDS:
        bound = part.get(keyword)
        if isinstance(bound, int) and abs(bound) > _LARGEST_EXACT:
            yield keyword, bound
    for keyword in ("const", "enum"):
        waiting = [part.get(keyword)]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict | list):
                waiting += value.values() if isinstance(value, dict) else value
            elif isinstance(value, int | float) and not isinstance(value, bool):
                yield keyword, value


def _is_exact(number: int | float, can_write: CanWrite) -> bool:
    decimal = Decimal(repr(number))
    if len(decimal.as_tuple().digits) <= _NUM_EXACT_DIGITS:
        return True
    text = f"{decimal:f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return not _is_lowest(number) and can_write(number, text)


def _is_lowest(number: int | float) -> bool:
    try:
        return float(number) == _LOWEST
    except OverflowError:
        return False
