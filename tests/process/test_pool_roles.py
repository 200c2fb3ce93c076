"""A pool of an engine that computes prompts and one that decodes: the rows of one engine, whatever
ends in between."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import without_leaks
from support.commands import command
from support.engines import held_steps, named_engine
from support.pools import (
    KINDS,
    OPTIONS,
    deltas,
    immortal_pools,
    joined,
    params_of,
    pids_of,
    rows,
    two_engines,
)
from support.variants import slow
from support.waiting import wait_until

from shmllm import LLM, EngineStartError, SamplingParams
from shmllm.client.phases import Phase

pytestmark = pytest.mark.process

PREFILL, DECODE = 0, 1
SHARED: dict[str, Any] = {"shared_kv_cache_bytes": 2**24}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
_numbers = iter(range(1000, 10**9, 1000))
_seeds = iter(range(10**9))


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    """One engine with the same model."""
    with LLM(multiprocess=False, num_threads=1, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def engines(compiled_kernels: None) -> Iterator[LLM]:
    options = {"data_parallel_size": 2, "prefill_engines": 1, "num_threads": 2}
    with without_leaks(), immortal_pools(), LLM(**options, **OPTIONS, **SHARED) as llm:
        yield llm


@pytest.fixture
def pool(engines: LLM) -> Iterator[LLM]:
    """Two engines, which a test may kill, but must leave idle."""
    with two_engines(engines):
        yield engines
    flights = engines._client._flights
    assert not flights._flights
    assert not flights._phases._under_way
    assert [flights._router.queued(k) for k in (PREFILL, DECODE)] == [0, 0]


def long_prompts(count: int) -> list[dict[str, Any]]:
    """Prompts that no test has used, of 80 to 160 tokens."""
    rng = random.Random(next(_seeds))
    sizes = [rng.randrange(80, 160) for _ in range(count)]
    return [{"prompt_token_ids": [rng.randrange(5, 500) for _ in range(size)]} for size in sizes]


def num_generated(llm: LLM, index: int) -> int:
    """The number of tokens that one of a pool's engines has made."""
    return int(llm._client._clients[index].stats()["generated_tokens"])


def phases_of(llm: LLM) -> list[Phase]:
    """The phases of the requests that have not ended."""
    return [flight.phase for flight in llm._client._flights._flights.values()]


def test_rows_are_those_of_one_engine_and_prompts_are_computed_once(pool: LLM, alone: LLM) -> None:
    first, before = next(_numbers), [num_generated(pool, k) for k in (PREFILL, DECODE)]
    params = [params_of(kind, 12) for kind in KINDS]
    given = long_prompts(len(params))
    found = rows(pool, given * 2, params * 2, first)
    assert found == rows(alone, given * 2, params * 2, first)
    after = [num_generated(pool, k) for k in (PREFILL, DECODE)]
    has_prefill = [each for each in KINDS.values() if "prompt_logprobs" not in each]
    assert after[PREFILL] - before[PREFILL] == len(has_prefill)
    assert after[DECODE] > before[DECODE]


def test_a_stream_shows_each_token_once(pool: LLM, alone: LLM) -> None:
    given = long_prompts(4)
    assert joined(deltas(pool, given, GREEDY)) == joined(deltas(alone, given, GREEDY))


def test_prompts_alone_stay_where_they_are_computed(pool: LLM, alone: LLM) -> None:
    given, before = long_prompts(3), num_generated(pool, DECODE)
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
    assert rows(pool, given, one, next(_numbers)) == rows(alone, given, one, next(_numbers))
    ours, theirs = (llm.embed(given, use_tqdm=False) for llm in (pool, alone))
    assert [x.outputs.embedding for x in ours] == [x.outputs.embedding for x in theirs]
    assert num_generated(pool, DECODE) == before


@pytest.mark.parametrize(
    ("victim", "how"),
    [
        (PREFILL, signal.SIGKILL),
        slow(DECODE, signal.SIGKILL),
        slow(PREFILL, signal.SIGTERM),
        slow(DECODE, signal.SIGTERM),
    ],
)
def test_the_end_of_either_engine_changes_no_row(
    pool: LLM, alone: LLM, victim: int, how: signal.Signals
) -> None:
    given, params = long_prompts(6), [params_of(kind, 24) for kind in list(KINDS)[:3]] * 2
    number, pids = next(_numbers), pids_of(pool)
    before = num_generated(pool, DECODE)

    def is_under_way() -> bool:
        if victim == PREFILL:
            return Phase.PREFILL in phases_of(pool)
        return num_generated(pool, DECODE) > before

    expected = rows(alone, given, params, number)
    with held_steps(pool, num_steps=4 * victim) as go_on:
        pool.front_end.outputs._next_number = number  # type: ignore[attr-defined]
        pool.enqueue(given, params, use_tqdm=False)
        wait_until(is_under_way, "a phase", between=lambda: pool._dispatcher.pump(0.02))
        os.kill(pids[victim], how)
        go_on()
        found = pool.wait_for_completion(use_tqdm=False)
    assert [each.outputs[0].token_ids for each in found] == [row[0][1] for row in expected]
    assert [each.error for each in found] == [None] * len(given)


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_requests_can_be_aborted_in_either_phase(pool: LLM, phase: Phase) -> None:
    given = long_prompts(2)
    with held_steps(pool, num_steps=3 * (phase is Phase.DECODE)) as go_on:
        pool.enqueue([*given, *given], GREEDY, use_tqdm=False)
        wait_until(
            lambda: phase in phases_of(pool), "a phase", between=lambda: pool._dispatcher.pump(0.02)
        )
        pool._dispatcher.abort([*pool.front_end.outputs._states])  # type: ignore[attr-defined]
        go_on()
        outputs = pool.wait_for_completion(use_tqdm=False)
    assert [each.outputs[0].finish_reason for each in outputs] == ["abort"] * 4


def test_a_pause_waits_for_requests_in_both_phases(pool: LLM, alone: LLM) -> None:
    given = long_prompts(4)
    pool.enqueue([*given, *given], GREEDY, use_tqdm=False)
    pool.pause_generation("wait")
    assert not phases_of(pool)
    pool.resume_generation()
    found = pool.wait_for_completion(use_tqdm=False)
    expected = alone.generate([*given, *given], GREEDY, use_tqdm=False)
    assert [x.outputs[0].token_ids for x in found] == [x.outputs[0].token_ids for x in expected]


def test_a_pool_with_roles_sleeps_and_wakes_up(pool: LLM, alone: LLM) -> None:
    given = long_prompts(2)
    pool.sleep(1)
    pool.wake_up()
    found, expected = (llm.generate(given, GREEDY, use_tqdm=False) for llm in (pool, alone))
    assert [x.outputs[0].token_ids for x in found] == [x.outputs[0].token_ids for x in expected]


def test_impossible_roles_are_refused() -> None:
    with pytest.raises(EngineStartError, match=r"2 leaves no engine.* 0 to 1 are possible"):
        LLM(data_parallel_size=2, prefill_engines=2, **SHARED)
    with pytest.raises(EngineStartError, match="only 0 is possible"):
        LLM(prefill_engines=1, **SHARED)
    with pytest.raises(EngineStartError, match="the role 'prefill' needs a cache"):
        LLM(data_parallel_size=2, prefill_engines=1)
    said = command("engine", "start", "a", "--role", "decode")
    assert said.returncode != 0
    assert b"the role 'decode' needs a cache" in said.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("no_leaks")
def test_named_engines_have_roles(
    alone: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    given = long_prompts(4)
    expected = [x.outputs[0].token_ids for x in alone.generate(given, GREEDY, use_tqdm=False)]
    with (
        named_engine(tmp_path / "a", role="prefill", **SHARED) as (a, _),
        named_engine(tmp_path / "b", role="decode", **SHARED) as (b, pid),
        named_engine(tmp_path / "c", role="prefill", **SHARED) as (c, _),
    ):
        assert b"cpu, prefill" in command("engine", "ls").stdout
        with pytest.raises(EngineStartError, match="all 2 engines of the pool have the role"):
            LLM.attach([a, c])
        with LLM.attach(a) as llm:
            assert "the engine has the role 'prefill', but serves all" in caplog.text
            found = llm.generate(given, GREEDY, use_tqdm=False)
            assert [x.outputs[0].token_ids for x in found] == expected
        with LLM.attach([a, b, c]) as llm:
            assert llm.facts.role == "both"
            found = llm.generate(given, GREEDY, use_tqdm=False)
            assert [x.outputs[0].token_ids for x in found] == expected
            assert all(num_generated(llm, k) for k in range(3))
            os.kill(pid, signal.SIGKILL)
            found = llm.generate(given, GREEDY, use_tqdm=False)
            assert [x.outputs[0].token_ids for x in found] == expected
