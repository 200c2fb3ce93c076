"""The JSON of batch files: which lines are accepted, and that a record is one valid line."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal

import pytest

from shmllm.batch.rows import encode, fingerprint, parse_object
from shmllm.errors import RequestError


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "not JSON: .*column 2"),
        (b'{"a": 1} x', "not JSON: Extra data"),
        (b"text", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"5", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": "\xff"}', "not UTF-8: invalid start byte at byte 8"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON: .*digits"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested more than 100 deep"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "nested more than 100 deep"),
        (b'{"a": ' + b'{"b": ' * 500 + b"1" + b"}" * 500 + b"}", "nested more than 100 deep"),
        (b'{"prompt": "x"', "not JSON"),
    ],
    ids=range(12),
)
def test_a_line_without_an_object_is_refused_with_a_reason(line, words):
    with pytest.raises(RequestError, match=words):
        parse_object(line)


def test_an_object_is_parsed():
    line = '{"a": [1, 2.5, null, true, "né"], "b": {"c": "\\n"}}'
    assert parse_object(line.encode()) == json.loads(line)


@pytest.mark.parametrize(
    "line", [b'{"a": ' + b"[" * 99 + b"]" * 99 + b"}", b'{"a": [' + b"[]," * 500 + b"[]]}"]
)
def test_json_within_the_depth_limit_is_read_and_written(line):
    found = parse_object(line)
    assert json.loads(encode(found)) == found == json.loads(line)
    assert fingerprint(found) == fingerprint(json.loads(encode(found)))


def strictly(line: bytes):
    """Parses a line like a reader that does not accept NaN."""

    def refuse(name):
        raise AssertionError(name)

    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    return json.loads(line.decode(), parse_constant=refuse)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("né\u2028\x00\n", "né\u2028\x00\n"),
        ("\ud800", "\ud800"),
        (float("nan"), None),
        ([{"a": float("-inf")}, (1, 2)], [{"a": None}, [1, 2]]),
        (datetime.date(2024, 2, 29), "2024-02-29"),
        (datetime.datetime(2024, 2, 29, 1, 2, 3), "2024-02-29T01:02:03"),
        (Decimal("1.10"), "1.10"),
        (b"\xff\x00", "/wA="),
        (2**70, 2**70),
    ],
    ids=repr,
)
def test_a_record_with_any_value_is_one_valid_line(value, expected):
    assert strictly(encode({"x": value})) == {"x": expected}


def test_text_is_written_without_escapes():
    assert encode({"x": "né"}) == b'{"x": "n\xc3\xa9"}\n'


@pytest.mark.parametrize(
    "value", ["\ud800", float("nan"), 1.5, [1, {"b": None}], datetime.date(2024, 1, 1), Decimal(1)]
)
def test_the_fingerprint_survives_writing_and_reading(value):
    tag = {"id": 7, "x": value}
    assert fingerprint(json.loads(encode(tag))) == fingerprint(tag)
    assert fingerprint({"x": value, "id": 7}) == fingerprint(tag)
    assert fingerprint({"id": 8, "x": value}) != fingerprint(tag)
