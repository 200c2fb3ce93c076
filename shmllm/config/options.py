"""Declares options: each one once, as a field of a configuration dataclass.

    block_size: int = option(16, "Tokens per KV block.", OneOf((8, 16, 32, 64)))

The field's name, type and default are the option's. `option` adds a help text and the set of valid
values. The dataclass that holds the field stands for the component that reads the option.
`config.engine.OPTIONS` lists all options. The keyword arguments of `LLM`, the command line,
`EngineArgs`, the JSON sent to the engine and the README's table are made from that list.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar

from shmllm.errors import EngineStartError

Default = TypeVar("Default")

_KEY = "option"
_UNIT_BYTES = {
    unit: base**power
    for power, letter in enumerate("KMGT", 1)
    for unit, base in ((letter, 1024), (f"{letter}IB", 1024), (f"{letter}B", 1000))
}
_MOST_BYTES = 2**63 - 1
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_DTYPE_SYNONYMS = {"half": "float16", "float": "float32"}


class Kind(Protocol):
    """The valid values of an option."""

    def parse(self, name: str, value: Any) -> Any:
        """The value in its final form.

        Raises:
            EngineStartError: the value is not valid; names the option and the value.
        """


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class OneOf:
    """A name or a number from a fixed set.

    Attributes:
        values: the set, in the order in which messages list it.
        optional: None is valid, too.
    """

    values: tuple[Any, ...]
    optional: bool = False

    def parse(self, name: str, value: Any) -> Any:
        if value in self.values or (self.optional and value is None):
            return value
        if _is_whole(self.values[0]):
            raise EngineStartError(f"{name} must be one of {self.values}, got {value!r}")
        known = ", ".join(("None",) * self.optional + self.values)
        raise EngineStartError(f"{name} {value!r} is not one of {known}")


@dataclass(frozen=True)
class DType(OneOf):
    """A dtype's name. torch's dtypes and vLLM's other names are valid, too."""

    def parse(self, name: str, value: Any) -> Any:
        text = str(value).removeprefix("torch.")
        return super().parse(name, _DTYPE_SYNONYMS.get(text, text))


@dataclass(frozen=True)
class Whole:
    """A whole number.

    Attributes:
        minimum: the smallest valid number.
        maximum: the largest valid number.
        optional: None is valid, too.
        words: the valid values in words, for messages.
    """

    minimum: int = 1
    maximum: int = 2**31 - 1
    optional: bool = False
    words: str = ""

    def parse(self, name: str, value: Any) -> Any:
        if value is None and self.optional:
            return None
        if _is_whole(value) and self.minimum <= value <= self.maximum:
            return value
        is_large = _is_whole(value) and value > self.maximum
        bound = f"at most {self.maximum:,}" if is_large else f"at least {self.minimum}"
        words = self.words or f"a whole number of {bound}"
        raise EngineStartError(f"{name} must be {words}, got {value!r}")


@dataclass(frozen=True)
class ModelLength(Whole):
    """A number of tokens. None, -1 and "auto" mean the model's length, or less if the KV cache
    holds less."""

    optional: bool = True

    def parse(self, name: str, value: Any) -> Any:
        return super().parse(name, None if value in (-1, "auto") else value)


@dataclass(frozen=True)
class Bytes:
    """A number of bytes, or text with a unit: 512M and 1GiB count in powers of 1,024, 1GB counts
    in powers of 1,000. None is valid, too."""

    def parse(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, str):
            size = parse_bytes(value)
            if size is not None and 1 <= size <= _MOST_BYTES:
                return size
        elif _is_whole(value) and 1 <= value <= _MOST_BYTES:
            return value
        raise EngineStartError(
            f"{name} must be a number of bytes of at least 1 and below 2**63, or text such as "
            f"'512M' or '1GiB', got {value!r}"
        )


@dataclass(frozen=True)
class Flag:
    """True or False; None, too, if `optional`."""

    optional: bool = False

    def parse(self, name: str, value: Any) -> Any:
        if isinstance(value, bool) or (value is None and self.optional):
            return value
        words = "None, True or False" if self.optional else "True or False"
        raise EngineStartError(f"{name} must be {words}, got {value!r}")


@dataclass(frozen=True)
class Number:
    """A number above 0.

    Attributes:
        maximum: the largest valid number.
        unit: the unit of the number, for messages; empty for a plain number.
        or_zero: 0 is valid, too.
    """

    maximum: float = float("inf")
    unit: str = ""
    or_zero: bool = False

    def parse(self, name: str, value: Any) -> Any:
        is_positive = _is_number(value) and 0 < value <= self.maximum and value != float("inf")
        if is_positive or (self.or_zero and _is_number(value) and value == 0):
            return value
        bound = "" if self.maximum == float("inf") else f" and at most {self.maximum:g}"
        least = "of at least 0" if self.or_zero else "above 0"
        words = f"a number{self.unit and f' of {self.unit}'} {least}{bound}"
        raise EngineStartError(f"{name} must be {words}, got {value!r}")


@dataclass(frozen=True)
class Device:
    """A device's name: "auto", "cpu", "cuda", "cuda:1"."""

    def parse(self, name: str, value: Any) -> Any:
        if _DEVICE.fullmatch(str(value)) is None:
            raise EngineStartError(
                f"{name} {value!r} is not one of auto, cpu, cuda, cuda:0, cuda:1 and so on"
            )
        return str(value)


@dataclass(frozen=True)
class Directory:
    """The path of a directory, which becomes absolute; None is valid, too. The code that uses the
    directory makes it, and checks it."""

    def parse(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, str | os.PathLike) and value:
            path = os.fspath(value)
            if isinstance(path, str) and path and "\0" not in path:
                return os.path.abspath(path)
        raise EngineStartError(f"{name} must be the path of a directory, got {value!r}")


@dataclass(frozen=True)
class Text:
    """A text of at least one character; None is valid, too, and with `or_flag` True and False."""

    or_flag: bool = False

    def parse(self, name: str, value: Any) -> Any:
        if value is None or (isinstance(value, str) and value):
            return value
        if isinstance(value, bool) and self.or_flag:
            return value
        words = "None, True, False or a text" if self.or_flag else "None or a text"
        raise EngineStartError(f"{name} must be {words}, got {value!r}")


@dataclass(frozen=True)
class Names:
    """A list of names, or a text that has commas between them. None is valid, too."""

    def parse(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        is_text = isinstance(value, str)
        given = [each.strip() for each in value.split(",")] if is_text else value
        is_list = isinstance(given, list | tuple | set | frozenset) and len(given) > 0
        if is_list and all(isinstance(each, str) and each for each in given):
            return tuple(dict.fromkeys(given))
        raise EngineStartError(f"{name} must be a list of names, got {value!r}")


@dataclass(frozen=True)
class Free:
    """Any value. The code that reads the option checks it."""

    def parse(self, name: str, value: Any) -> Any:
        return value


@dataclass(frozen=True)
class JsonObject:
    """A mapping that JSON can express, or the same as JSON text. None is valid, too."""

    def parse(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        try:
            found = json.loads(value if isinstance(value, str) else json.dumps(value))
        except (ValueError, TypeError) as problem:
            raise EngineStartError(f"{name} is no JSON: {problem}") from None
        if not isinstance(found, dict):
            raise EngineStartError(f"{name} must be a mapping, got {value!r}")
        return found


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table of options.

    Attributes:
        name: the keyword argument of `LLM`.
        annotation: its Python type, as source text.
        default: its default.
        help: one or two sentences about its effect, for every kind of user.
        kind: its valid values.
        reader: the name of the configuration dataclass that holds it.
        field: the name of the field in that dataclass.
        default_text: the default in words, if its value explains little; otherwise empty.
        flag: its option on the command line, such as "--max-num-seqs"; empty if it has none.
        in_llm: whether `LLM` accepts it. Otherwise only `shmllm engine start` does.
    """

    name: str
    annotation: str
    default: Any
    help: str
    kind: Kind
    reader: str
    field: str
    default_text: str
    flag: str
    in_llm: bool


def option(
    default: Default,
    help: str,
    kind: Kind,
    *,
    name: str = "",
    default_text: str = "",
    flag: str | None = None,
    in_llm: bool = True,
) -> Default:
    """Declare an option as a field of a configuration dataclass; see `Option`.

    Args:
        name: the option's name, if it is not the field's.
        flag: None derives it from the name.
    """
    metadata = {_KEY: (help, kind, name, default_text, flag, in_llm)}
    declared: Default = field(default=default, metadata=metadata)
    return declared


def options_in(section: type) -> Iterator[Option]:
    """The options that a configuration dataclass declares, in its order."""
    for each in fields(section):
        if _KEY in each.metadata:
            help, kind, name, default_text, flag, in_llm = each.metadata[_KEY]
            name = name or each.name
            yield Option(
                name=name,
                annotation=str(each.type),
                default=each.default,
                help=help,
                kind=kind,
                reader=section.__name__,
                field=each.name,
                default_text=default_text,
                flag=f"--{name.replace('_', '-')}" if flag is None else flag,
                in_llm=in_llm,
            )


class Section:
    """The base of the configuration dataclasses. It checks the options of a new object."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for each in options_in(type(self)):
            value = each.kind.parse(each.name, getattr(self, each.field))
            object.__setattr__(self, each.field, value)


def parse_bytes(text: str) -> int | None:
    """Parse a number of bytes, such as "512M" or "1.5 GiB". Returns None for any other text."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return None
    number, unit = float(found[1]), found[2].upper()
    if unit in ("", "B"):
        return int(number)
    return int(number * _UNIT_BYTES[unit]) if unit in _UNIT_BYTES else None
