"""The fields of structural tags: reads both forms, and checks names and values.

Each error names the place in the structural tag. This module must not know grammars.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shmllm.errors import RequestError, nearest

_KEYS: dict[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema", "style", "any_order", "max_whitespace_cnt", "excludes"),
    "regex": ("pattern", "excludes"),
    "grammar": ("grammar",),
    "any_text": ("excludes", "max_tokens", "max_chars"),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
    "optional": ("content",),
    "plus": ("content",),
    "star": ("content",),
    "repeat": ("content", "min", "max"),
    "token": ("token",),
}
_KINDS_BY_FIELD = {
    "value": "const_string",
    "json_schema": "json_schema",
    "elements": "sequence",
    "begin": "tag",
    "triggers": "triggered_tags",
    "separator": "tags_with_separator",
    "excludes": "any_text",
}
"""The type of a format without one, by the first of these fields that it has, as in xgrammar."""
_UNSUPPORTED = (
    "exclude_token",
    "any_tokens",
    "token_triggered_tags",
    "dispatch",
    "token_dispatch",
    "qwen_xml_parameter",
)
_ONLY: dict[str, dict[str, tuple[Any, ...]]] = {
    "json_schema": {
        "style": (None, "json"),
        "any_order": (None, False),
        "max_whitespace_cnt": (None,),
        "excludes": (None, []),
    },
    "regex": {"excludes": (None, [])},
}
"""The values of fields whose others cannot be expressed."""


def read(given: Any) -> tuple[Any, str]:
    """The format of a structural tag in either form, and its place."""
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise tag_error("", f"is not JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise tag_error("", f"must be a dict or its JSON text, got {given!r:.80}")
    if value.get("type") == "structural_tag" and "format" in value:
        return value["format"], "format"
    if "structures" not in value:
        raise tag_error("", 'has neither "structures" and "triggers" nor "type" and "format"')
    return _modern(value), ""


def _modern(value: Mapping[str, Any]) -> dict[str, Any]:
    """The format that a structural tag in the older form stands for."""
    structures = list_of(value, "structures", "")
    for index, each in enumerate(structures):
        if not isinstance(each, Mapping) or not {"begin", "end"} <= each.keys():
            raise tag_error(f"structures[{index}]", "must have begin, schema and end")
    tags = [
        {
            "type": "tag",
            "begin": each["begin"],
            "content": {"type": "json_schema", "json_schema": each.get("schema", {})},
            "end": each["end"],
        }
        for each in structures
    ]
    return {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}


def at(where: str, key: str, index: int) -> str:
    return f"{where}.{key}[{index}]".lstrip(".")


def tag_error(where: str, problem: str) -> RequestError:
    place = f": {where}" if where else ""
    return RequestError(f"structured_outputs.structural_tag{place} {problem}")


def kind_of(form: Any, where: str) -> str:
    """The type of a format, whose fields have known names. Some formats need not name it."""
    if not isinstance(form, Mapping):
        raise tag_error(where, f"must be a dict with a type, got {form!r:.80}")
    by_field = (kind for name, kind in _KINDS_BY_FIELD.items() if name in form)
    kind = form["type"] if "type" in form else next(by_field, None)
    if kind in _UNSUPPORTED:
        raise tag_error(where, f"has the type {kind!r}, which cannot be expressed")
    if kind not in _KEYS:
        known = nearest(str(kind), sorted(_KEYS))
        raise tag_error(where, f"has the unknown type {kind!r}; the nearest is {known!r}")
    for name, value in form.items():
        if name != "type" and name not in _KEYS[kind]:
            known = nearest(str(name), _KEYS[kind])
            raise tag_error(where, f"has the unknown field {name!r}; the nearest is {known!r}")
        only = _ONLY.get(kind, {}).get(name)
        if only is not None and value not in only:
            raise tag_error(f"{where}.{name}", f"can only be {only[-1]!r}, got {value!r:.80}")
    return str(kind)


def has_free_end(form: Any) -> bool:
    """Whether free text can be the last part of a format."""
    if not isinstance(form, Mapping):
        return False
    elements = form.get("elements")
    match form.get("type"):
        case "any_text" | "triggered_tags":
            return True
        case "sequence" if isinstance(elements, list) and elements:
            return has_free_end(elements[-1])
        case "or" if isinstance(elements, list):
            return any(map(has_free_end, elements))
        case "optional" | "plus" | "star" | "repeat":
            return has_free_end(form.get("content"))
    return False


def list_of(form: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = form.get(key)
    if not isinstance(value, list | tuple):
        raise tag_error(f"{where}.{key}".lstrip("."), f"must be a list, got {value!r:.80}")
    return list(value)


def formats_of(form: Mapping[str, Any], where: str) -> list[Any]:
    elements = list_of(form, "elements", where)
    if not elements:
        raise tag_error(f"{where}.elements", "must not be empty")
    return elements


def texts_of(form: Mapping[str, Any], key: str, where: str) -> list[str]:
    values = list_of(form, key, where) if form.get(key) is not None else []
    if not all(isinstance(value, str) and value for value in values):
        raise tag_error(f"{where}.{key}".lstrip("."), "must be a list of non-empty strings")
    return values


def text_of(form: Mapping[str, Any], key: str, where: str) -> str:
    value = form.get(key)
    if not isinstance(value, str):
        raise tag_error(f"{where}.{key}", f"must be a str, got {value!r:.80}")
    return value


def flag_of(form: Mapping[str, Any], key: str, where: str) -> bool:
    value = form.get(key, False)
    if not isinstance(value, bool):
        raise tag_error(f"{where}.{key}", f"must be true or false, got {value!r:.80}")
    return value


def count_of(form: Mapping[str, Any], key: str, where: str) -> int | None:
    value = form.get(key)
    if value is not None and (type(value) is not int or not 0 <= value < 2**31):
        raise tag_error(f"{where}.{key}", f"must be a whole number from 0, got {value!r:.80}")
    return value
