"""The rows of batch files, the interfaces of inputs and formats, and their JSON encoding.

This module owns everything that all formats share. It must not know the field names of a format.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from shmllm.errors import RequestError
from shmllm.params.items import Modality

Messages = list[dict[str, Any]]
JsonObject = dict[str, Any]
Output = TypeVar("Output", contravariant=True)

DEEPEST = 100
RENAMED_PREFIX = "input_"
_TOO_DEEP = f"not usable: the JSON is nested more than {DEEPEST} deep"


@dataclass(slots=True)
class Row:
    """A row of an input.

    Attributes:
        line: its line number in the file, from 1.
        prompt: a text, a dict as `LLM.generate` takes it, or messages.
        items: the items of `prompt` that are named beside it, by modality: paths or URLs.
        sampling: the row's own sampling parameters.
        lora: the name of the row's adapter; None: what the command says; "": none.
        defaults: the format's default sampling parameters.
        template: keyword arguments of the chat template.
        identity: the row's id; the record begins with it.
        carried: fields that are copied to the record.
        request: further values that the format needs to make the record.
        error: the reason why the row cannot be run; None for a valid row.
    """

    line: int
    prompt: str | dict[str, Any] | Messages | None = None
    items: dict[Modality, list[str]] = field(default_factory=dict)
    sampling: JsonObject = field(default_factory=dict)
    lora: str | None = None
    defaults: JsonObject = field(default_factory=dict)
    template: JsonObject = field(default_factory=dict)
    identity: JsonObject = field(default_factory=dict)
    carried: JsonObject = field(default_factory=dict)
    request: JsonObject = field(default_factory=dict)
    error: str | None = None


class Rows(Protocol):
    """The rows of an input.

    Attributes:
        name: the input's name in messages.
        is_file: whether the rows can be iterated several times.
    """

    name: str
    is_file: bool

    def __iter__(self) -> Iterator[Row]: ...

    def count(self) -> tuple[int | None, int]:
        """The number of rows and the number of lines; (None, 0) for a pipe."""
        ...


class RowReader(Protocol):
    """Reads the objects of an input as rows."""

    def row(self, line: int, fields: Mapping[str, Any]) -> Row:
        """Makes a row from the fields of a line. It never raises: an error is in `Row.error`."""
        ...


class TextReader(RowReader, Protocol):
    """Reads plain lines, too."""

    def text_row(self, line: int, index: int, text: str) -> Row:
        """Makes a row from a line, which is its text. `index` counts the rows from 0."""
        ...


class Format(RowReader, Protocol[Output]):
    """Reads the objects of an input as rows, and makes records from results."""

    def record(self, row: Row, output: Output) -> JsonObject:
        """Makes the record of a row's result."""
        ...

    def failure(self, row: Row, message: str) -> JsonObject:
        """Makes the record of a row that failed."""
        ...

    def line_of(self, record: JsonObject) -> int | None:
        """The line number of a record's row; None if it is not a record of this format."""
        ...

    def is_failure(self, record: JsonObject) -> bool:
        """Whether a record holds an error."""
        ...

    def tag_of_row(self, row: Row) -> JsonObject:
        """The fields that a row shares with its record."""
        ...

    def tag_of_record(self, record: JsonObject) -> JsonObject:
        """The fields that a record shares with its row."""
        ...


AnyFormat = Format[Any]


def parse_object(line: bytes) -> JsonObject:
    """Parses a line that holds a JSON object.

    Raises:
        RequestError: the line does not hold a JSON object, or its nesting is too deep.
    """
    found = parse_json(line)
    if not isinstance(found, dict):
        raise RequestError("not a JSON object")
    return found


def parse_json(line: bytes) -> Any:
    """Parses a line that holds JSON.

    Raises:
        RequestError: the line does not hold JSON, or its nesting is too deep.
    """
    try:
        found = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise RequestError(f"not UTF-8: {error.reason} at byte {error.start + 1}") from error
    except ValueError as error:
        raise RequestError(f"not JSON: {error}") from error
    except RecursionError as error:
        raise RequestError(_TOO_DEEP) from error
    # JSON nested more deeply than Python's recursion limit could be read, but not written.
    if line.count(b"[") + line.count(b"{") > DEEPEST and _depth(found) > DEEPEST:
        raise RequestError(_TOO_DEEP)
    return found


def _depth(value: object) -> int:
    """The depth of nesting of lists and objects."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [x for one in level for x in (one.values() if isinstance(one, dict) else one)]
    return depth


def carried(
    fields: Mapping[str, Any], used: Collection[str], results: Collection[str]
) -> JsonObject:
    """The fields of a row that its record copies.

    A field that has the name of a result gets the prefix "input_".

    Args:
        fields: all fields of the row.
        used: the fields that the format uses.
        results: the names that a record has for results.
    """
    found = {}
    for name, value in fields.items():
        if name in used:
            continue
        new_name = name
        while new_name in results or (new_name != name and new_name in fields):
            new_name = RENAMED_PREFIX + new_name
        found[new_name] = value
    return found


def check_item_names(field: str, names: object) -> list[str]:
    """Returns the paths and URLs of items that a field of a row lists.

    Raises:
        RequestError: it lists something else.
    """
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise RequestError(f"{field!r} must be a list of paths and data URLs, got {shown(names)}")
    return names


def shown(value: object) -> str:
    """A value as JSON for a message, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def encode(record: JsonObject) -> bytes:
    """Encodes a record as one line of JSON.

    Values that JSON cannot hold become text; NaN and infinities become null.
    """
    try:
        text = _ENCODER.encode(record)
    except ValueError:
        text = _ENCODER.encode(_finite(record))
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # an unpaired surrogate, which only an escape can express
        return json.dumps(json.loads(text)).encode() + b"\n"


def fingerprint(tag: JsonObject) -> int:
    """A 32-bit checksum of a tag, independent of the order of its fields."""
    if not tag:
        return 0
    text = json.dumps(_finite(tag), sort_keys=True, default=_plain)
    return zlib.crc32(text.encode())


def _plain(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    isoformat = getattr(value, "isoformat", None)
    return str(isoformat() if isoformat is not None else value)


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_plain)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
