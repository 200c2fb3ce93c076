"""Sleeping engines: a trainer's calls, memory, many cycles, named engines, killed front ends."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import engine_processes, our_files
from support.commands import command
from support.engines import (
    assert_idle,
    assert_unused,
    named_engine,
    run_a_little,
    slow_steps,
    stats_of,
)
from support.programs import kill, read_line, start_source
from support.reference_models import MAX_TOKENS, greedy_tokens, make_model, make_prompts
from support.waiting import PATIENCE_S, join_all, wait_until, wait_until_async

from shmllm import LLM, AsyncLLM, EnginePausedError, RequestError, SamplingParams
from shmllm.outputs.sleep_report import SleepReport

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

PROMPT = "def main():\n"
GREEDY = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
MIB = 2**20


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    """An engine in a process of its own."""
    with LLM(kv_cache_memory_bytes=2**27, num_threads=1) as llm:
        yield llm


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    """The engine of the module, which the test must leave idle and awake."""
    yield engine
    assert_idle(engine)


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A named engine: its name and its log."""
    directory = tmp_path_factory.mktemp("engine")
    with named_engine(directory, allow_callables=True) as (name, _):
        yield name, directory / "engine.log"


@pytest.fixture
def name(named: tuple[str, Path]) -> Iterator[str]:
    """The named engine of the module, which the test must leave unused and awake."""
    yield named[0]
    assert_unused(named[0])
    assert not stats_of(named[0])["asleep"]


def tokens_of(llm: LLM, params: SamplingParams = SHORT) -> list[int]:
    return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids


def rss_bytes(pid: int) -> int:
    """Resident memory of a process, as the kernel counts it."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * int(text.split("Rss:")[1].split()[0])


def shm_bytes() -> int:
    return sum(Path("/dev/shm", name).stat().st_blocks * 512 for name in our_files())


def test_the_calls_of_a_trainer_in_their_order(tmp_path: Path) -> None:
    """The calls of TRL, see docs/clients.md. Two models take turns in one engine."""
    models = [make_model("qwen3", tmp_path, hidden_size=size) for size in (64, 64)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(1.3)
    prompts = [{"prompt_token_ids": prompt} for prompt in make_prompts(4096)[:6]]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    options: dict[str, Any] = {"kv_cache_memory_bytes": 2**26, "enable_sleep_mode": True}
    with LLM(str(tmp_path), multiprocess=False, **options) as llm:
        llm.sleep(level=2)
        for step in range(4):
            model = models[step % 2]
            assert not llm.wake_up(tags=["weights"])
            target = llm.llm_engine.model_executor.driver_worker.model_runner.model
            for named in model.named_parameters():
                target.load_weights([named])
            with pytest.raises(EnginePausedError, match=r"sleeps \(kv_cache, scheduling\)"):
                tokens_of(llm)
            assert llm.reset_prefix_cache()
            assert llm.wake_up(tags=["kv_cache"])
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                expected = greedy_tokens(model, prompt["prompt_token_ids"])
                assert output.outputs[0].token_ids == expected
            llm.sleep(level=2)


def test_a_sleeping_engine_returns_its_memory(tmp_path: Path) -> None:
    make_model(
        "qwen3",
        tmp_path,
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=64,
    )
    options: dict[str, Any] = {"load_format": "dummy", "kv_cache_memory_bytes": 2**27}
    with LLM(str(tmp_path), enable_prefix_caching=False, **options) as llm:
        pid = llm._client.pid  # type: ignore[attr-defined]
        prompts = [{"prompt_token_ids": prompt} for prompt in make_prompts(4096, 200)[8:10]]
        expected = llm.generate(prompts, SHORT, use_tqdm=False)
        first_rss = rss_bytes(pid)
        for level in (1, 2):
            shm, rss = shm_bytes(), rss_bytes(pid)
            report = llm.sleep(level)
            before, after = report.before, report.after
            assert before.weights > 180 * MIB
            assert before.kv_cache > 6 * MIB
            assert after.kv_cache == after.workspaces == 0
            assert after.weights == (before.weights if level == 1 else 0)
            assert rss == pytest.approx(before.total, abs=4 * MIB)
            assert rss_bytes(pid) == pytest.approx(after.total, abs=4 * MIB)
            released = before.kv_cache + (before.weights if level == 2 else 0)
            assert rss - rss_bytes(pid) >= 0.95 * released
            assert shm_bytes() <= shm
            if not llm.wake_up():
                llm.collective_rpc("reload_weights")
            again = llm.generate(prompts, SHORT, use_tqdm=False)
            for output, other in zip(again, expected, strict=True):
                assert output.outputs[0].token_ids == other.outputs[0].token_ids
            assert rss_bytes(pid) < 1.1 * first_rss


def cycle(llm: LLM, level: int) -> tuple[list[int], SleepReport]:
    """Sleep and wake up; return the tokens generated then, and the report of the sleep."""
    report = llm.sleep(level)
    if not llm.wake_up():
        llm.collective_rpc("reload_weights")
    return tokens_of(llm), report


def run_cycles(llm: LLM, num_cycles: int) -> None:
    """Weights, KV cache and workspaces take the same memory after each cycle. All else grows by
    less than one copy of the weights, although each cycle copies them."""
    expected = tokens_of(llm)
    for level in (1, 2):
        tokens, first = cycle(llm, level)
        assert tokens == expected
        for _ in range(num_cycles - 1):
            tokens, report = cycle(llm, level)
            assert tokens == expected
            for now, then in ((report.before, first.before), (report.after, first.after)):
                assert now.weights == then.weights
                assert now.kv_cache == then.kv_cache
                assert now.workspaces == then.workspaces
                assert now.rest < then.rest + llm.facts.weight_bytes


def test_cycles_leave_tokens_and_memory_as_they_were(llm: LLM) -> None:
    run_cycles(llm, 6)


@pytest.mark.slow
def test_a_hundred_cycles_leave_tokens_and_memory_as_they_were(llm: LLM) -> None:
    run_cycles(llm, 100)


def test_two_engines_take_turns_to_sleep(llm: LLM, name: str) -> None:
    with LLM.attach(name) as attached:
        one, other = llm, attached
        expected = tokens_of(one)
        other.sleep(2)
        for _ in range(5):
            one.sleep(2)
            other.wake_up()
            other.collective_rpc("reload_weights")
            assert tokens_of(other) == expected
            with pytest.raises(EnginePausedError):
                tokens_of(one)
            one, other = other, one
        other.wake_up()
        other.collective_rpc("reload_weights")


def test_a_sleeping_named_engine_outlives_the_front_end_that_put_it_to_sleep(
    name: str, named: tuple[str, Path]
) -> None:
    with LLM.attach(name) as llm:
        expected = tokens_of(llm)
        with LLM.attach(name) as other, slow_steps(llm):
            llm.enqueue(PROMPT, GREEDY)
            run_a_little(llm)
            other.sleep(1)
        assert llm.wait_for_completion(use_tqdm=False)[0].outputs[0].finish_reason == "abort"
        assert llm.is_sleeping()
        with LLM.attach(name) as other:
            assert other.wake_up()
        assert tokens_of(llm) == expected
    assert "freed" in named[1].read_text()


def is_refused(llm: LLM) -> bool:
    """Whether the engine takes no new requests."""
    try:
        tokens_of(llm, ONE_TOKEN)
    except EnginePausedError:
        return True
    return False


def test_a_front_end_that_dies_while_it_waits_for_sleep_leaves_the_engine_awake(name: str) -> None:
    with LLM.attach(name) as llm:
        waiting = start_source(
            f"""
            from shmllm import LLM, SamplingParams
            llm = LLM.attach({name!r})
            params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
            llm.enqueue(["x"] * 2000, params)
            llm.sleep(mode="wait")
            """
        )
        try:
            wait_until(lambda: is_refused(llm), "the engine refuses new requests")
        finally:
            kill(waiting)
        wait_until(lambda: not is_refused(llm), "the engine takes requests again")
        assert not llm.is_sleeping()


def test_an_interrupted_wait_to_sleep_takes_requests_again(llm: LLM) -> None:
    expected = tokens_of(llm)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        wait_until(lambda: is_refused(llm), "the engine refuses new requests")
        signal.pthread_kill(main, signal.SIGINT)

    with slow_steps(llm):
        llm.enqueue([PROMPT] * 4, GREEDY)
        run_a_little(llm)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            llm.sleep(mode="wait")
        join_all([thread])
    assert not llm.is_sleeping()
    assert tokens_of(llm) == expected


def test_a_front_end_killed_while_its_engine_sleeps_leaves_nothing() -> None:
    before = engine_processes()
    program = start_source(
        """
        import time
        from shmllm import LLM
        llm = LLM(kv_cache_memory_bytes=2**26)
        llm.sleep(2)
        print("asleep", flush=True)
        time.sleep(100)
        """
    )
    assert read_line(program) == b"asleep\n"
    assert engine_processes() > before
    kill(program)
    wait_until(lambda: engine_processes() == before, "the engine ends")


def test_coroutines_sleep_and_wake(name: str) -> None:
    async def run() -> None:
        async with AsyncLLM.attach(name) as llm:

            async def tokens() -> list[int]:
                async for output in llm.generate(PROMPT, GREEDY):
                    last = output
                return last.outputs[0].token_ids

            expected = await tokens()
            with slow_steps(llm):
                running = [asyncio.create_task(tokens()) for _ in range(3)]
                await wait_until_async(lambda: llm.get_metrics()["running"] == 3, "three requests")
                report = await llm.sleep(1, mode="keep")
            assert await llm.is_sleeping()
            assert report.num_kept == 3
            late = asyncio.create_task(tokens())
            await asyncio.sleep(0.05)
            assert await llm.wake_up()
            assert not await llm.is_sleeping()
            assert await asyncio.gather(*running, late) == [expected] * 4
            running = [asyncio.create_task(tokens()) for _ in range(3)]
            await asyncio.sleep(0)  # they begin
            await llm.sleep(2, mode="wait")
            assert await asyncio.gather(*running) == [expected] * 3
            with pytest.raises(EnginePausedError):
                await tokens()
            assert not await llm.wake_up()
            await llm.collective_rpc("reload_weights")
            assert await tokens() == expected
            with pytest.raises(RequestError):
                await llm.sleep(7)

    asyncio.run(asyncio.wait_for(run(), 2 * PATIENCE_S))


def run(*arguments: str) -> tuple[int, str]:
    done = command(*arguments)
    return done.returncode, (done.stdout + done.stderr).decode()


def test_the_commands_for_named_engines(name: str) -> None:
    code, text = run("engine", "sleep", name, "--level", "2")
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()[:7]] == [
        *("MiB", "weights", "kv_cache", "graphs", "workspaces", "rest", "all")
    ]
    assert "asleep: weights, kv_cache, scheduling; 46 weights are missing" in text
    assert f"`shmllm engine wake {name}` loads the weights again" in text
    code, text = run("engine", "ls")
    assert f"{name}" in text
    assert "asleep" in text
    code, text = run("engine", "sleep", name)
    assert (code, "asleep already" in text) == (0, True)
    code, text = run("engine", "wake", name, "--tag", "weights", "--no-reload")
    assert code == 0
    assert "asleep: kv_cache, scheduling" in text
    assert "loaded" not in text
    code, text = run("engine", "wake", name, "--tag", "nonsense")
    assert code == 2
    code, text = run("engine", "wake", name, "--no-reload")
    assert (code, "46 weights are missing" in text) == (1, True)
    code, text = run("generate", "--attach", name, "x")
    assert "missing" in text
    assert "`shmllm engine wake`" in text
    code, text = run("engine", "wake", name)
    assert (code, "loaded the weights in " in text) == (0, True)
    code, text = run("engine", "wake", name)
    assert (code, "loaded" in text) == (0, False)
    code, text = run("generate", "--attach", name, "--max-tokens", "2", "x")
    assert code == 0


def test_waking_after_level_2_loads_the_weights_of_the_start_and_says_so(name: str) -> None:
    with LLM.attach(name) as llm:
        expected = tokens_of(llm)
        embedding = "model.embed_tokens.weight"
        (weight,) = llm.collective_rpc("get_weight", args=(embedding,))
        llm.update_weights({embedding: torch.zeros_like(torch.as_tensor(weight))}, version="mine")
        assert tokens_of(llm) != expected
        assert run("engine", "sleep", name, "--level", "2")[0] == 0
        code, text = run("engine", "wake", name, "--tag", "kv_cache")
        assert (code, "loaded" in text) == (0, False)
        code, text = run("engine", "wake", name)
        directory = llm.facts.model_directory
        version = llm.get_weight_version()
        assert code == 0
        assert f"loaded the weights in {directory} as version {version}, " in text
        assert "in place of version mine" in text
        assert tokens_of(llm) == expected


@pytest.mark.slow
def test_random_weights_are_made_again_and_not_said_to_be_the_models(tmp_path: Path) -> None:
    with named_engine(tmp_path, load_format="dummy", seed=3) as (name, _), LLM.attach(name) as llm:
        expected = tokens_of(llm)
        assert run("engine", "sleep", name, "--level", "2")[0] == 0
        code, text = run("engine", "wake", name)
        assert (code, "loaded random weights of seed 3 (load_format dummy)" in text) == (0, True)
        assert tokens_of(llm) == expected
