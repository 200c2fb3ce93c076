"""Functions that the workers of a pool run: all engines get each of them, in the same order."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import without_leaks
from support.interrupted_llm import MODULES
from support.interrupting import Moment, raising_handler
from support.pools import OPTIONS, await_engines, immortal_pools, pids_of, two_engines
from support.variants import slow
from support.waiting import PATIENCE_S, join_all, wait_until

from shmllm import LLM, AsyncLLM, CallError, IpcTimeoutError, RequestError
from shmllm.wire.messages import Method

pytestmark = pytest.mark.process

SEED = 23
NUM_MOMENTS = 16
SOON_S = 0.2
POOL: dict[str, Any] = {"data_parallel_size": 2, "num_threads": 2, **OPTIONS}


@pytest.fixture(scope="module")
def engines(compiled_kernels: None) -> Iterator[LLM]:
    with without_leaks(), immortal_pools(), LLM(**POOL) as llm:
        yield llm


class Notes:
    """What engines have run, in their order, one file for each process.

    Attributes:
        pids: the processes of the engines.
        go: a file for which calls wait.
    """

    def __init__(self, folder: Path, pids: list[int]) -> None:
        self.folder = str(folder)
        self.pids = pids
        self.go = folder / "go"

    def of(self, engine: int) -> list[str]:
        path = Path(self.folder, str(self.pids[engine]))
        return path.read_text().split() if path.exists() else []

    def are(self, *names: str) -> bool:
        return all(self.of(engine) == [*names] for engine in range(len(self.pids)))

    def have_begun(self, engine: int) -> bool:
        return bool(self.of(engine))


@pytest.fixture
def pool(engines: LLM) -> Iterator[LLM]:
    """Two engines, which a test may kill, but must leave without calls."""
    with two_engines(engines):
        yield engines
    assert_nothing_is_left(engines)


@pytest.fixture
def notes(pool: LLM, tmp_path: Path) -> Iterator[Notes]:
    notes = Notes(tmp_path, pids_of(pool))
    yield notes
    notes.go.touch()


def assert_nothing_is_left(llm: LLM) -> None:
    """No slot is in use, and no reply is kept or awaited."""
    for client in llm._client._clients:  # type: ignore[attr-defined]
        slots, outputs = client._channel.slots, client._channel.output_slots
        wait_until(
            lambda client=client: not client.open_calls,  # type: ignore[misc]
            "all replies are read",
            between=lambda: llm._dispatcher.pump(0.02),
        )
        assert (client._replies, client._letters) == ({}, [])
        wait_until(lambda slots=slots: slots.num_free == slots.num_slots, "slots are free")  # type: ignore[misc]
        assert not slots._claimed
        assert not any(map(outputs._is_published, range(outputs.num_slots)))


def note(worker: Any, folder: str, name: str) -> int:
    """Runs in each engine: note a name."""
    import os

    with open(f"{folder}/{os.getpid()}", "a") as file:
        file.write(f"{name}\n")
    return os.getpid()


def raise_in(worker: Any, folder: str, name: str, pids: list[int]) -> int:
    """Runs in each engine: note a name, and raise an error in those with these pids."""
    import os

    with open(f"{folder}/{os.getpid()}", "a") as file:
        file.write(f"{name}\n")
    if os.getpid() in pids:
        raise ValueError(f"not in {os.getpid()}")
    return os.getpid()


def wait_in(worker: Any, folder: str, name: str, pids: list[int]) -> int:
    """Runs in each engine: note a name, and wait for the file "go" in those with these pids."""
    import os
    import time

    with open(f"{folder}/{os.getpid()}", "a") as file:
        file.write(f"{name}\n")
    deadline = time.monotonic() + 60
    while os.getpid() in pids and not os.path.exists(f"{folder}/go"):
        if time.monotonic() > deadline:
            raise TimeoutError("nobody made the file")
        time.sleep(0.01)
    return os.getpid()


def meet(worker: Any, folder: str, pids: list[int]) -> int:
    """Runs in each engine: wait until all of them run it."""
    import os
    import time

    with open(f"{folder}/at-{os.getpid()}", "w"):
        pass
    deadline = time.monotonic() + 60
    while not all(os.path.exists(f"{folder}/at-{pid}") for pid in pids):
        if time.monotonic() > deadline:
            raise TimeoutError("another engine did not come")
        time.sleep(0.01)
    return os.getpid()


def when(condition: Callable[[], bool], act: Callable[[], Any]) -> threading.Thread:
    """Do something in another thread as soon as a condition holds."""

    def run() -> None:
        wait_until(condition, "the moment to act")
        act()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("place", [0, 1])
def test_a_function_that_fails_in_one_engine_runs_in_both(
    pool: LLM, notes: Notes, place: int
) -> None:
    with pytest.raises(CallError) as caught:
        pool.collective_rpc(raise_in, args=(notes.folder, "a", [notes.pids[place]]))
    message = caught.value.args[0]
    assert message.startswith(f"engine {place} of the pool: ValueError: not in {notes.pids[place]}")
    assert f"engine {1 - place} of the pool ran the call, so their states may differ" in message
    assert "in raise_in" in caught.value.remote_traceback
    assert pool.collective_rpc(note, args=(notes.folder, "b")) == notes.pids
    assert notes.are("a", "b")


def test_what_fails_in_all_engines_is_the_error_of_the_first(pool: LLM, notes: Notes) -> None:
    with pytest.raises(CallError) as caught:
        pool.collective_rpc(raise_in, args=(notes.folder, "a", notes.pids))
    assert caught.value.args == (f"ValueError: not in {notes.pids[0]}",)
    assert notes.are("a")


def test_a_call_that_cannot_be_sent_runs_nowhere(pool: LLM, notes: Notes) -> None:
    with pytest.raises(RequestError, match="cannot be pickled"):
        pool.collective_rpc(note, args=(notes.folder, threading.Lock()))
    assert notes.are()


def test_large_calls_and_results_cross(pool: LLM) -> None:
    data = bytes(range(256)) * 2**13
    found = pool.collective_rpc(lambda worker, data: data[::-1], args=(data,))
    assert found == [data[::-1]] * 2
    with pytest.raises(RequestError, match=r"^the model has no weight 'xxx"):
        pool.collective_rpc("get_weight", args=("x" * 600_000,))


def test_a_method_that_one_engine_refuses_names_it(pool: LLM) -> None:
    client = pool._client._clients[1]  # type: ignore[attr-defined]
    client.call(Method.SLEEP, {"level": 1, "mode": "keep"})
    try:
        with pytest.raises(
            RequestError, match=r"^engine 1 of the pool: .*; engine 0 of the pool ran"
        ):
            pool.collective_rpc("get_weight", args=("model.norm.weight",))
    finally:
        client.call(Method.WAKE_UP, None)
    assert len(pool.collective_rpc("get_weight", args=("model.norm.weight",))) == 1


@pytest.mark.parametrize("place", [0, slow(1)])
def test_a_timeout_in_one_engine_keeps_the_order_of_calls(
    pool: LLM, notes: Notes, place: int
) -> None:
    for name in "ab":
        with pytest.raises(IpcTimeoutError, match="the worker did not answer in"):
            pool.collective_rpc(wait_in, SOON_S, args=(notes.folder, name, [notes.pids[place]]))
    wait_until(lambda: notes.of(1 - place) == ["a", "b"], "the other engine runs both")
    wait_until(lambda: notes.of(place) == ["a"], "this one is held by the first")
    notes.go.touch()
    assert pool.collective_rpc(note, args=(notes.folder, "c")) == notes.pids
    assert notes.are("a", "b", "c")


def test_a_timeout_in_all_engines_names_none(pool: LLM, notes: Notes) -> None:
    with pytest.raises(IpcTimeoutError, match=r"^the worker did not answer in 0\.2 s$"):
        pool.collective_rpc(wait_in, SOON_S, args=(notes.folder, "a", notes.pids))
    notes.go.touch()
    pool.collective_rpc(note, args=(notes.folder, "b"))
    assert notes.are("a", "b")


@pytest.mark.parametrize("place", [0, 1])
def test_an_interrupted_call_has_reached_all_engines(pool: LLM, notes: Notes, place: int) -> None:
    interrupting = when(
        lambda: notes.have_begun(place), lambda: os.kill(os.getpid(), signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):
        pool.collective_rpc(wait_in, args=(notes.folder, "a", [notes.pids[place]]))
    join_all([interrupting])
    notes.go.touch()
    assert pool.collective_rpc(note, args=(notes.folder, "b")) == notes.pids
    assert notes.are("a", "b")


def test_an_interrupt_at_some_lines_leaves_engines_with_equal_calls(
    pool: LLM, notes: Notes
) -> None:
    def call() -> None:
        pool.collective_rpc(note, args=(notes.folder, "a"))

    everything = Moment(-1, MODULES)
    everything.call(call)
    num_points = -1 - everything._left
    rng = random.Random(SEED)
    with raising_handler():
        for number in rng.sample(range(1, num_points + 1), NUM_MOMENTS):
            moment = Moment(number, MODULES)
            moment.call(call)
            pool.collective_rpc(note, args=(notes.folder, "b"))
            assert notes.of(0) == notes.of(1), f"interrupted at {moment.where}"
            assert_nothing_is_left(pool)


def test_calls_of_two_threads_have_one_order(pool: LLM, notes: Notes) -> None:
    def call(name: str) -> None:
        for index in range(20):
            pool.collective_rpc(note, args=(notes.folder, f"{name}{index}"))

    threads = [threading.Thread(target=call, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    join_all(threads)
    assert len(notes.of(0)) == 40
    assert notes.of(0) == notes.of(1)


@pytest.mark.parametrize("place", [0, 1])
def test_the_death_of_an_engine_in_a_call_leaves_it_to_the_others(
    pool: LLM, notes: Notes, place: int
) -> None:
    dying = notes.pids[place]
    killing = when(lambda: notes.have_begun(place), lambda: os.kill(dying, signal.SIGKILL))
    found = pool.collective_rpc(wait_in, args=(notes.folder, "a", [dying]))
    join_all([killing])
    assert found == [notes.pids[1 - place]]
    assert notes.are("a")


def test_engines_run_a_call_at_the_same_time(pool: LLM, notes: Notes) -> None:
    assert pool.collective_rpc(meet, args=(notes.folder, notes.pids)) == notes.pids


def test_an_engine_joins_again_when_open_calls_have_ended(pool: LLM, notes: Notes) -> None:
    """The call may be writing weights, which an engine that starts does not have."""
    with pytest.raises(IpcTimeoutError):
        pool.collective_rpc(wait_in, SOON_S, args=(notes.folder, "a", [notes.pids[0]]))
    revival = pool._client._revival  # type: ignore[attr-defined]
    os.kill(notes.pids[1], signal.SIGKILL)
    wait_until(
        lambda: revival.is_busy,
        "it starts again",
        between=lambda: pool._dispatcher.pump(0.02),
    )
    (starting,) = revival.clients
    wait_until(
        lambda: hasattr(starting, "info"),
        "it is ready",
        between=lambda: pool._dispatcher.pump(0.02),
    )
    pool._dispatcher.pump(0.02)
    assert len(pids_of(pool)) == 1
    notes.go.touch()
    await_engines(pool, 2)


@pytest.mark.usefixtures("no_leaks")
def test_a_cancelled_call_reaches_all_engines(tmp_path: Path) -> None:
    async def run() -> None:
        llm = AsyncLLM(**POOL)
        try:
            notes = Notes(tmp_path, pids_of(llm._llm))
            call = llm.collective_rpc(wait_in, args=(notes.folder, "a", notes.pids))
            task = asyncio.ensure_future(call)
            deadline = asyncio.get_running_loop().time() + PATIENCE_S
            while not (notes.have_begun(0) or notes.have_begun(1)):
                assert asyncio.get_running_loop().time() < deadline
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            notes.go.touch()
            await llm.collective_rpc(note, args=(notes.folder, "b"))
            assert notes.are("a", "b")
        finally:
            llm.shutdown()

    asyncio.run(run())
