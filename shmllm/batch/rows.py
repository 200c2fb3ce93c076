"""A row of a batch file, and JSON as such files hold it.

Owns what all formats share. Must not know any format's field names.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from shmllm.errors import RequestError
from shmllm.outputs.request import RequestOutput

Messages = list[dict[str, Any]]
JsonObject = dict[str, Any]

DEEPEST = 100
_TOO_DEEP = f"not usable: the JSON is nested more than {DEEPEST} deep"


@dataclass(slots=True)
class Row:
    """
    Attributes:
        line: where it stands in the file, from 1.
        prompt: a text, a dict as `LLM.generate` takes it, or messages.
        sampling: its own sampling parameters.
        defaults: sampling parameters that the format has, unless somebody says otherwise.
        template: options of the chat template.
        identity: what names it to its owner; comes back first.
        carried: what comes back with the result as it is.
        request: what else its format has to remember.
        error: why it cannot be run.
    """

    line: int
    prompt: str | dict[str, Any] | Messages | None = None
    sampling: JsonObject = field(default_factory=dict)
    defaults: JsonObject = field(default_factory=dict)
    template: JsonObject = field(default_factory=dict)
    identity: JsonObject = field(default_factory=dict)
    carried: JsonObject = field(default_factory=dict)
    request: JsonObject = field(default_factory=dict)
    error: str | None = None


class Rows(Protocol):
    """The rows of an input, which can be gone through several times if `is_file`."""

    name: str
    is_file: bool

    def __iter__(self) -> Iterator[Row]: ...

    def count(self) -> tuple[int, int]:
        """(rows, lines)."""
        ...


class Format(Protocol):
    """How an object of the input is read, and what is written about it."""

    def row(self, line: int, fields: Mapping[str, Any]) -> Row:
        """Never raises: what is wrong is the row's `error`."""
        ...

    def record(self, row: Row, output: RequestOutput) -> JsonObject: ...

    def failure(self, row: Row, message: str) -> JsonObject: ...

    def line_of(self, record: JsonObject) -> int | None:
        """The line that a record is about; None if it is no record of this format."""
        ...

    def is_failure(self, record: JsonObject) -> bool: ...

    def tag_of_row(self, row: Row) -> JsonObject:
        """What a row and its record have in common."""
        ...

    def tag_of_record(self, record: JsonObject) -> JsonObject: ...


def parse_object(line: bytes) -> JsonObject:
    """A line that holds a JSON object.

    Raises:
        RequestError: it does not.
    """
    try:
        found = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise RequestError(f"not UTF-8: {error.reason} at byte {error.start + 1}") from error
    except ValueError as error:
        raise RequestError(f"not JSON: {error}") from error
    except RecursionError as error:
        raise RequestError(_TOO_DEEP) from error
    if not isinstance(found, dict):
        raise RequestError("not a JSON object")
    # What is nested deeper than Python's own limit allows could be read, but not written.
    if line.count(b"[") + line.count(b"{") > DEEPEST and _depth(found) > DEEPEST:
        raise RequestError(_TOO_DEEP)
    return found


def _depth(value: object) -> int:
    """How many lists and objects lie inside each other."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [x for one in level for x in (one.values() if isinstance(one, dict) else one)]
    return depth


def encode(record: JsonObject) -> bytes:
    """A record as one line. What JSON cannot hold becomes text, or null (NaN, infinities)."""
    try:
        text = _ENCODER.encode(record)
    except ValueError:
        text = _ENCODER.encode(_finite(record))
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can express
        return json.dumps(json.loads(text)).encode() + b"\n"


def fingerprint(tag: JsonObject) -> int:
    """32 bits that equal tags share, whatever the order of their names."""
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
