"""Speculative decoding as users of the commands meet it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import command
from support.engines import attached, named_engine, slow_steps
from support.programs import CLI, Completed, python
from support.terminals import opened_terminal
from support.variants import slow
from support.waiting import PATIENCE_S, holds_within

from shmllm import LLM, AsyncLLM, RequestOutput, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

SMALL = ("-m", "tiny", "--num-threads", "1", "--kv-cache-memory-bytes", str(2**26))
TEXT = "x = 1\n" * 12
DRAFTING = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}


def generate(*arguments: str) -> Completed:
    return command("generate", TEXT, "--max-tokens", "40", *SMALL, *arguments)


@pytest.mark.parametrize(
    "sampling", [slow(("--temperature", "0")), ("--temperature", "1", "--seed", "5")]
)
def test_drafts_do_not_change_the_text(sampling: tuple[str, ...]) -> None:
    plain = generate(*sampling)
    assert plain.returncode == 0, plain.stderr.decode()
    assert b"drafts by" not in plain.stderr
    for method, said in (("ngram", b"ngram, up to 3"), ("suffix", b"suffix, up to 3")):
        drafted = generate("--draft", method, "--draft-tokens", "3", *sampling)
        assert (drafted.returncode, drafted.stdout) == (0, plain.stdout)
        assert b"drafts by " + said in drafted.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--draft", "./ngarm"), "shmllm: speculative_config: model './ngarm' not found"),
        (("--draft-tokens", "3"), "Error: --draft-tokens needs --draft"),
        (("--draft", "ngram", "--draft-tokens", "33"), "Error: Invalid value for '--draft-tokens'"),
    ],
)
def test_a_bad_value_is_one_error(arguments: tuple[str, ...], message: str) -> None:
    done = generate(*arguments)
    assert done.returncode == 2
    assert done.stdout == b""
    errors = [line for line in done.stderr.decode().splitlines() if "rror" in line or "not" in line]
    assert len(errors) == 1
    assert errors[0].startswith(message)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of an engine that has drafted."""
    directory = tmp_path_factory.mktemp("drafting")
    options = {"speculative_config": DRAFTING, "allow_callables": True}
    with named_engine(directory, **options) as (name, _):
        with LLM.attach(name) as llm:
            config = llm.llm_engine.vllm_config.speculative_config
            assert (config.method, config.num_speculative_tokens) == ("ngram", 4)
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
            llm.generate(TEXT, params, use_tqdm=False)
            assert holds_within(lambda: llm.get_metrics()["requests_finished"] == 1, PATIENCE_S)
        yield name


def records(*arguments: str) -> list[dict[str, Any]]:
    done = python("-c", CLI, *arguments)
    assert done.returncode == 0, done.stderr.decode()
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_engine_ls_shows_who_drafts(engine: str) -> None:
    (record,) = [each for each in records("engine", "ls", "--json") if each["name"] == engine]
    assert record["speculation"] == "ngram, up to 4"
    assert record["draft_tokens"] > 0
    lines = command("engine", "ls").stdout.decode().splitlines()
    assert "drafts" in lines[0]
    assert "ngram, up to 4" in next(line for line in lines if line.startswith(f"{engine} "))


def test_top_shows_acceptance(engine: str) -> None:
    (record,) = records("top", engine, "--once", "--json", "--interval", "0.1")
    rate, length = record["draft_acceptance_rate"], record["mean_acceptance_length"]
    assert rate["interval"] is length["interval"] is None
    assert 0 < rate["since_start"] <= 1 < length["since_start"] <= 5
    with opened_terminal("top", engine, "--interval", "0.2", columns=110, lines=36) as seen:
        shown = f"{100 * rate['since_start']:.1f} % in all"
        assert seen.shows(lambda text: "drafted" in text and shown in text), seen.text()
        seen.type(b"q")
        assert seen.ends() == 0


COUNTERS = ("draft_tokens", "accepted_tokens")


def grown(llm: LLM, before: dict[str, int], num_requests: int) -> list[int]:
    """How COUNTERS grew while this many requests ran."""
    end = before["requests_finished"] + num_requests
    assert holds_within(lambda: llm.get_metrics()["requests_finished"] == end, PATIENCE_S)
    after = llm.get_metrics()
    return [after[name] - before[name] for name in COUNTERS]


def test_the_drafts_of_requests_are_those_that_the_engine_counts(engine: str) -> None:
    common: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=1, seed=1, n=3, **common),
        SamplingParams(temperature=0, max_tokens=1),
    ]
    with attached(engine) as llm:
        before = llm.get_metrics()
        outputs = llm.generate([TEXT] * 3, params, use_tqdm=False)
        growth = grown(llm, before, 5)
    metrics: list[Any] = [output.metrics for output in outputs]
    counts = [(each.num_draft_tokens, each.num_accepted_tokens) for each in metrics]
    assert [sum(each) for each in zip(*counts, strict=True)] == growth
    assert all(drafted >= accepted > 0 for drafted, accepted in counts[:2])
    assert counts[2] == (0, 0)


def test_the_drafts_of_aborted_requests_are_known(engine: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)

    async def last_output(llm: AsyncLLM, request_id: str) -> RequestOutput:
        outputs = [each async for each in llm.generate(TEXT, params, request_id=request_id)]
        return outputs[-1]

    async def main() -> list[RequestOutput]:
        async with AsyncLLM.attach(engine) as llm:
            tasks = [asyncio.create_task(last_output(llm, name)) for name in ("one", "two")]
            start = llm.get_metrics()["accepted_tokens"]
            while llm.get_metrics()["accepted_tokens"] < start + 10:
                await asyncio.sleep(0.01)
            await llm.abort("one")
            await llm.pause_generation(mode="abort")
            await llm.resume_generation()
            return await asyncio.gather(*tasks)

    with attached(engine) as llm, slow_steps(llm):
        before = llm.get_metrics()
        outputs = asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
        growth = grown(llm, before, 2)
    assert [each.outputs[0].finish_reason for each in outputs] == ["abort", "abort"]
    metrics: list[Any] = [output.metrics for output in outputs]
    counts = [(each.num_draft_tokens, each.num_accepted_tokens) for each in metrics]
    assert [sum(each) for each in zip(*counts, strict=True)] == growth


def test_a_stop_string_leaves_the_drafts_of_a_request_unknown(engine: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, stop=["1"])
    with attached(engine) as llm:
        (output,) = llm.generate(TEXT, params, use_tqdm=False)
    assert output.outputs[0].stop_reason == "1"
    assert output.metrics is not None
    assert output.metrics.num_draft_tokens is output.metrics.num_accepted_tokens is None


def test_the_line_after_an_answer_shows_acceptance(engine: str) -> None:
    with attached(engine) as llm:
        before = llm.get_metrics()
        options = ("--temperature", "0", "--ignore-eos", "--max-tokens", "40")
        done = command("chat", "--attach", engine, *options, input=b"x = 1 " * 12)
        assert done.returncode == 0, done.stderr.decode()
        drafted, accepted = grown(llm, before, 1)
    line = re.search(r"\[40 tokens, .*\]", done.stderr.decode())
    assert line is not None
    assert f", {100 * accepted / drafted:.0f} % of {drafted} drafted tokens accepted, " in line[0]


def test_bench_shows_steps_and_acceptance(tmp_path: Path, engine: str) -> None:
    target, prompts = tmp_path / "result.json", tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": TEXT}) + "\n")
    done = command(
        *("bench", "throughput", "--attach", engine, "--num-prompts", "1"),
        *("--num-iters", "1", "--num-iters-warmup", "1", "--output-len", "40"),
        *("--dataset-name", "custom", "--dataset-path", str(prompts)),
        *("--output-json", str(target)),
    )
    assert done.returncode == 0, done.stderr.decode()
    heading = done.stdout.decode().splitlines()[0]
    assert "steps  drafts accepted  tokens/request and step" in heading
    record = json.loads(target.read_text())
    assert record["facts"]["speculative_method"] == "ngram"
    (found,) = record["results"]
    assert 0 < found["accepted_tokens"] <= found["draft_tokens"]
    assert found["draft_acceptance_rate"] == found["accepted_tokens"] / found["draft_tokens"]
    assert found["num_steps"] == 40 - found["accepted_tokens"]
    assert found["tokens_per_request_and_decode_step"] == pytest.approx(
        39 / (found["num_steps"] - 1)
    )


def test_a_command_cannot_change_who_drafts_in_a_running_engine(engine: str) -> None:
    done = command("generate", TEXT, "--attach", engine, "--draft", "suffix")
    assert done.returncode == 2
    assert f"Error: --draft is for starting an engine; '{engine}' runs already" in (
        done.stderr.decode()
    )
