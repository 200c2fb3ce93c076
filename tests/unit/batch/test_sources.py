"""Inputs: files, compressed files and pipes, and the detection of their kind."""

from __future__ import annotations

import gzip
import io
import os
import threading

import pytest
from support.batch_helpers import write_rows

from shmllm.batch.native import NativeFormat
from shmllm.batch.sources import JsonRows, LineInput, PromptRows, SourceKind, TextRows, kind_of

CONTENT = b'\n{"prompt": "a"}\r\n  \t\n{"prompt": "b"}'


class Stdin:
    def __init__(self, content):
        self.buffer = io.BytesIO(content)


@pytest.fixture(params=["file", "gzip", "stdin", "fifo"])
def lines(request, tmp_path, monkeypatch):
    """The same lines from each kind of source."""
    if request.param == "stdin":
        monkeypatch.setattr("sys.stdin", Stdin(CONTENT))
        return LineInput("-")
    path = tmp_path / ("in.jsonl.gz" if request.param == "gzip" else "in")
    if request.param == "fifo":
        os.mkfifo(path)
        threading.Thread(target=path.write_bytes, args=(CONTENT,)).start()
    else:
        path.write_bytes(gzip.compress(CONTENT) if request.param == "gzip" else CONTENT)
    return LineInput(str(path))


def test_rows_have_the_numbers_of_their_lines(lines):
    assert kind_of(lines) is SourceKind.JSON_LINES
    rows = list(JsonRows(lines, NativeFormat()))
    assert [(row.line, row.prompt) for row in rows] == [(2, "a"), (4, "b")]


def test_a_pipe_is_not_counted(tmp_path):
    os.mkfifo(tmp_path / "in")
    threading.Thread(target=(tmp_path / "in").write_bytes, args=(CONTENT,)).start()
    lines = LineInput(str(tmp_path / "in"))
    assert lines.count() == (None, 0)
    assert len(list(lines)) == 2


def test_a_file_can_be_counted_and_read_twice(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(CONTENT)
    lines = LineInput(str(path))
    assert lines.is_file
    assert lines.count() == (2, 4)
    assert list(lines) == list(lines)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("in.jsonl", b"text", SourceKind.JSON_LINES),
        ("in.ndjson", b"", SourceKind.JSON_LINES),
        ("in.txt", b'{"prompt": "a"}\n', SourceKind.JSON_LINES),
        ("in.txt", b'\n \n{"prompt": "a"}\n', SourceKind.JSON_LINES),
        ("in.txt", b'\xef\xbb\xbf{"prompt": "a"}\n', SourceKind.JSON_LINES),
        ("in.txt", b'first\n{"prompt": "a"}\n', SourceKind.TEXT),
        ("in.txt", b"{ not json\n", SourceKind.TEXT),
        ("in.txt", b"[1, 2]\n", SourceKind.TEXT),
        ("in.txt", b'"text"\n', SourceKind.TEXT),
        ("in.txt", b"", SourceKind.TEXT),
    ],
)
def test_the_kind_follows_from_the_name_or_the_first_line(tmp_path, name, content, kind):
    (tmp_path / name).write_bytes(content)
    assert kind_of(LineInput(str(tmp_path / name))) is kind


@pytest.mark.parametrize("source", ["file", "pipe"])
@pytest.mark.parametrize(
    ("content", "numbers"),
    [
        (b"\xef\xbb\xbf\r\n{}\n", [2]),
        (b"\xef\xbb\xbf \n\n{}", [3]),
        (b"\xef\xbb\xbf{}\n\xef\xbb\xbf\n", [1, 2]),
        (b"\xef\xbb\xbf", []),
        (b"", []),
    ],
)
def test_a_line_with_only_a_byte_order_mark_is_blank(
    tmp_path, monkeypatch, source, content, numbers
):
    monkeypatch.setattr("sys.stdin", Stdin(content))
    (tmp_path / "in").write_bytes(content)
    lines = LineInput("-" if source == "pipe" else str(tmp_path / "in"))
    first = lines.first()
    found = list(lines)
    assert [number for number, _ in found] == numbers
    assert first == (found[0][1] if found else None)
    assert lines.count()[0] == (len(numbers) if source == "file" else None)


def test_a_byte_order_mark_is_removed_from_the_first_line(tmp_path):
    (tmp_path / "in").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    (row,) = JsonRows(LineInput(str(tmp_path / "in")), NativeFormat())
    assert row.prompt == "a"


def test_an_invalid_line_becomes_a_row_with_an_error(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{\n\xff\n{"prompt": "b"}\n')
    rows = list(JsonRows(LineInput(str(path)), NativeFormat()))
    assert [bool(row.error) for row in rows] == [False, True, True, False]
    assert [row.line for row in rows] == [1, 2, 3, 4]


def test_plain_lines_are_prompts(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes("a\n\n  né \r\n".encode() + b"\xff\n{")
    rows = list(TextRows(LineInput(str(path)), NativeFormat()))
    assert [(row.line, row.prompt) for row in rows] == [(1, "a"), (3, "  né "), (4, None), (5, "{")]
    assert [row.carried["index"] for row in rows] == [0, 1, 2, 3]
    assert "not UTF-8" in (rows[2].error or "")


def test_prompts_of_a_list_are_rows():
    rows = PromptRows(["a", "b"], NativeFormat())
    assert [(row.line, row.prompt) for row in rows] == [(1, "a"), (2, "b")]
    assert rows.count() == (2, 2)


@pytest.mark.parametrize("size", [5, 20, 200])
def test_the_error_of_a_damaged_compressed_file_names_it(tmp_path, size):
    path = tmp_path / "in.jsonl.gz"
    whole = gzip.compress(os.urandom(400).hex().encode())
    path.write_bytes(whole[:size])
    with pytest.raises(OSError, match=r"in\.jsonl\.gz|gzip"):
        list(LineInput(str(path)))


def test_a_missing_file_raises_an_os_error():
    with pytest.raises(FileNotFoundError, match="/no/such"):
        LineInput("/no/such/file")


def test_rows_are_read_one_at_a_time(tmp_path):
    path = write_rows(tmp_path / "in.jsonl", ({"prompt": "x" * 100} for _ in range(1000)))
    iterator = iter(JsonRows(LineInput(str(path)), NativeFormat()))
    assert next(iterator).line == 1
