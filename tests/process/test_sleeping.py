"""Sleeping real engines: their memory, their weights and their requests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from support.engines import run_a_little, slow_steps

from shmllm import LLM, EnginePausedError, EngineStartError, RequestError, SamplingParams
from shmllm.models.safetensors_file import SafetensorsFile

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

PROMPT = "def main():\n"
GREEDY = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
MIB = 2**20


@pytest.fixture(scope="module", params=[True, False], ids=["process", "same process"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    options: dict[str, Any] = {"enable_sleep_mode": True, "num_threads": 1}
    with LLM(multiprocess=request.param, kv_cache_memory_bytes=2**27, **options) as llm:
        yield llm


@pytest.fixture(autouse=True)
def awake(llm: LLM, request: pytest.FixtureRequest) -> Iterator[None]:
    """Wake the engine after the test and reload its weights, for the next one."""
    yield
    if llm.is_sleeping() or llm.get_metrics()["asleep"]:
        llm.wake_up()
        llm.collective_rpc("reload_weights")


def tokens_of(llm: LLM, params: SamplingParams = SHORT) -> list[int]:
    return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("level", [0, 1, 2])
def test_asleep_nothing_is_generated_and_awake_the_same(llm: LLM, level: int) -> None:
    expected = tokens_of(llm)
    llm.sleep(level)
    assert llm.is_sleeping()
    assert llm.llm_engine.is_sleeping()
    with pytest.raises(EnginePausedError, match=r"the engine sleeps .*wake_up\(\) first"):
        tokens_of(llm)
    with pytest.raises(EnginePausedError, match="prompt 0"):
        list(llm.stream([PROMPT], SHORT))
    with pytest.raises(EnginePausedError):
        llm.embed([PROMPT], use_tqdm=False)
    assert llm.wake_up() == (level < 2)
    assert not llm.is_sleeping()
    if level == 2:
        with pytest.raises(EnginePausedError, match=r"46 weights are missing since sleep\("):
            tokens_of(llm)
        llm.collective_rpc("reload_weights")
    assert tokens_of(llm) == expected


@pytest.mark.parametrize("level", [0, 1, 2])
def test_requests_that_are_kept_continue_with_the_same_tokens(llm: LLM, level: int) -> None:
    expected = tokens_of(llm, GREEDY)
    with slow_steps(llm):
        llm.enqueue([PROMPT, PROMPT], GREEDY)
        run_a_little(llm)
        report = llm.sleep(level, mode="keep")
    assert report.num_kept == 2
    llm.enqueue(PROMPT, GREEDY)  # waits with them
    if llm.wake_up() is False:
        llm.collective_rpc("reload_weights")
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [expected] * 3


def test_wait_sleeps_when_all_requests_ended(llm: LLM) -> None:
    expected = tokens_of(llm, GREEDY)
    llm.enqueue([PROMPT] * 3, GREEDY)
    assert llm.sleep(mode="wait").num_kept == 0
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [expected] * 3
    assert llm.is_sleeping()
    assert llm.wake_up()


def test_abort_ends_running_requests(llm: LLM) -> None:
    with slow_steps(llm):
        llm.enqueue(PROMPT, GREEDY)
        run_a_little(llm)
        llm.sleep()
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert output.outputs[0].finish_reason == "abort"
    assert 0 < len(output.outputs[0].token_ids) < 100
    assert llm.wake_up()


def test_unneeded_calls_warn_and_never_raise(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    def warning() -> str:
        found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        caplog.clear()
        return " ".join(found)

    assert llm.wake_up()
    assert "not asleep" in warning()
    llm.sleep(1)
    assert not warning()
    llm.sleep(1)
    assert "asleep already" in warning()
    assert not llm.wake_up(["kv_cache"])
    assert not warning()
    assert not llm.wake_up(["kv_cache"])
    assert "not asleep: kv_cache" in warning()
    assert llm.wake_up(["weights"])
    assert not warning()


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.sleep(3),
        lambda llm: llm.sleep("1"),
        lambda llm: llm.sleep(mode="stop"),
        lambda llm: llm.wake_up(["kvcache"]),
        lambda llm: llm.wake_up("weights"),
        lambda llm: llm.wake_up([None]),
    ],
)
@pytest.mark.parametrize("is_asleep", [False, True])
def test_invalid_arguments_are_errors_and_change_nothing(
    llm: LLM, call: Any, is_asleep: bool
) -> None:
    if is_asleep:
        llm.sleep()
    before = llm.get_metrics()["asleep"]
    with pytest.raises(RequestError, match="got"):
        call(llm)
    assert llm.get_metrics()["asleep"] == before
    assert llm.wake_up()


def test_sleeping_weights_are_neither_read_nor_written(llm: LLM) -> None:
    expected = tokens_of(llm)
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    weight = llm.collective_rpc("get_weight", args=("model.norm.weight",))[0]
    for level in (1, 2):
        llm.sleep(level)
        for call in (
            lambda: model.load_weights([("model.norm.weight", weight)]),
            lambda: llm.collective_rpc("get_weight", args=("model.norm.weight",)),
            lambda: llm.collective_rpc("reload_weights"),
        ):
            with pytest.raises(RequestError, match="the weights are asleep"):
                call()
        llm.wake_up()
    llm.collective_rpc("reload_weights")
    assert tokens_of(llm) == expected


def test_a_reload_that_fails_in_the_middle_leaves_no_weights_and_another_brings_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, names = SafetensorsFile.tensor, []

    def fail_later(file: SafetensorsFile, name: str) -> Any:
        names.append(name)
        if len(names) == 20:
            raise EngineStartError(f"{file.path}: {name} cannot be read")
        return read(file, name)

    with LLM(multiprocess=False, num_threads=1, kv_cache_memory_bytes=2**27) as llm:
        expected = tokens_of(llm)
        with monkeypatch.context() as patch:
            patch.setattr(SafetensorsFile, "tensor", fail_later)
            with pytest.raises(EngineStartError, match="cannot be read"):
                llm.collective_rpc("reload_weights")
        with pytest.raises(EnginePausedError, match=r"46 weights are missing since .*a reload"):
            tokens_of(llm)
        llm.collective_rpc("reload_weights")
        assert tokens_of(llm) == expected


def test_pausing_and_sleeping_are_independent(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    expected = tokens_of(llm, long)
    with slow_steps(llm):  # it must not end before the pause, on a busy machine either
        llm.enqueue(PROMPT, long)
        run_a_little(llm)
        llm.pause_generation("keep")
    llm.sleep(1, mode="wait")  # what is frozen is not waited for
    with pytest.raises(RequestError, match="cannot end"):
        llm.pause_generation("wait")
    assert not llm.resume_generation()
    assert llm.wake_up()
    assert llm.wait_for_completion(use_tqdm=False)[0].outputs[0].token_ids == expected
