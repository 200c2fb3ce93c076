"""Checks that JSON schemas contain only keywords that the engine enforces.

llguidance ignores unknown keywords, including misspelt ones. So this module checks each keyword of
each subschema; llguidance checks the values. The module must not know requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shmllm.errors import RequestError, nearest

MAX_SUBSCHEMAS = 5_000
"""llguidance recurses once per schema in a chain of references; 10,000 crash the process."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MAPS = _names("properties patternProperties $defs definitions")
_LISTS = _names("anyOf oneOf allOf prefixItems")
_SCHEMAS = _names("items additionalItems additionalProperties")
_ENFORCED = _names(
    "type enum const required minProperties maxProperties minItems maxItems minLength maxLength "
    "pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf $ref"
)
# `discriminator` (OpenAPI) only names the property that distinguishes the alternatives.
WITHOUT_EFFECT = _names(
    "title description default example examples deprecated readOnly writeOnly discriminator "
    "$comment $schema $id $anchor"
)
_KNOWN = _MAPS | _LISTS | _SCHEMAS | _ENFORCED | WITHOUT_EFFECT
_UNSUPPORTED = _names(
    "not if then else uniqueItems contains minContains maxContains propertyNames "
    "dependentRequired dependentSchemas dependencies unevaluatedItems unevaluatedProperties "
    "contentEncoding contentMediaType contentSchema nullable $dynamicRef $dynamicAnchor "
    "$recursiveRef $recursiveAnchor $vocabulary"
)


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise RequestError for the first keyword that is not enforced, with its path."""
    for count, (path, part) in enumerate(subschemas(schema)):
        if count >= MAX_SUBSCHEMAS:
            raise RequestError(
                f"structured_outputs.json has more than {MAX_SUBSCHEMAS:,} subschemas"
            )
        if not part.keys() <= _KNOWN:
            keyword = next(name for name in part if name not in _KNOWN)
            raise RequestError(f"structured_outputs.json {_refusal(path, keyword)}")


def forbid_additional_properties(schema: dict[str, Any]) -> None:
    """Set `additionalProperties` to False, in place, for each object schema with properties that
    does not have the keyword."""
    for _, part in subschemas(schema):
        if "properties" in part or "patternProperties" in part:
            part.setdefault("additionalProperties", False)


def translate_patterns(schema: dict[str, Any], translate: Callable[[str], str]) -> None:
    """Replace the regular expressions of `pattern` and `patternProperties` in place."""
    for _, part in list(subschemas(schema)):
        if isinstance(part.get("pattern"), str):
            part["pattern"] = translate(part["pattern"])
        if isinstance(part.get("patternProperties"), dict):
            translated: dict[str, Any] = {}
            for pattern, inner in part["patternProperties"].items():
                found = translate(pattern)
                equal = found in translated
                translated[found] = {"allOf": [translated[found], inner]} if equal else inner
            part["patternProperties"] = translated


def subschemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each schema object of a schema, itself first, with its path ("properties.a")."""
    waiting = [("", schema)]
    while waiting:
        path, part = waiting.pop()
        if not isinstance(part, dict):
            continue  # True, False, or a value that llguidance refuses
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
        return f"has the keyword {keyword!r}{where}, which cannot be enforced; remove it"
    return (
        f"has the keyword {keyword!r}{where}, which JSON Schema does not have; the nearest is "
        f"{nearest(str(keyword), sorted(_KNOWN))!r}"
    )
