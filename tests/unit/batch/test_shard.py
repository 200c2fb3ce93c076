"""Shards: which rows each takes, and what is not a shard."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
from support.batch_helpers import json_rows, write_rows

from shmllm.batch.native import NativeFormat
from shmllm.batch.parameters import seed_of
from shmllm.batch.shard import Shard, ShardRows
from shmllm.batch.sources import JsonRows, LineInput
from shmllm.errors import RequestError

ROWS = [{"prompt": "a"}, "", "bad", {"prompt": "b"}, "  ", {"prompt": "c"}, {"prompt": "d"}]
LINES = [1, 3, 4, 6, 7]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_each_row_is_in_one_shard_and_keeps_its_line(tmp_path, count):
    rows = json_rows(write_rows(tmp_path / "in.jsonl", ROWS))
    found = []
    for index in range(count):
        shard = ShardRows(rows, Shard(index, count))
        lines = [row.line for row in shard]
        assert lines == LINES[index::count]
        assert shard.count() == (len(lines), len(ROWS))
        found += lines
    assert sorted(found) == LINES


def test_a_pipe_is_divided_without_knowing_its_length(monkeypatch):
    class Stdin:
        buffer = io.BytesIO(b'{"prompt": "a"}\n' * 5)

    monkeypatch.setattr("sys.stdin", Stdin)
    shard = ShardRows(JsonRows(LineInput("-"), NativeFormat()), Shard(1, 2))
    assert shard.count() == (None, 0)
    assert not shard.is_file
    assert shard.name == "shard 1/2 of standard input"
    assert [row.line for row in shard] == [2, 4]


@pytest.mark.parametrize(
    ("text", "shard"), [("0/1", Shard(0, 1)), ("7/8", Shard(7, 8)), ("003/010", Shard(3, 10))]
)
def test_shards_are_read(text, shard):
    assert Shard.parse(text) == shard


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0/0", "0/0: there must be at least one shard"),
        ("3/2", "3/2: shards are counted from 0, so the last of 2 is 1/2"),
        ("8/8", "8/8: shards are counted from 0, so the last of 8 is 7/8"),
        *((text, "is not K/N") for text in ("", "/8", "1/", "1", "a/b", "-1/2", "1/2/3", "1 / 2")),
        *((text, "is not K/N") for text in ("1.0/2", "٣/٨", "0/2\n", "9" * 5000 + "/1")),
    ],
)
def test_what_is_no_shard_is_refused(text, words):
    with pytest.raises(RequestError, match=words):
        Shard.parse(text)


def test_lines_have_seeds_that_are_far_apart():
    seeds = [seed_of(line) for line in range(1, 2000)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    ordered = sorted(seeds)
    assert min(after - before for before, after in pairwise(ordered)) > 2**32
