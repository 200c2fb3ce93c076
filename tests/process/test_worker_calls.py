"""`collective_rpc` on a real engine: values, errors, permissions, and requests beside it."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines import assert_idle, named_engine
from support.programs import run_source
from support.reference_models import greedy_tokens, make_model
from support.waiting import join_all

from shmllm import LLM, CallError, EngineDeadError, IpcTimeoutError, RequestError, SamplingParams
from shmllm.frontend.options.profiler import ProfilerSettings

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

OPTIONS: dict[str, Any] = {
    "kv_cache_memory_bytes": 2**26,
    "num_threads": 1,
    "dtype": "float32",
}  # numpy reads float32
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPT = list(range(1, 40))
LARGE = 3 * 2**20


@pytest.fixture(scope="module")
def apart() -> Iterator[LLM]:
    """An engine in a process of its own."""
    with LLM(**OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def local() -> Iterator[LLM]:
    with LLM(multiprocess=False, **OPTIONS) as llm:
        yield llm


@pytest.fixture(params=["apart", "local"])
def llm(request: pytest.FixtureRequest, apart: LLM, local: LLM) -> Iterator[LLM]:
    """An engine that the test must leave as it was."""
    llm = {"apart": apart, "local": local}[request.param]
    before = tokens(llm)
    yield llm
    assert tokens(llm) == before
    assert_idle(llm)


def tokens(llm: LLM, prompt: list[int] = PROMPT) -> list[int]:
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_values_cross_both_ways(llm: LLM) -> None:
    def probe(worker: Any, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs, worker.model.config.num_layers

    given = ([1, "é", None], {2: b"\0x"}, np.arange(4).reshape(2, 2), torch.ones(3).bfloat16())
    args, kwargs, num_layers = llm.collective_rpc(probe, args=given, kwargs={"deep": (1.5,)})[0]
    assert args[:2] == given[:2]
    assert np.array_equal(args[2], given[2])
    assert torch.equal(args[3], given[3])
    assert kwargs == {"deep": (1.5,)}
    assert num_layers == llm.llm_engine.model_config.hf_config.num_hidden_layers


def test_large_arguments_and_results_cross(llm: LLM) -> None:
    data = np.random.default_rng(1).bytes(LARGE)
    text = "x" * LARGE
    for value in (data, text, torch.arange(LARGE), [0] * 200_000):
        result = llm.collective_rpc(lambda worker, value: (value, value), args=(value,))[0]
        assert all(
            bool((each == value) if not torch.is_tensor(value) else torch.equal(each, value))
            for each in result
        )
    assert tokens(llm)


def test_apply_model_runs_on_the_model(llm: LLM) -> None:
    counts = llm.apply_model(
        lambda model: sum(v[0].numel() for v in model.named_weights().values())
    )
    assert counts == [llm.facts.num_parameters]


def test_an_exception_comes_back_as_text_and_ends_nothing(llm: LLM) -> None:
    def fail(worker: Any) -> None:
        raise KeyError("this one")

    with pytest.raises(CallError, match="KeyError: 'this one'") as caught:
        llm.collective_rpc(fail)
    assert "in fail" in caught.value.remote_traceback
    with pytest.raises(CallError, match="RuntimeError: the function called exit"):
        llm.collective_rpc(lambda worker: sys.exit(1))

    def stop(worker: Any, kind: type[BaseException]) -> None:
        raise kind("mine")

    with pytest.raises(CallError, match="RuntimeError: the function raised CancelledError: mine"):
        llm.collective_rpc(stop, args=(asyncio.CancelledError,))
    is_own = llm.engine_pid == os.getpid()  # Ctrl-C interrupts calls of an engine in this process
    with pytest.raises(KeyboardInterrupt if is_own else CallError, match="mine"):
        llm.collective_rpc(stop, args=(KeyboardInterrupt,))
    with pytest.raises(CallError, match="TypeError"):
        llm.collective_rpc("get_weight")
    with pytest.raises(RequestError, match="nearest is 'check_health'"):
        llm.collective_rpc("check_helth")
    with pytest.raises(RequestError, match="name or a function"):
        llm.collective_rpc(3)  # type: ignore[arg-type]
    assert tokens(llm)


def test_new_weights_make_it_the_new_model(tmp_path: Path) -> None:
    old = make_model("llama", tmp_path / "old")
    new = make_model("llama", tmp_path / "new", num_hidden_layers=3)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.copy_(torch.randn_like(parameter) * parameter.std() + parameter.mean())
    prompt = [5, 7, 11, 13] * 9
    with LLM(str(tmp_path / "old"), multiprocess=False, **OPTIONS) as llm:
        assert tokens(llm, prompt) == greedy_tokens(old, prompt, 16)
        model = llm.llm_engine.model_executor.driver_worker.model_runner.model
        written = model.load_weights(new.named_parameters())
        assert written == {name for name, _ in new.named_parameters()}
        assert tokens(llm, prompt) == greedy_tokens(new, prompt, 16)
        llm.collective_rpc("reload_weights")
        assert tokens(llm, prompt) == greedy_tokens(old, prompt, 16)


def test_a_weight_has_the_names_of_checkpoints(tmp_path: Path) -> None:
    model = make_model("modernbert_decoder", tmp_path)
    with LLM(str(tmp_path), multiprocess=False, **OPTIONS) as llm:
        for name in ("decoder.weight", "lm_head.weight"):
            (found,) = llm.collective_rpc("get_weight", args=(name,))
            assert torch.equal(found, model.decoder.weight)
        with pytest.raises(RequestError, match=r"no weight 'decoder\.weights'"):
            llm.collective_rpc("get_weight", args=("decoder.weights",))


def test_an_update_is_written_whole_or_not_at_all(llm: LLM) -> None:
    names = list(llm.collective_rpc("list_weights")[0])
    weights = {name: llm.collective_rpc("get_weight", args=(name,))[0] for name in names}
    before = tokens(llm)
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    halves = [(name, weight.numpy() / 2) for name, weight in weights.items()]
    with pytest.raises(RequestError, match="no weight 'surplus'"):
        model.load_weights([*halves, ("surplus", torch.ones(1))])
    assert tokens(llm) == before

    def breaking() -> Iterator[tuple[str, Any]]:
        yield from halves
        raise OSError("the checkpoint is gone")

    with pytest.raises(OSError, match="gone"):
        model.load_weights(breaking())
    assert tokens(llm) == before
    assert model.load_weights(iter(halves)) == set(names)
    assert tokens(llm) != before
    model.load_weights(weights.items())
    assert tokens(llm) == before


def test_requests_go_on_while_weights_change(apart: LLM) -> None:
    alone = tokens(apart)
    names = apart.collective_rpc("list_weights")[0]
    weights = [(name, apart.collective_rpc("get_weight", args=(name,))[0]) for name in names]
    requests = apart.front_end.prepare(
        [PROMPT] * 4, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    )
    served = apart.front_end.serve(requests)
    next(served)
    model = apart.llm_engine.model_executor.driver_worker.model_runner.model
    assert len(model.load_weights(weights)) == len(names)
    states = {state.number: state for changed in served for state in changed}
    assert [len(state.token_ids) for state in states.values()] == [200] * 4
    assert all(state.token_ids[:16] == alone for state in states.values())
    assert_idle(apart)


def test_a_call_that_takes_too_long_is_given_up_and_answered_later(
    apart: LLM, tmp_path: Path
) -> None:
    go_on = tmp_path / "go on"

    def slow(worker: Any) -> torch.Tensor:
        deadline = time.monotonic() + 60
        while not go_on.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return torch.ones(2**20)

    with pytest.raises(IpcTimeoutError, match=r"in 0\.1 s") as caught:
        apart.collective_rpc(slow, timeout=0.1)
    assert isinstance(caught.value, TimeoutError)
    go_on.touch()
    # The late answers give their slots back, or there would be none for these.
    for _ in range(12):
        assert apart.collective_rpc(lambda worker: torch.ones(2**20))[0].sum() == 2**20
    assert tokens(apart)


def test_an_engine_that_dies_in_a_call_is_reported_dead() -> None:
    with LLM(**OPTIONS) as llm, pytest.raises(EngineDeadError, match="exit code 7"):
        llm.collective_rpc(lambda worker: os._exit(7))


def test_a_closed_llm_takes_no_calls() -> None:
    llm = LLM(multiprocess=False, **OPTIONS)
    llm.close()
    with pytest.raises(Exception, match="closed"):
        llm.collective_rpc("check_health")


def test_a_named_engine_takes_methods_and_no_functions(tmp_path: Path) -> None:
    with named_engine(tmp_path) as (name, _), LLM.attach(name) as llm:
        assert llm.collective_rpc("check_health") == [None]
        for call in (lambda: llm.collective_rpc(len), lambda: llm.apply_model(len)):
            with pytest.raises(RequestError, match="--allow-callables"):
                call()
        weight = llm.collective_rpc("get_weight", args=("model.norm.weight",))[0]
        model = llm.llm_engine.model_executor.driver_worker.model_runner.model
        assert model.load_weights([("model.norm.weight", weight)]) == {"model.norm.weight"}
        assert tokens(llm)


def test_a_profile_names_the_models_kernels(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "profiles", ProfilerSettings(str(tmp_path), max_iterations=3))
    announced = llm.start_profile("mine")
    tokens(llm)
    path = llm.stop_profile()
    assert path == announced
    assert Path(path).parent == tmp_path
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = [str(event.get("name")) for event in events]
    assert len({name for name in names if name.startswith("step ")}) == 3
    assert sum(name.startswith("multiply") for name in names) > 3 * 4 * 4
    assert {"attend", "embed"} <= set(names)


WITHOUT_TORCH = """
import sys
from shmllm import LLM
with LLM.attach(sys.argv[1]) as llm:
    print(llm.collective_rpc("check_health"), llm.llm_engine.model_config.max_model_len)
    print(llm.collective_rpc(lambda worker: worker.model.config.num_layers))
    assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def test_a_named_engine_started_with_it_takes_functions_of_all(tmp_path: Path) -> None:
    """Also those of a front end that has not imported torch."""
    with named_engine(tmp_path, allow_callables=True) as (name, pid):
        results: list[int] = []

        def ask() -> None:
            with LLM.attach(name) as llm:
                results.extend(llm.collective_rpc(lambda worker: os.getpid()))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        join_all(threads)
        assert results == [pid] * 3
        done = run_source(WITHOUT_TORCH, name)
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout.split() == [b"[None]", b"1024", b"[4]"]
