"""Hundreds of kills of the engines of pools, at random times, in bursts, and while engines start.

Every request gives what it gives with one engine, once, or the one error of a request that was
running when two engines died.

SHMLLM_POOL_KILLS sets how many kills (500), SHMLLM_TEST_SEED repeats a run. 500 kills take about
a quarter of an hour on two cores.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.engines import assert_idle
from support.pools import (
    KINDS,
    OPTIONS,
    await_engines,
    immortal_pools,
    is_allowed_error,
    number_from,
    params_of,
    pids_of,
    prompts,
    row_of,
)
from support.waiting import join_all

from shmllm import LLM, EngineDeadError, RequestOutputKind

pytestmark = [pytest.mark.stress, pytest.mark.usefixtures("no_leaks")]

NUM_KILLS = int(os.environ.get("SHMLLM_POOL_KILLS", "500"))
SEED = int(os.environ.get("SHMLLM_TEST_SEED", str(time.time_ns() % 10**9)))
KILLS_OF_A_POOL = 25
MEAN_PAUSE_S = 1.0
BURST_SHARE = 0.2
END_S = 2.0
"""What an engine takes to end after SIGTERM, at most, in seconds."""
STARTING_SHARE = 0.25
ROLES_SHARE = 0.5
"""The share of pools of which one engine computes prompts."""


class Killer:
    """Kills engines of a pool in a thread, until it has killed so many or is stopped."""

    def __init__(self, llm: LLM, rng: random.Random, num_kills: int) -> None:
        self._llm = llm
        self._rng = rng
        self._num_kills = num_kills
        self.num_killed = 0
        self.times_s: list[float] = []
        self.num_starting = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return self.num_killed >= self._num_kills

    def stop(self) -> None:
        self._is_over.set()
        join_all([self._thread])

    def _run(self) -> None:
        while not self.is_done:
            if self._is_over.wait(self._rng.expovariate(1 / MEAN_PAUSE_S)):
                return
            is_burst = self._rng.random() < BURST_SHARE
            for _ in range(3 if is_burst else 1):
                self._kill_one()
                time.sleep(self._rng.uniform(0, 0.02))

    def _kill_one(self) -> None:
        client: Any = self._llm._client
        starting = [each.pid for each in client._revival.clients]
        is_late = starting and self._rng.random() < STARTING_SHARE
        pid = self._rng.choice(starting if is_late else pids_of(self._llm) or [0])
        if not pid:
            return
        try:
            how = self._rng.choice(["KILL", "KILL", "KILL", "STOP+KILL", "TERM"])
            if how == "STOP+KILL":
                os.kill(pid, signal.SIGSTOP)
                time.sleep(self._rng.uniform(0, 0.2))
            os.kill(pid, signal.SIGTERM if how == "TERM" else signal.SIGKILL)
        except ProcessLookupError:
            return
        self.times_s.append(time.monotonic())
        if not self.is_done:  # zombies of earlier kills count nothing
            self.num_killed += 1
            self.num_starting += pid in starting


@contextmanager
def killing(llm: LLM, rng: random.Random, num_kills: int) -> Iterator[Killer]:
    killer = Killer(llm, rng, num_kills)
    try:
        yield killer
    finally:
        killer.stop()


class Walk:
    """Rounds of requests to a pool, each compared with one engine."""

    def __init__(self, pool: LLM, alone: LLM, rng: random.Random, seen: Counter[str]) -> None:
        self._pool = pool
        self._alone = alone
        self._rng = rng
        self._seen = seen
        self._began_s = 0.0
        self.killer: Killer | None = None

    def step(self) -> None:
        kind = self._rng.choice(
            ["generate"] * 4 + ["stream"] * 4 + ["embed", "call", "pause", "sleep"]
        )
        self._seen[kind] += 1
        self._began_s = time.monotonic()
        getattr(self, f"_{kind}")()

    def _requests(self) -> tuple[list[Any], list[Any]]:
        count = self._rng.randrange(1, 24)
        kinds = [self._rng.choice([*KINDS]) for _ in range(count)]
        given = prompts(self._rng, count)
        for each in self._rng.sample(given, count // 2):  # long ones, of which some are equal
            number = self._rng.randrange(5, 10)
            each["prompt_token_ids"] = [number] * 100 + each["prompt_token_ids"][: number % 3]
        return given, [params_of(kind, self._rng.randrange(4, 200)) for kind in kinds]

    def _number_both(self) -> None:
        used = max(llm.front_end.outputs._next_number for llm in (self._pool, self._alone))
        for llm in (self._pool, self._alone):
            number_from(llm, used)

    def _compare(self, found: list[Any], given: list[Any], params: list[Any]) -> None:
        expected = [row_of(each) for each in self._alone.generate(given, params, use_tqdm=False)]
        assert len(found) == len(expected)
        for (row, error), other in zip(found, expected, strict=True):
            self._seen["rows"] += 1
            if error is not None:
                self._allow(error)
            else:
                assert row == other

    def _allow(self, error: str | None) -> None:
        """A row may have the one error if two engines were killed since shortly before."""
        assert is_allowed_error(error), error
        assert self.killer is not None
        kills = [each for each in self.killer.times_s if each > self._began_s - END_S]
        assert len(kills) >= 2
        self._seen["rows with the error of two deaths"] += 1

    def _generate(self) -> None:
        given, params = self._requests()
        self._number_both()
        outputs = self._pool.generate(given, params, use_tqdm=False)
        self._compare([(row_of(each), each.error) for each in outputs], given, params)

    def _stream(self) -> None:
        """Joins deltas: tokens, texts, and log-probabilities by their number."""
        given, params = self._requests()
        self._number_both()
        tokens: dict[tuple[int, int], list[int]] = {}
        texts: dict[tuple[int, int], str] = {}
        errors: dict[int, str | None] = {}
        left = self._rng.randrange(50, 5000)
        stream = self._pool.stream(
            given, params, output_kind=RequestOutputKind.DELTA, on_error="yield"
        )
        for output in stream:
            errors[output.prompt_index] = output.error
            for each in output.outputs:
                key = output.prompt_index, each.index
                tokens.setdefault(key, []).extend(each.token_ids)
                texts[key] = texts.get(key, "") + each.text
            left -= 1
            if not left:
                stream.close()  # what is aborted leaves nothing
                self._seen["streams left early"] += 1
                self._alone.generate(given, params, use_tqdm=False)
                return
        expected = self._alone.generate(given, params, use_tqdm=False)
        for index, output in enumerate(expected):
            self._seen["rows"] += 1
            if errors[index] is not None:
                self._allow(errors[index])
                continue
            for each in output.outputs:
                assert tokens[index, each.index] == each.token_ids
                assert texts[index, each.index] == each.text

    def _embed(self) -> None:
        given = prompts(self._rng, 8)
        self._number_both()
        ours = self._pool.encode(given, use_tqdm=False, pooling_task="embed")
        theirs = self._alone.encode(given, use_tqdm=False, pooling_task="embed")
        for found, expected in zip(ours, theirs, strict=True):
            self._seen["vectors"] += 1
            assert found.outputs.data.tolist() == expected.outputs.data.tolist()

    def _call(self) -> None:
        self._try(lambda: self._pool.collective_rpc("list_weights"))
        self._pool.get_metrics()
        self._pool.health()

    def _pause(self) -> None:
        self._try(lambda: self._pool.pause_generation(self._rng.choice(["abort", "wait", "keep"])))
        time.sleep(self._rng.uniform(0, 0.5))
        self._repeat(self._pool.resume_generation)

    def _sleep(self) -> None:
        level = self._rng.randrange(2)
        self._try(lambda: self._pool.sleep(level, self._rng.choice(["abort", "wait", "keep"])))
        time.sleep(self._rng.uniform(0, 0.5))
        self._repeat(self._pool.wake_up)

    def _try(self, call: Any) -> None:
        """A call fails only if all engines die meanwhile."""
        try:
            call()
        except EngineDeadError:
            self._seen["calls at which all died"] += 1

    def _repeat(self, call: Any) -> None:
        for _ in range(100):
            try:
                call()
                return
            except EngineDeadError:
                self._seen["calls at which all died"] += 1
        raise AssertionError("all engines died 100 times")


def test_kills_change_no_row() -> None:
    faulthandler.cancel_dump_traceback_later()  # this takes minutes
    print(f"seed {SEED}, {NUM_KILLS} kills")
    rng, seen = random.Random(SEED), Counter[str]()
    with LLM(multiprocess=False, num_threads=1, **OPTIONS) as alone:
        while seen["kills"] < NUM_KILLS:
            walk_pool(alone, rng, min(KILLS_OF_A_POOL, NUM_KILLS - seen["kills"]), seen)
            print(dict(seen), flush=True)
    assert seen["rows"] > 4 * seen["rows with the error of two deaths"]


def walk_pool(alone: LLM, rng: random.Random, num_kills: int, seen: Counter[str]) -> None:
    count = rng.choice([2, 2, 3])
    seen[f"pools of {count}"] += 1
    options = OPTIONS | {"max_num_seqs": rng.choice([4, 64]), "num_threads": count}
    if rng.random() < ROLES_SHARE:
        seen["pools with roles"] += 1
        options |= {"prefill_engines": 1, "shared_kv_cache_bytes": 2**24}
    with immortal_pools(), LLM(data_parallel_size=count, **options) as pool:
        walk = Walk(pool, alone, rng, seen)
        with killing(pool, random.Random(rng.random()), num_kills) as killer:
            walk.killer = killer
            while not killer.is_done:
                walk.step()
        seen["kills"] += killer.num_killed
        seen["kills of starting engines"] += killer.num_starting
        await_engines(pool, count)
        walk._generate()
        await_engines(pool, count)  # the last kill may have been a SIGTERM
        assert_idle(pool)
        assert not pool._client._flights._flights  # type: ignore[attr-defined]
        assert len(set(pids_of(pool))) == count
