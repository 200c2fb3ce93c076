"""`shmllm generate --shard K/N`: shards together are one run, and each can be resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import commands
from support.programs import CLI, SLOW_CLI, Completed, python, start_source
from support.waiting import PATIENCE_S, holds_within

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

SAMPLED = ("--temperature", "1", "--max-tokens", "8", "--ignore-eos")
NUM_ROWS = 10
Shmllm = Callable[..., Completed]
Records = list[dict[str, Any]]


@pytest.fixture
def shmllm(engine: str) -> Shmllm:
    def run(*arguments: str | Path, **options: Any) -> Completed:
        return commands.shmllm("generate", "--attach", engine, *map(str, arguments), **options)

    return run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Rows with the same prompt, so that only their seeds make them differ; one has its own."""
    rows: list[Any] = [{"id": f"row-{i}", "prompt": "x =", "k": i} for i in range(NUM_ROWS)]
    rows[3]["seed"] = 7
    rows[5] |= {"n": 2}
    rows[6] = {"id": "bad"}
    lines = [json.dumps(row) for row in rows]
    lines.insert(4, "")
    path = tmp_path / "in.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def results(*texts: bytes) -> Records:
    """Records in the order of their lines, without what tells about the cache."""
    found = [json.loads(line) for text in texts for line in text.splitlines()]
    for record in found:
        record.pop("num_cached_tokens", None)
    return sorted(found, key=lambda record: record["line"])


@pytest.mark.parametrize("count", [2, 3, 12])
def test_shards_together_are_the_whole_run(
    shmllm: Shmllm, source: Path, tmp_path: Path, count: int
) -> None:
    """Also with more shards than rows: the last ones have nothing to do."""
    whole = shmllm("-i", source, *SAMPLED)
    expected = results(whole.stdout)
    assert len({record.get("text") for record in expected}) > NUM_ROWS // 2
    parts = []
    for index in range(count):
        target = tmp_path / f"out-{index}.jsonl"
        done = shmllm("-i", source, "-o", target, "--shard", f"{index}/{count}", *SAMPLED)
        assert done.returncode == int(b'"bad"' in target.read_bytes()), done.stderr.decode()
        parts.append(target.read_bytes())
        assert (b"has no rows" in done.stderr) is (index >= NUM_ROWS)
    assert results(*parts) == expected
    assert max(map(len, map(results, parts))) - min(map(len, map(results, parts))) <= 1


def test_pipes_and_lines_of_text_are_divided(shmllm: Shmllm, tmp_path: Path) -> None:
    lines = b"import os\n\nclass\nx =\n"
    whole = shmllm("-i", "-", "--json", *SAMPLED, input=lines)
    parts = [shmllm("-i", "-", "--shard", f"{k}/2", *SAMPLED, input=lines) for k in range(2)]
    assert [[r["index"] for r in results(part.stdout)] for part in parts] == [[0, 2], [1]]
    assert results(*(part.stdout for part in parts)) == results(whole.stdout)
    empty = shmllm("-i", "-", "--shard", "3/4", *SAMPLED, input=lines)
    assert (empty.returncode, empty.stdout) == (0, b"")


def test_prompts_as_arguments_are_divided(shmllm: Shmllm) -> None:
    prompts = ("import os", "class", "x =")
    whole = shmllm(*prompts, "--json", *SAMPLED)
    parts = [shmllm(*prompts, "--shard", f"{k}/2", *SAMPLED) for k in range(2)]
    assert results(*(part.stdout for part in parts)) == results(whole.stdout)


def test_resume_takes_the_output_of_its_own_shard_only(
    shmllm: Shmllm, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.jsonl"
    job = ("-i", source, "-o", target, *SAMPLED)
    shmllm(*job, "--shard", "0/2")
    before = target.read_bytes()
    again = shmllm(*job, "--shard", "0/2", "--resume")
    assert target.read_bytes() == before
    assert again.returncode == 1  # one of its rows is bad
    for shard, words in (("1/2", "is not empty"), ("1/2", "5 records belong to no row of shard")):
        resume = () if "empty" in words else ("--resume",)
        done = shmllm(*job, "--shard", shard, *resume)
        assert done.returncode == 2
        assert words in done.stderr.decode()
        assert target.read_bytes() == before


def test_a_job_of_all_rows_completes_joined_shards(
    shmllm: Shmllm, source: Path, tmp_path: Path
) -> None:
    """A shard is lost: its rows are what is missing in the others' outputs."""
    expected = results(shmllm("-i", source, *SAMPLED).stdout)
    joined = tmp_path / "joined.jsonl"
    joined.write_bytes(
        b"".join(shmllm("-i", source, "--shard", f"{k}/3", *SAMPLED).stdout for k in (2, 0))
    )
    shmllm("-i", source, "-o", joined, "--resume", *SAMPLED)
    assert results(joined.read_bytes()) == expected


def test_a_parquet_shard_without_rows_is_a_parquet_file(shmllm: Shmllm, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow, of the extra parquet, is missing")
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is missing")
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["import os"]}), source)
    for index, num_rows in enumerate((1, 0)):
        target = tmp_path / f"out-{index}.parquet"
        done = shmllm("-i", source, "-o", target, "--shard", f"{index}/2", *SAMPLED)
        assert done.returncode == 0, done.stderr.decode()
        assert pq.read_table(target).num_rows == num_rows


@pytest.mark.parametrize("text", ["0/0", "3/2", "2/2", "-1/2", "one/two", "/2", ""])
def test_a_bad_shard_is_one_line(shmllm: Shmllm, source: Path, tmp_path: Path, text: str) -> None:
    done = shmllm("-i", source, "-o", tmp_path / "out.jsonl", "--shard", text)
    assert done.returncode == 2
    lines = [x for x in done.stderr.decode().splitlines() if not re.match(r"Usage: |Try '|$", x)]
    assert len(lines) == 1
    assert "--shard" in lines[0]
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.slow
def test_a_killed_shard_resumes(tmp_path: Path) -> None:
    rows = [{"id": i, "prompt": f"x{i} ="} for i in range(40)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--temperature", "1", "--max-tokens", "24", "--ignore-eos", "--num-threads", "1")
    job = ["generate", "-i", str(source), "--shard", "1/2", "--max-num-seqs", "2", *options]
    expected = python("-c", CLI, *job, timeout=PATIENCE_S)
    assert expected.returncode == 0, expected.stderr.decode()

    job += ["-o", str(target), "--resume"]
    killed = start_source(SLOW_CLI, *job, stderr=subprocess.PIPE)
    try:
        assert holds_within(
            lambda: target.exists() and target.read_bytes().count(b"\n") >= 3, PATIENCE_S
        )
        os.kill(killed.pid, signal.SIGKILL)
    finally:
        killed.kill()
        killed.communicate(timeout=PATIENCE_S)
    assert 3 <= target.read_bytes().count(b"\n") < 20
    done = python("-c", CLI, *job, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr.decode()
    assert results(target.read_bytes()) == results(expected.stdout)
