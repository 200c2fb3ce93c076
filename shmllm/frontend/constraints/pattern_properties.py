"""Removes the entries of `patternProperties` that only match names which `properties` lists.

llguidance lets an object go on with a comma whenever it has such an entry. But all names that match
are taken by `properties`, so no name can follow the comma, and the output ends with an error. This
module must not know requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from shmllm.frontend.constraints.json_schema import subschemas

CanBegin = Callable[[str, tuple[str, ...], str], bool]
"""`can_begin(pattern, excluded, text)`: whether an object whose names match `pattern` and are not
in `excluded` can begin with `text`."""


def remove_covered_patterns(
    schema: dict[str, Any], can_begin: CanBegin, quote: Callable[[str], str]
) -> None:
    """Move the schemas of such patterns into the properties that they apply to, in place.

    Args:
        schema: a JSON schema, whose values may be invalid.
        can_begin: see CanBegin.
        quote: writes a name as JSON.
    """
    for _, part in list(subschemas(schema)):
        properties, patterns = part.get("properties"), part.get("patternProperties")
        if not (isinstance(properties, dict) and isinstance(patterns, dict)) or not properties:
            continue
        for pattern, inner in list(patterns.items()):
            if not can_begin(pattern, tuple(properties), '{"'):
                names = [n for n in properties if can_begin(pattern, (), f"{{{quote(n)}:")]
                _add_schema(properties, names, inner)
                del patterns[pattern]
        if not patterns:
            del part["patternProperties"]


def _add_schema(properties: dict[str, Any], names: Iterable[str], added: Any) -> None:
    for name in names:
        properties[name] = {"allOf": [properties[name], added]}
