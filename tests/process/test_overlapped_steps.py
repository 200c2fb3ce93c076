"""Engines with overlapped steps on a CPU: failing steps, killed and other front ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.engines import assert_idle, assert_unused, named_engine, run_a_little, slow_steps
from support.programs import CLI, is_running, kill, python, read_line, start_source
from support.traces import load
from support.waiting import wait_until

from shmllm import LLM, EngineDeadError, SamplingParams, StructuredOutputsParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

GREEDY = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 2**26, "num_threads": 1}
PROMPTS = ["x = ", "import os\n" * 20]
FLOOD = """
import sys
from shmllm import LLM, SamplingParams
llm = LLM.attach(sys.argv[1])
llm.enqueue(["a", "b" * 300], SamplingParams(max_tokens=900, ignore_eos=True))
while llm.get_metrics()["generated_tokens"] < 20:  # the test kills this program
    llm._dispatcher.pump(0.01)
print("running", flush=True)
llm.wait_for_completion(use_tqdm=False)
"""


def failing(run: Any) -> Any:
    """Wrap `run` so that its tenth call fails."""
    steps = iter(range(10))

    def run_or_fail(inputs: Any) -> Any:
        if next(steps) == 9:
            raise ZeroDivisionError("a step that fails")
        return run(inputs)

    return run_or_fail


def fail_later(worker: Any) -> None:
    program = worker.model_runner._program
    program.run = failing(program.run)


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(multiprocess=False, **OPTIONS) as llm:
        return tokens(llm)


def test_a_step_that_fails_ends_the_engine_with_its_traceback() -> None:
    with LLM(async_scheduling=True, **OPTIONS) as llm:
        llm.collective_rpc(fail_later)
        with pytest.raises(EngineDeadError) as caught:
            tokens(llm)
        assert caught.value.exit_code == 1
        assert "in run_or_fail" in caught.value.remote_traceback
        assert caught.value.remote_traceback.endswith("ZeroDivisionError: a step that fails\n")


def test_a_failed_step_leaves_an_engine_in_the_callers_process_usable(
    monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    matched = StructuredOutputsParams(regex="[a-z ]*")
    params = SamplingParams(max_tokens=50, structured_outputs=matched)
    with LLM(multiprocess=False, async_scheduling=True, **OPTIONS) as llm:
        with monkeypatch.context() as patched:
            program = llm._client._core.runner._program
            patched.setattr(program, "run", failing(program.run))
            with pytest.raises(ZeroDivisionError):
                llm.generate(PROMPTS, params, use_tqdm=False)
        assert tokens(llm) == expected
        assert_idle(llm)


def test_one_front_end_is_killed_and_the_engine_stopped_in_the_requests_of_another(
    tmp_path: Path, expected: list[list[int]]
) -> None:
    """A stopped engine still uses the result of the step that runs."""
    options: dict[str, Any] = {"async_scheduling": True, "allow_callables": True, "max_num_seqs": 4}
    with named_engine(tmp_path, **options) as (name, pid):
        with LLM.attach(name) as llm:
            assert llm.facts.async_scheduling
            other = start_source(FLOOD, name)
            assert read_line(other) == b"running\n"
            assert tokens(llm) == expected
            kill(other)
            assert tokens(llm) == expected
        assert_unused(name)
        with LLM.attach(name) as llm:
            with slow_steps(llm):
                llm.enqueue(PROMPTS, GREEDY)
                run_a_little(llm)
                os.kill(pid, signal.SIGTERM)
            outputs = [o.outputs[0] for o in llm.wait_for_completion(use_tqdm=False)]
            for output, whole in zip(outputs, expected, strict=True):
                assert output.finish_reason == "abort"
                assert output.token_ids == whole[: len(output.token_ids)]
            wait_until(lambda: not is_running(pid), "the engine ends")
            assert (tmp_path / "engine.log").read_text().count("Traceback") == 0


@pytest.mark.slow
def test_the_command_line_starts_and_traces_one(tmp_path: Path) -> None:
    path, source = tmp_path / "trace.json", tmp_path / "prompts.txt"
    source.write_text("".join(f"value_{n} = {n}\n" for n in range(8)))
    options = ["--async-scheduling", "--num-threads", "1", "--max-num-batched-tokens", "16"]
    options += ["--max-tokens", "30", "--ignore-eos"]
    command = ["generate", "-i", str(source), "-o", str(tmp_path / "out.jsonl"), *options]
    done = python("-c", CLI, "trace", "-o", str(path), "--", *command)
    assert done.returncode == 0, done.stderr.decode()
    trace = load(path)
    assert len(trace.requests) == 8
    assert all(request.facts["whole"] for request in trace.requests.values())
    slices = [each for lane in trace.lanes.values() for each in lane]
    assert all(begin <= end for begin, end, *_ in slices)
    assert {"schedule", "execute", "apply", "publish"} <= {name for *_, name, _ in slices}
    assert {facts["tokens"] for *_, facts in trace.slices("step")} <= set(range(1, 17))
