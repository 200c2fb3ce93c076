"""Checked access to the settings of an image processor, and to what a request changes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmllm.errors import RequestError
from shmllm.formats.image_defaults import HAMMING, NEAREST
from shmllm.frontend.images.picture import MOST_PIXELS


class Options:
    """The fields of an image processor.

    Errors are RequestErrors. The registry turns those of a file into EngineStartErrors.

    Attributes:
        values: the fields by name. A field that is None counts as absent.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def flag(self, name: str) -> bool:
        """A boolean; absent means False."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise RequestError(f"{name!r} must be true or false, not {value!r}", parameter=name)
        return bool(value)

    def count(self, name: str) -> int:
        """A positive integer."""
        return _positive(name, self.values.get(name))

    def number(self, name: str) -> float:
        """A positive number."""
        value: Any = self.values.get(name)
        if type(value) not in (int, float) or not 0 < value < MOST_PIXELS:
            raise RequestError(f"{name!r} must be a positive number, not {value!r}", parameter=name)
        return float(value)

    def filter(self) -> int:
        """The filter of pillow in "resample"."""
        value = self.values.get("resample")
        if type(value) is not int or not NEAREST <= value <= HAMMING:
            raise RequestError(
                f"'resample' must be a filter of pillow, {NEAREST} to {HAMMING}, not {value!r}",
                parameter="resample",
            )
        return value

    def sides(self, name: str, *forms: tuple[str, ...], one: str | None = None) -> dict[str, int]:
        """The lengths in a field such as "size", in pixels.

        Args:
            name: the field.
            forms: the sets of keys that it may have.
            one: the key of a single integer; None means both "height" and "width".
        """
        value = self.values.get(name)
        if type(value) is int:
            value = {"height": value, "width": value} if one is None else {one: value}
        elif isinstance(value, list | tuple) and len(value) == 2:
            value = {"height": value[0], "width": value[1]}
        if not isinstance(value, Mapping) or all(value.keys() != set(form) for form in forms):
            known = " or ".join(" and ".join(map(repr, form)) for form in forms)
            raise RequestError(
                f"{name!r} must have the keys {known}, not {value!r}", parameter=name
            )
        return {key: _positive(f"{name}.{key}", each) for key, each in value.items()}


def _positive(name: str, value: Any) -> int:
    if type(value) is not int or not 0 < value < 2**31:
        raise RequestError(f"{name!r} must be a positive integer, not {value!r}", parameter=name)
    return value
