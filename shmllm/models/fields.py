"""Reads typed fields from a model's JSON files. Errors name the file and the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from shmllm.errors import EngineStartError
from shmllm.formats.text_files import read_text

T = TypeVar("T")

_LONGEST_SHOWN = 200
LARGEST_INTEGER = 2**31 - 1
_LARGEST_NUMBER = 1e38
"""About the largest number of float32, in which models compute."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
        EngineStartError: the file is missing, unreadable, not JSON or not an object.
    """
    try:
        content = json.loads(read_text(path))
    except OSError as error:
        raise EngineStartError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise EngineStartError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise EngineStartError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


class Fields:
    """Checked access to the fields of one JSON object. A field that is null counts as absent, but
    for booleans: see `flag`.

    Attributes:
        values: the object.
        where: the object's name in error messages, usually the file's path.
        whole: the fields of the object that this one is nested in; of a plain one, these.
    """

    def __init__(self, values: dict[str, Any], where: str, whole: Fields | None = None) -> None:
        self.values = values
        self.where = where
        self.whole = self if whole is None else whole

    def error(self, message: str) -> EngineStartError:
        """Returns an error about this object; the caller raises it."""
        return EngineStartError(f"{self.where}: {message}")

    def _required(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"field {name!r} is missing")
        return value

    def integer(
        self,
        name: str,
        default: int | None = None,
        minimum: int = 1,
        maximum: int = LARGEST_INTEGER,
    ) -> int:
        """Returns an integer from ``minimum`` to ``maximum``. Without a default the field is
        required."""
        value = self._required(name, default)
        if type(value) is not int or value < minimum:
            raise self.error(
                f"{name!r} must be an integer of at least {minimum}, not {_shown(value)}"
            )
        if value > maximum:
            raise self.error(
                f"{name!r} must be an integer of at most {maximum:,}, not {_shown(value)}"
            )
        return value

    def optional_integer(self, name: str) -> int | None:
        """Returns a positive integer, or None if the field is absent."""
        return None if self.values.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a positive number that float32 has. Without a default the field is required."""
        value = self._required(name, default)
        if type(value) not in (int, float) or not 0 < value <= _LARGEST_NUMBER:
            raise self.error(f"{name!r} must be a positive number, not {_shown(value)}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Returns a positive finite number, or None if the field is absent."""
        return None if self.values.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        """Returns a boolean. Null is false, as in Python, if `default` is false, too; otherwise it
        is an error, because neither meaning is sure."""
        value = self.values.get(name, default)
        if value is None and not default:
            return False
        if not isinstance(value, bool):
            raise self.error(f"{name!r} must be true or false, not {_shown(value)}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Returns a string. Without a default the field is required."""
        value = self._required(name, default)
        if not isinstance(value, str):
            raise self.error(f"{name!r} must be a string, not {_shown(value)}")
        return value

    def meaning(self, name: str, meanings: Mapping[str, T], default: str | None = None) -> T:
        """Returns what a word means that the field has, one of some. Without a default the field is
        required."""
        word = self.text(name, default)
        if word not in meanings:
            known = ", ".join(map(repr, meanings))
            raise self.error(f"{name} {_shown(word)} is not supported; supported: {known}")
        return meanings[word]

    def texts(self, name: str) -> list[str]:
        """Returns a list of strings, empty if the field is absent."""
        value = self._required(name, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.error(f"{name!r} must be a list of strings, not {_shown(value)}")
        return value

    def table(self, name: str) -> dict[str, Any]:
        """Returns a nested object, empty if the field is absent."""
        value = self._required(name, {})
        if not isinstance(value, dict):
            raise self.error(f"{name!r} must be an object, not {_shown(value)}")
        return value

    def section(self, name: str, *model_types: str) -> Fields | None:
        """Returns the fields of a nested object that describes a part of the model; None: the
        object is absent or empty, and the model has no such part.

        Args:
            name: that of the object.
            model_types: what its ``model_type`` may be; the first one if it is absent.
        """
        values = self.table(name)
        if not values:
            return None
        part = Fields(values, f"{self.where}: {name}")
        if (found := part.text("model_type", model_types[0])) not in model_types:
            known = ", ".join(model_types)
            raise part.error(f"model_type {found!r} is not supported; supported: {known}")
        return part

    def under_names(self, names: Mapping[str, tuple[str, Any]]) -> Fields:
        """Returns the fields with some of them under other names.

        Args:
            names: for each name, the name that the object has, and the value where it is absent.
        """
        found = {ours: self.values.get(name, default) for ours, (name, default) in names.items()}
        return self.with_values(self.values | found)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """Returns the fields with values for those that are absent."""
        missing = {name: x for name, x in defaults.items() if self.values.get(name) is None}
        return self.with_values(self.values | missing)

    def with_absent(self, defaults: Mapping[str, Any]) -> Fields:
        """As `with_defaults`, but null stays null where it does not mean the default."""
        return self.with_values(dict(defaults) | self.values)

    def null_as_false(self, *names: str) -> Fields:
        """Returns the fields with false for those of these names that are null. They are booleans
        whose default is true, and for which transformers takes null, too."""
        false = {name: False for name in names if self.values.get(name, True) is None}
        return self.with_values(self.values | false)

    def with_values(self, values: dict[str, Any]) -> Fields:
        """Returns other values in the same place."""
        return Fields(values, self.where, None if self.whole is self else self.whole)


def _shown(value: object) -> str:
    """A value as errors show it, cut if it is very long."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
