"""JSON schemas: which keywords the engine enforces, and which it must refuse.

The grammar library ignores what it does not know, a misspelt keyword included, so every
keyword of every subschema is looked up here first. Values are the library's to check.
Knows nothing of requests.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from shmllm.errors import RequestError

MAX_SUBSCHEMAS = 5_000
"""The library descends once for each schema that refers to the next, and dies of 10,000."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MAPS = _names("properties patternProperties $defs definitions")
_LISTS = _names("anyOf oneOf allOf prefixItems")
_SCHEMAS = _names("items additionalItems additionalProperties")
_ENFORCED = _names(
    "type enum const required minProperties maxProperties minItems maxItems minLength maxLength "
    "pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf $ref"
)
# `discriminator` (OpenAPI) only says which property tells the alternatives apart.
_SAYS_NOTHING = _names(
    "title description default example examples deprecated readOnly writeOnly discriminator "
    "$comment $schema $id $anchor"
)
_KNOWN = _MAPS | _LISTS | _SCHEMAS | _ENFORCED | _SAYS_NOTHING
_UNSUPPORTED = _names(
    "not if then else uniqueItems contains minContains maxContains propertyNames "
    "dependentRequired dependentSchemas dependencies unevaluatedItems unevaluatedProperties "
    "contentEncoding contentMediaType contentSchema nullable $dynamicRef $dynamicAnchor "
    "$recursiveRef $recursiveAnchor $vocabulary"
)


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise RequestError for the first keyword that would not be enforced; says where."""
    for count, (path, part) in enumerate(subschemas(schema)):
        if count >= MAX_SUBSCHEMAS:
            raise RequestError(
                f"structured_outputs.json has more than {MAX_SUBSCHEMAS:,} subschemas"
            )
        if not part.keys() <= _KNOWN:
            keyword = next(name for name in part if name not in _KNOWN)
            raise RequestError(f"structured_outputs.json {_refusal(path, keyword)}")


def forbid_additional_properties(schema: dict[str, Any]) -> None:
    """Close, in place, every object that names properties and does not say otherwise."""
    for _, part in subschemas(schema):
        if "properties" in part or "patternProperties" in part:
            part.setdefault("additionalProperties", False)


def subschemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema object within a schema, itself first, with its path ("properties.a")."""
    waiting = [("", schema)]
    while waiting:
        path, part = waiting.pop()
        if not isinstance(part, dict):
            continue  # True, False, or something that the library refuses
        yield path, part
        prefix = f"{path}." if path else ""
        for keyword, value in part.items():
            if keyword in _MAPS and isinstance(value, dict):
                waiting += [(f"{prefix}{keyword}.{name}", inner) for name, inner in value.items()]
            elif isinstance(value, list) and (keyword in _LISTS or keyword in _SCHEMAS):
                waiting += [(f"{prefix}{keyword}[{i}]", inner) for i, inner in enumerate(value)]
            elif keyword in _SCHEMAS:
                waiting.append((f"{prefix}{keyword}", value))


def _refusal(path: str, keyword: object) -> str:
    where = f" at {path}" if path else ""
    if keyword in _UNSUPPORTED:
        return f"has the keyword {keyword!r}{where}, which cannot be enforced; take it out"
    near = difflib.get_close_matches(str(keyword), sorted(_KNOWN), n=1, cutoff=0.0)
    return (
        f"has the keyword {keyword!r}{where}, which JSON Schema does not have; the nearest is "
        f"{near[0]!r}"
    )
