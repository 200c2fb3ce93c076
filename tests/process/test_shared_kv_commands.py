"""`shmllm kv`, and the statistics of a shared KV cache: an engine is killed and started again."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from support.commands import command
from support.engines import attached, named_engine
from support.waiting import PATIENCE_S, holds_within

from shmllm import LLM, RequestOutput, SamplingParams
from shmllm.compat.vllm_metrics import as_metrics
from shmllm.frontend.model_files import bundled_model

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks", "own_regions")]

PROMPT = "def fibonacci(n):\n" * 12
GREEDY = SamplingParams(temperature=0, max_tokens=4)
SHARED: dict[str, Any] = {"shared_kv_cache_bytes": 2**24}
HERE: dict[str, Any] = {
    "multiprocess": False,
    "kv_cache_memory_bytes": 2**26,
    "num_threads": 1,
    "dtype": "float32",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A copy of the bundled model."""
    directory = tmp_path / "copy-of-tiny"
    shutil.copytree(bundled_model("tiny"), directory)
    return str(directory)


def run(*arguments: str) -> tuple[str, str]:
    done = command(*arguments)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode(), done.stderr.decode()


def records(model: str) -> list[dict[str, Any]]:
    found = json.loads(run("kv", "ls", "--json")[0])
    return [each for each in found if each["model_directory"] == model]


def ask(llm: LLM) -> RequestOutput:
    [output] = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    return output  # type: ignore[return-value]


def test_a_killed_engine_leaves_its_prefixes_to_the_next_one_until_they_are_cleared(
    model: str, tmp_path: Path
) -> None:
    with named_engine(tmp_path, model=model, **SHARED) as (name, pid):
        with attached(name) as llm:
            first = ask(llm)
            assert llm.facts.shared_kv_cache_bytes == 2**24
            ask(llm)  # a step copies what the one before it has computed
            assert llm.get_metrics()["shared_kv_cache_bytes"] == 2**24
            assert holds_within(lambda: llm.get_metrics()["shared_blocks_saved"] > 0, PATIENCE_S)
        listed, _ = run("engine", "ls")
        assert "16.0 MiB" in listed
        [record] = records(model)
        assert (record["pid"], record["state"], record["place"]) == (pid, "in use", "0")
        assert (record["model"], record["problem"]) == ("copy-of-tiny", None)
        assert 0 < record["blocks"] < record["blocks_total"]
        assert record["bytes"] > 2**23
        key = record["key"]
        out, told = run("kv", "clear", key)
        assert out == ""
        assert f"kept {key}/0" in told
        assert f"shmllm engine stop {name}" in told
        os.kill(pid, signal.SIGKILL)
        assert holds_within(lambda: records(model)[0]["pid"] is None, PATIENCE_S)

    table, _ = run("kv", "ls")
    line = next(line for line in table.splitlines() if key in line)
    assert "ended" in line
    assert "without a living engine" in table.splitlines()[-1]
    assert "shmllm kv ls" in run("ipc", "ls")[1]
    out, _ = run("kv", "gc")
    assert key not in out, "it was used just now"
    out, told = run("kv", "gc", "--older-than", "0", "--dry-run")
    assert f"would remove {key}/0" in out
    assert "nothing was removed" in told
    assert [each["key"] for each in records(model)] == [key]

    with LLM(model, **HERE, **SHARED) as llm:
        again = ask(llm)
        counted = llm.get_metrics()
        assert [(each["key"], each["pid"]) for each in records(model)] == [(key, os.getpid())]
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.num_cached_tokens is not None
    assert again.num_cached_tokens >= 64
    assert counted["shared_hit_tokens"] == counted["prefix_hit_tokens"] == again.num_cached_tokens
    assert again.prompt_token_ids is not None
    assert counted["shared_query_tokens"] == len(again.prompt_token_ids)
    assert counted["shared_blocks_lent"] > 0
    metrics = {each.name: getattr(each, "value", None) for each in as_metrics(counted, model)}
    assert metrics["vllm:external_prefix_cache_hits"] == again.num_cached_tokens
    assert metrics["vllm:prefix_cache_hits"] == 0

    out, told = run("kv", "clear", "copy-of-tiny")
    assert f"removed {key}/0" in out
    assert "freed" in told
    assert records(model) == []
    done = command("kv", "clear", key)
    assert done.returncode == 2
    assert key in done.stderr.decode()


def test_gc_removes_what_was_not_used_for_a_time(model: str) -> None:
    with LLM(model, **HERE, **SHARED) as llm:
        ask(llm)
        own = llm.get_metrics()
        assert (own["shared_hit_tokens"], own["shared_kv_cache_bytes"]) == (0, 2**24)
        [record] = records(model)
        assert record["pid"] == os.getpid()
    path = Path(record["path"])
    name = f"{record['key']}/{record['place']}"
    os.utime(path, (0, 0))
    out, told = run("kv", "gc", "--older-than", "400000")
    assert name in out
    assert "freed" in told
    assert not path.parent.exists()
