"""Pools of real engines: equal tokens, deaths that lose nothing, and calls of all or none."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from conftest import without_leaks
from support.commands import command
from support.engines import held_steps, named_engine, run_a_little, slow_steps
from support.pools import (
    KINDS,
    OPTIONS,
    await_engines,
    deltas,
    immortal_pools,
    joined,
    kill_engine,
    kills_running,
    num_generated,
    params_of,
    pids_of,
    prompts,
    rows,
    two_engines,
)
from support.programs import CLI, children, environment, is_running, kill
from support.variants import slow
from support.waiting import PATIENCE_S, holds_within, join_all, wait_until, wait_until_async

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
from shmllm.ipc import control
from shmllm.wire.rpc import RpcCall

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
    with two_engines(engines):
        yield engines
    # An idle engine may have told the end of a request that this process has not read yet.
    wait_until(
        lambda: not engines._client._flights._flights,
        "the ends of all requests are read",
        between=lambda: engines._dispatcher.pump(0.02),
    )
    assert [engines._client._flights._router.queued(k) for k in (0, 1)] == [0, 0]


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


@pytest.mark.parametrize("how", [signal.SIGKILL, slow(signal.SIGTERM)])
def test_a_death_changes_no_row(
    pool: LLM, alone: LLM, how: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that ends by itself aborts its requests, which go on all the same."""
    first = next(_numbers)
    params = [params_of(kind, 60) for kind in KINDS for _ in range(2)]
    given = prompts(random.Random(4), len(params))
    with kills_running(pool, 0, how=how):
        found = rows(pool, given, params, first)
    assert found == rows(alone, given, params, first)
    assert "engine 0 of the pool has ended: engine process" in caplog.text
    cause = "killed by SIGKILL" if how == signal.SIGKILL else "exit code 0"
    assert f"({cause}); it is started again" in caplog.text


def engine_of(llm: LLM, prompt: dict[str, Any]) -> int:
    """The engine of a pool that has the request of a prompt."""
    (placement,) = (
        flight.placement
        for flight in llm._client._flights._flights.values()
        if flight.request.prompt_token_ids == prompt["prompt_token_ids"]
    )
    return int(placement.engine)


def test_a_stream_shows_no_token_twice(
    pool: LLM, alone: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    expected = joined(deltas(alone, PROMPTS, GREEDY))
    found: dict[int, list[int]] = {}
    with held_steps(pool) as go_on:
        for output in deltas(pool, PROMPTS, GREEDY):
            if not found:
                kill_engine(pool, engine_of(pool, PROMPTS[output.prompt_index]))
                go_on()
            found.setdefault(output.prompt_index, []).extend(output.outputs[0].token_ids)
    assert found == expected
    assert "of the pool has ended: engine process" in caplog.text


@pytest.mark.slow
def test_the_death_of_an_idle_engine_is_no_error(pool: LLM, alone: LLM) -> None:
    kill_engine(pool, 1)
    assert holds_within(lambda: "engine 1: dead" in pool.health(), PATIENCE_S)
    assert tokens_of(pool, params=SHORT) == tokens_of(alone, params=SHORT)


def test_a_busy_engine_does_not_hide_the_death_of_another(pool: LLM, alone: LLM) -> None:
    """The death is noticed while outputs arrive all the time."""
    with slow_steps(pool):
        stream = deltas(pool, PROMPTS[:2], SamplingParams(max_tokens=400, ignore_eos=True))
        next(stream)
        pid = pids_of(pool)[0]
        kill_engine(pool, 0)
        wait_until(
            lambda: pid not in pids_of(pool), "the death is seen", between=lambda: next(stream)
        )
        stream.close()


def test_both_engines_may_die_at_once(pool: LLM, alone: LLM) -> None:
    """Waiting and running requests have died once; they wait for the first engine that starts."""
    with kills_running(pool, 0, 1):
        found = tokens_of(pool)
    assert found == tokens_of(alone)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_request_that_ran_at_two_deaths_fails_and_no_other(pool: LLM, alone: LLM) -> None:
    poison = {"prompt_token_ids": [6, 6, 6]}
    flights = pool._client._flights._flights
    errors: dict[int, str | None] = {}
    found: dict[int, list[int]] = {}
    num_kills = 0

    def is_poisoned(flight: Any) -> bool:
        return len(flight.request.prompt_token_ids) == 3

    stream = pool.stream(
        [*PROMPTS[:2], poison], GREEDY, output_kind=RequestOutputKind.DELTA, on_error="yield"
    )
    with slow_steps(pool):
        for output in stream:
            errors[output.prompt_index] = output.error
            found.setdefault(output.prompt_index, []).extend(output.outputs[0].token_ids)
            flight = next((f for f in flights.values() if is_poisoned(f)), None)
            if flight is None or flight.placement is None:
                continue
            if flight.num_deaths == num_kills and (num_kills == 0 or output.prompt_index == 2):
                num_kills += 1
                os.kill(pool._client._clients[flight.placement.engine].pid, signal.SIGKILL)
    assert num_kills == 2
    expected = tokens_of(alone, [*PROMPTS[:2], poison])
    assert [index for index in errors if errors[index] is None]
    assert all(found[index] == expected[index] for index in errors if errors[index] is None)
    assert errors[2] == "it was running when two engines died, and is not tried a third time"


@pytest.mark.usefixtures("no_leaks")
def test_async_requests_survive(alone: LLM, caplog: pytest.LogCaptureFixture) -> None:
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
            with held_steps(llm._llm) as go_on:
                tasks = [asyncio.ensure_future(one(llm, prompt)) for prompt in PROMPTS]
                await wait_until_async(lambda: num_generated(llm._llm, 0) > 0, "tokens")
                kill_engine(llm._llm, 0)
                go_on()
                return [await task for task in tasks]
        finally:
            llm.shutdown()

    assert asyncio.run(run()) == expected
    assert "engine 0 of the pool has ended: engine process" in caplog.text


def weight_of(llm: LLM, index: int, name: str = NORM) -> Any:
    """A weight of one of a pool's engines."""
    client = llm._client._clients[index]
    return client.run_on_worker(RpcCall("get_weight", (name,), {})).numpy().copy()


def fail_in(worker: Any, pid: int, owner: str, method: str) -> None:
    """Runs in each engine: in that with this pid, the next call of a method refuses."""
    import os
    import sys
    from operator import attrgetter

    from shmllm.errors import RequestError

    def fail(*_: Any, **__: Any) -> None:
        delattr(found, method)
        raise RequestError("no room here")

    if os.getpid() != pid:
        return
    frame: Any = sys._getframe()
    while not (cores := [v for v in frame.f_locals.values() if type(v).__name__ == "EngineCore"]):
        frame = frame.f_back
    found = attrgetter(owner)(cores[0])
    setattr(found, method, fail)


def states_of(llm: LLM) -> list[int]:
    """What sleeps in each engine."""
    return [client.stats()["asleep"] for client in llm._client._clients]


def test_a_pool_sleeps_and_wakes_up(pool: LLM, alone: LLM) -> None:
    expected = tokens_of(alone, params=SHORT)
    assert tokens_of(pool, params=SHORT) == expected
    report = pool.sleep(1)
    assert report.after["kv_cache"] == 0 < report.before["kv_cache"]
    assert pool.is_sleeping()
    kill_engine(pool)
    await_engines(pool, 2)
    assert len({*states_of(pool)}) == 1  # also the new one sleeps
    assert pool.wake_up()
    assert not pool.is_sleeping()
    assert tokens_of(pool, params=SHORT) == expected


@pytest.mark.slow
def test_a_pool_without_weights_gets_them_again(own: LLM, alone: LLM) -> None:
    expected, weights = tokens_of(alone, params=SHORT), weights_of(alone)
    report = own.sleep(2)
    assert report.after["weights"] == report.after["kv_cache"] == 0
    own.wake_up(["weights"])
    own.update_weights(weights)
    own.wake_up()
    assert not own.is_sleeping()
    assert tokens_of(own, params=SHORT) == expected


@pytest.mark.parametrize("place", [slow(0), 1])
def test_an_engine_that_cannot_wake_up_leaves_all_asleep(pool: LLM, alone: LLM, place: int) -> None:
    pool.collective_rpc(fail_in, args=(pids_of(pool)[place], "runner.memory", "restore"))
    pool.sleep(1)
    asleep = states_of(pool)
    with pytest.raises(RequestError, match="no room here"):
        pool.wake_up()
    assert states_of(pool) == asleep
    assert pool.wake_up()
    assert states_of(pool) == [0, 0]
    assert tokens_of(pool, params=SHORT) == tokens_of(alone, params=SHORT)


@pytest.mark.parametrize("place", [slow(0), 1])
def test_an_engine_that_cannot_sleep_leaves_all_awake(pool: LLM, alone: LLM, place: int) -> None:
    pool.collective_rpc(fail_in, args=(pids_of(pool)[place], "runner.memory", "release"))
    with pytest.raises(RequestError, match="no room here"):
        pool.sleep(1)
    assert states_of(pool) == [0, 0]
    assert tokens_of(pool, params=SHORT) == tokens_of(alone, params=SHORT)


def test_updates_reach_all_engines_or_none(own: LLM, alone: LLM) -> None:
    before, old = tokens_of(alone, params=SHORT), weight_of(own, 0)
    changed = {NORM: old * np.linspace(-1, 3, len(old), dtype=old.dtype)}
    with pytest.raises(RequestError, match="not finite"):
        own.update_weights({NORM: np.full_like(old, np.nan)})
    for place in (0, 1):
        own.collective_rpc(fail_in, args=(pids_of(own)[place], "weights", "check"))
        with pytest.raises(RequestError, match="no room here"):
            own.update_weights(changed)
        assert all(np.array_equal(weight_of(own, index), old) for index in (0, 1))
    assert tokens_of(own, params=SHORT) == before
    own.update_weights(changed, version="new")
    assert all(np.array_equal(weight_of(own, index), changed[NORM]) for index in (0, 1))
    (output,) = own.generate("x", SHORT, use_tqdm=False)
    assert [span.version for span in output.outputs[0].weight_versions] == ["new"]


def test_an_engine_with_other_weights_is_not_started_again(
    own: LLM, alone: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """Its requests go on at an engine with the weights that they began with."""
    old = weight_of(own, 0)
    changed = {NORM: old * np.linspace(0, 2, len(old), dtype=old.dtype)}
    own.update_weights(changed)
    alone.update_weights(changed)
    try:
        expected = tokens_of(alone)
    finally:
        alone.update_weights({NORM: old})
    with kills_running(own, 1):
        assert tokens_of(own) == expected
    assert "it is not started again: weights were sent since the start" in caplog.text
    kill_engine(own)
    with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        tokens_of(own)


@pytest.mark.slow
def test_requests_of_other_weights_end_with_an_error(own: LLM) -> None:
    """The tokens before an update cannot come again after it."""
    old = weight_of(own, 0)
    own.enqueue(PROMPTS, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
    with slow_steps(own):
        run_a_little(own)
        own.update_weights({NORM: 2 * old})
        kill_engine(own)
        wait_until(
            lambda: len(pids_of(own)) == 1, "a death", between=lambda: own._dispatcher.pump(0.05)
        )
    errors = [each.error for each in own.wait_for_completion(use_tqdm=False)]
    wrong = "its engine has ended, and no other engine has the weights that it began with"
    assert 0 < errors.count(wrong) < len(errors)
    assert {*errors} == {wrong, None}


@pytest.mark.slow
def test_aborted_requests_of_a_dead_engine_end(pool: LLM) -> None:
    with slow_steps(pool):
        pool.enqueue(PROMPTS, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
        for pid in pids_of(pool):
            os.kill(pid, signal.SIGKILL)
        pool._dispatcher.abort([*pool.front_end.outputs._states])
        outputs = pool.wait_for_completion(use_tqdm=False)
    assert {each.outputs[0].finish_reason for each in outputs} == {"abort"}


def test_a_stopped_engine_is_named_and_loses_nothing(pool: LLM, alone: LLM) -> None:
    pid = pids_of(pool)[1]
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(tokens_of(pool, params=SHORT)))
    os.kill(pid, signal.SIGSTOP)
    try:
        asking.start()
        with patch.object(control, "STALLED_AFTER_S", 0.5):
            wait_until(
                lambda: pool.health().startswith("engine 0: ready; engine 1: stalled"),
                "engine 1 alone is named",
            )
        assert not found
    finally:
        os.kill(pid, signal.SIGCONT)
    join_all([asking])
    assert found == [tokens_of(alone, params=SHORT)]


def weights_of(llm: LLM) -> dict[str, Any]:
    names = llm.collective_rpc("list_weights")[0]
    return {name: llm.collective_rpc("get_weight", args=(name,))[0] for name in names}


@pytest.fixture
def own(no_leaks: None) -> Iterator[LLM]:
    """Two engines that the test may end or change."""
    with LLM(data_parallel_size=2, num_threads=2, **OPTIONS) as llm:
        yield llm


@pytest.mark.usefixtures("no_leaks")
def test_named_engines_are_a_pool(alone: LLM, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with named_engine(tmp_path / "a") as (a, _), named_engine(tmp_path / "b") as (b, pid):
        with LLM.attach([a, b]) as llm, LLM.attach(b) as other:
            old = weight_of(llm, 0)
            other.start_weight_update()
            with pytest.raises(CallOrderError, match="by another front end is under way"):
                llm.update_weights({NORM: 2 * old})
            other.abandon_weight_update()
            other.pause_generation("keep")
            llm.update_weights({NORM: old})
            other.resume_generation()
            assert other.get_weight_version() == 1
            assert tokens_of(llm) == tokens_of(alone)
            other.update_weights({NORM: old})
            with pytest.raises(EngineStartError, match="the version of the weights of the first"):
                LLM.attach([a, b])
            llm.update_weights({NORM: old}, version=7)
        with LLM.attach([a, b]) as llm:
            stream = deltas(llm, PROMPTS, GREEDY)
            found: dict[int, list[int]] = {}
            for num_outputs, output in enumerate(stream):
                found.setdefault(output.prompt_index, []).extend(output.outputs[0].token_ids)
                if num_outputs == 30:
                    command("engine", "stop", a)
            assert [found[index] for index in sorted(found)] == tokens_of(alone)
            assert "engine 0: dead" in llm.health()
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                tokens_of(llm)


@pytest.mark.slow
@pytest.mark.usefixtures("no_leaks")
def test_a_pool_that_nobody_refers_to_ends() -> None:
    llm = LLM(data_parallel_size=2, num_threads=2, **OPTIONS)
    pids = pids_of(llm)
    gc.disable()
    try:
        del llm
        assert not any(map(is_running, pids))
    finally:
        gc.enable()


def test_bad_sizes_are_refused() -> None:
    for size in (0, -1, 2.5, "two"):
        with pytest.raises((EngineStartError, RequestError, TypeError), match="data_parallel_size"):
            LLM(data_parallel_size=size)
    with pytest.raises(
        EngineStartError,
        match="3 needs at least a thread for each engine, and num_threads is 2; possible: 1 to 2",
    ):
        LLM(data_parallel_size=3, num_threads=2)
    with pytest.raises(EngineStartError, match="not possible with multiprocess=False"):
        LLM(data_parallel_size=2, multiprocess=False)
    for names in ([], ["a", "a"], [1]):
        with pytest.raises(RequestError, match="attach"):
            LLM.attach(names)


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("how", ["killed engine", slow("Ctrl-C")])
def test_generate_with_engines(tmp_path: Path, how: str) -> None:
    (tmp_path / "in.txt").write_text("".join(f"value_{i} =\n" for i in range(60)))
    target = tmp_path / "out.jsonl"
    options = ["-i", str(tmp_path / "in.txt"), "-o", str(target), "--max-tokens", "100"]
    options += ["--ignore-eos", "--num-threads", "2", "--max-num-seqs", "4", "--engines", "2"]
    process = subprocess.Popen(
        [sys.executable, "-c", CLI, "generate", *options],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    try:
        wait_until(lambda: target.exists() and target.read_bytes().count(b"\n") > 5, "some rows")
        if how == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            os.kill(min(children(process.pid)), signal.SIGKILL)
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        kill(process)
    written = [json.loads(line) for line in target.read_text().splitlines()]
    if how == "Ctrl-C":
        assert process.returncode == 130
        assert 5 < len(written) < 60
        assert b"Traceback" not in said
        return
    assert process.returncode == 0, said.decode()
    assert b"it is started again" in said
    assert len(written) == 60
    assert not any(row.get("error") for row in written)
