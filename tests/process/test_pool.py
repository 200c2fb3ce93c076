"""Pools of real engines: equal tokens, deaths that lose nothing, and calls of all or none."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import without_leaks
from support.commands import command
from support.engines import assert_idle, named_engine
from support.pools import (
    KINDS,
    OPTIONS,
    await_engines,
    deltas,
    immortal_pools,
    joined,
    kill_engine,
    number_from,
    params_of,
    pids_of,
    prompts,
    rows,
)
from support.programs import CLI, environment, is_running, python, run_source
from support.variants import slow
from support.waiting import PATIENCE_S, holds_within, join_all, wait_until

from shmllm import (
    LLM,
    AsyncLLM,
    EngineDeadError,
    EngineStartError,
    RequestError,
    RequestOutputKind,
    SamplingParams,
)
from shmllm.errors import CallOrderError

pytestmark = pytest.mark.process

GREEDY = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = prompts(random.Random(5), 12)
NORM = "model.norm.weight"
_numbers = iter(range(1000, 10**9, 1000))


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    """One engine with the same model."""
    with LLM(multiprocess=False, num_threads=1, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def engines(compiled_kernels: None) -> Iterator[LLM]:
    with (
        without_leaks(),
        immortal_pools(),
        LLM(data_parallel_size=2, num_threads=2, **OPTIONS) as llm,
    ):
        yield llm


@pytest.fixture
def pool(engines: LLM) -> Iterator[LLM]:
    """Two engines, which a test may kill, but must leave idle, awake and with their weights."""
    await_engines(engines, 2)
    yield engines
    await_engines(engines, 2)
    assert_idle(engines)
    assert not engines._client._flights._flights
    assert [engines._client._flights._router.queued(k) for k in (0, 1)] == [0, 0]


@contextmanager
def kills_when(llm: LLM, num_tokens: int, *indexes: int) -> Iterator[None]:
    """Kill engines when they have made some tokens."""
    before, pids = llm.get_metrics()["generated_tokens"], pids_of(llm)

    def run() -> None:
        wait_until(lambda: llm.get_metrics()["generated_tokens"] > before + num_tokens, "tokens")
        for index in indexes:
            os.kill(pids[index], signal.SIGKILL)

    killer = threading.Thread(target=run)
    killer.start()
    yield
    join_all([killer])


def tokens_of(llm: LLM, given: Any = PROMPTS, params: Any = GREEDY) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in llm.generate(given, params, use_tqdm=False)]


def test_rows_are_those_of_one_engine(pool: LLM, alone: LLM) -> None:
    first = next(_numbers)
    params = [params_of(kind, 12) for kind in KINDS for _ in range(2)]
    given = prompts(random.Random(3), len(params))
    before = [client.stats()["generated_tokens"] for client in pool._client._clients]
    assert rows(pool, given, params, first) == rows(alone, given, params, first)
    after = [client.stats()["generated_tokens"] for client in pool._client._clients]
    assert all(a > b for a, b in zip(after, before, strict=True))
    ours, theirs = (llm.embed(given, use_tqdm=False) for llm in (pool, alone))
    assert [x.outputs.embedding for x in ours] == [x.outputs.embedding for x in theirs]


def test_a_death_changes_no_row(pool: LLM, alone: LLM, caplog: pytest.LogCaptureFixture) -> None:
    first = next(_numbers)
    params = [params_of(kind, 60) for kind in KINDS for _ in range(2)]
    given = prompts(random.Random(4), len(params))
    with kills_when(pool, 20, 0):
        found = rows(pool, given, params, first)
    assert found == rows(alone, given, params, first)
    assert "engine 0 of the pool has ended: engine process" in caplog.text
    assert "(killed by SIGKILL); it is started again" in caplog.text


def test_a_stream_shows_no_token_twice(pool: LLM, alone: LLM) -> None:
    expected = joined(deltas(alone, PROMPTS, GREEDY))
    stream = deltas(pool, PROMPTS, GREEDY)
    found: dict[int, list[int]] = {}
    for num_outputs, output in enumerate(stream):
        found.setdefault(output.prompt_index, []).extend(output.outputs[0].token_ids)
        if num_outputs == 30:
            kill_engine(pool, 1)
    assert found == expected


def test_the_death_of_an_idle_engine_is_no_error(pool: LLM, alone: LLM) -> None:
    kill_engine(pool, 1)
    assert holds_within(lambda: "engine 1: dead" in pool.health(), PATIENCE_S)
    assert tokens_of(pool, params=SHORT) == tokens_of(alone, params=SHORT)


def test_a_busy_engine_does_not_hide_the_death_of_another(pool: LLM, alone: LLM) -> None:
    """The death is noticed while outputs arrive all the time."""
    stream = deltas(pool, PROMPTS[:2], SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    pid = pids_of(pool)[0]
    kill_engine(pool, 0)
    began = time.monotonic()
    while pid in pids_of(pool):
        next(stream)
        assert time.monotonic() < began + PATIENCE_S
    stream.close()


def test_both_engines_may_die_at_once(pool: LLM, alone: LLM) -> None:
    """Waiting and running requests have died once; they wait for the first engine that starts."""
    with kills_when(pool, 20, 0, 1):
        found = tokens_of(pool)
    assert found == tokens_of(alone)


def test_an_engine_that_dies_while_it_starts_is_started_again(pool: LLM, alone: LLM) -> None:
    revival = pool._client._revival
    kill_engine(pool, 0)
    wait_until(lambda: revival.is_busy, "it starts", between=lambda: pool._dispatcher.pump(0.02))
    os.kill(revival.clients[0].pid, signal.SIGKILL)
    await_engines(pool, 2)
    assert tokens_of(pool, params=SHORT) == tokens_of(alone, params=SHORT)


def test_a_death_in_a_call_leaves_the_answer_of_the_others(pool: LLM) -> None:
    pids = pids_of(pool)

    def die_in_one(worker: Any, pid: int) -> int:
        import os

        if os.getpid() == pid:
            os.kill(pid, 9)
        return os.getpid()

    assert pool.collective_rpc(die_in_one, args=(pids[0],)) == [pids[1]]
    await_engines(pool, 2)
    assert len(pool.apply_model(lambda model: len(model.named_weights()))) == 2
    assert len(pool.collective_rpc("list_weights")) == 1


def test_a_request_that_ran_at_two_deaths_fails_and_no_other(pool: LLM, alone: LLM) -> None:
    poison = {"prompt_token_ids": [6, 6, 6]}
    flights = pool._client._flights._flights
    errors: dict[int, str | None] = {}
    found: dict[int, list[int]] = {}
    num_kills = 0
    stream = pool.stream(
        [*PROMPTS[:2], poison], GREEDY, output_kind=RequestOutputKind.DELTA, on_error="yield"
    )
    for output in stream:
        errors[output.prompt_index] = output.error
        found.setdefault(output.prompt_index, []).extend(output.outputs[0].token_ids)
        flight = next((f for f in flights.values() if len(f.request.prompt_token_ids) == 3), None)
        if flight is None or flight.placement is None:
            continue
        if flight.num_deaths == num_kills and (num_kills == 0 or output.prompt_index == 2):
            num_kills += 1
            os.kill(pool._client._clients[flight.placement.engine].pid, signal.SIGKILL)
    assert num_kills == 2
    assert errors[2] == "it was running when two engines died, and is not tried a third time"


@pytest.mark.usefixtures("no_leaks")
def test_async_requests_survive(alone: LLM) -> None:
    expected = tokens_of(alone)

    async def one(llm: AsyncLLM, prompt: Any) -> list[int]:
        tokens: list[int] = []
        params = SamplingParams(
            temperature=0, max_tokens=150, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        async for output in llm.generate(prompt, params):
            tokens += output.outputs[0].token_ids
        return tokens

    async def run() -> list[list[int]]:
        llm = AsyncLLM(data_parallel_size=2, num_threads=2, **OPTIONS)
        try:
            tasks = [asyncio.ensure_future(one(llm, prompt)) for prompt in PROMPTS]
            await asyncio.sleep(0.1)
            kill_engine(llm._llm, 0)
            return [await task for task in tasks]
        finally:
            llm.shutdown()

    assert asyncio.run(run()) == expected
