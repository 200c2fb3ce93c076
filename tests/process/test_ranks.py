"""The ranks of real engines: what they share, how they end, and what a trainer does with them."""

from __future__ import annotations

import gzip
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RANK_MODULE, engine_processes
from safetensors.torch import load_file
from support.commands import command
from support.engines import assert_idle, named_engine
from support.programs import children, is_running, kill, read_line, sockets_of, start_source
from support.reference_models import make_model
from support.variants import slow
from support.waiting import PATIENCE_S, holds_within, join_all, wait_until

from shmllm import LLM, CallError, EngineDeadError, EngineStartError, RequestError, SamplingParams
from shmllm.frontend.options.profiler import ProfilerSettings

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 2**26}
RANKS = OPTIONS | {"tensor_parallel_size": 2}
STAGES = OPTIONS | {"pipeline_parallel_size": 2, "max_num_seqs": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(max_tokens=4000, ignore_eos=True)
PROMPTS = [[5, 6, 7], list(range(40, 90)), [9] * 17]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model("llama", path, max_position_embeddings=4096)
    return path


@pytest.fixture(scope="module", params=[RANKS, slow(STAGES)], ids=["ranks", "stages"])
def engine(request: pytest.FixtureRequest, directory: Path) -> Iterator[LLM]:
    with LLM(str(directory), **request.param) as llm:
        yield llm


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    """The engine of the module, which the test must leave idle, awake, and with the weights of the
    checkpoint."""
    yield engine
    assert_idle(engine)
    call(engine, "reload_weights")


@pytest.fixture(scope="module")
def alone(directory: Path) -> Iterator[LLM]:
    """One process with the same model."""
    with LLM(str(directory), multiprocess=False, **OPTIONS) as llm:
        yield llm


@pytest.fixture(params=[RANKS, slow(STAGES)], ids=["ranks", "stages"])
def own(request: pytest.FixtureRequest, directory: Path) -> Iterator[LLM]:
    """An engine that the test may end."""
    with LLM(str(directory), **request.param) as llm:
        yield llm


def tokens_of(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def call(llm: LLM, method: str, *args: Any) -> Any:
    """The result of one of the worker's methods."""
    (result,) = llm.collective_rpc(method, args=args)
    return result


def weight_of(llm: LLM, name: str) -> torch.Tensor:
    return torch.as_tensor(call(llm, "get_weight", name))


def rank_of(llm: LLM) -> int:
    """The pid of the other rank of an engine."""
    (found,) = children(llm._client.pid)
    return found


def shared_bytes(llm: LLM) -> int:
    """The size of the memory that the ranks of an engine share, in bytes that it takes now."""
    for path in Path(f"/proc/{llm._client.pid}/fd").iterdir():
        if "shmllm-ranks" in os.readlink(path):
            return 512 * path.stat().st_blocks
    raise AssertionError("no such memory")


def test_the_engine_says_that_it_has_ranks(llm: LLM, alone: LLM) -> None:
    sizes = llm.facts.tensor_parallel_size, llm.facts.pipeline_parallel_size
    assert sorted(sizes) == [1, 2]
    assert llm.facts.num_parameters == alone.facts.num_parameters
    assert llm.facts.weight_bytes < 1.1 * alone.facts.weight_bytes
    parallel = llm.llm_engine.vllm_config.parallel_config
    assert (parallel.tensor_parallel_size, parallel.pipeline_parallel_size) == sizes
    assert parallel.world_size == 2
    assert tokens_of(llm) == tokens_of(alone)


def test_no_process_has_a_socket(llm: LLM) -> None:
    tokens_of(llm)
    for pid in (llm._client.pid, rank_of(llm)):
        assert sockets_of(pid) == []


@pytest.mark.parametrize("when", ["generating", slow("idle"), slow("asleep")])
def test_the_end_of_a_rank_ends_the_engine_with_its_name(own: LLM, when: str) -> None:
    rank = rank_of(own)

    def end_rank() -> None:
        if when == "generating":
            wait_until(lambda: own.get_metrics()["generated_tokens"] > 5, "some tokens")
        os.kill(rank, signal.SIGKILL)

    if when == "asleep":
        own.sleep(level=1)
    killer = threading.Thread(target=end_rank)
    killer.start()
    if when != "generating":
        killer.join()
        assert holds_within(lambda: own.health() == "dead", PATIENCE_S)
    with pytest.raises(EngineDeadError, match=f"rank 1 .pid {rank}. was ended by SIGKILL"):
        own.generate([5], LONG, use_tqdm=False)
    join_all([killer])


def test_the_end_of_the_engine_ends_its_ranks(own: LLM) -> None:
    rank = rank_of(own)
    os.kill(own._client.pid, signal.SIGKILL)
    assert holds_within(lambda: not is_running(rank), PATIENCE_S)


@pytest.mark.parametrize("when", ["generating", slow("idle")])
def test_a_stopped_rank_is_named_and_loses_nothing(llm: LLM, alone: LLM, when: str) -> None:
    expected, rank = tokens_of(alone), rank_of(llm)
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(tokens_of(llm)))
    os.kill(rank, signal.SIGSTOP)
    try:
        if when == "generating":
            asking.start()
        stalled = f"its process {rank} is stopped"
        assert holds_within(lambda: stalled in llm.health(), PATIENCE_S), llm.health()
        assert not found
    finally:
        os.kill(rank, signal.SIGCONT)
    if when == "idle":
        asking.start()
    join_all([asking])
    assert found == [expected]
    assert holds_within(lambda: llm.health() == "ready", PATIENCE_S)


def test_ranks_that_the_front_end_leaves_behind_end() -> None:
    source = """
import time
from shmllm import LLM
llm = LLM(tensor_parallel_size=2, kv_cache_memory_bytes=2**26)
print("ready", flush=True)
time.sleep(600)
"""
    before = engine_processes(RANK_MODULE)
    process = start_source(source)
    try:
        assert read_line(process) == b"ready\n"
        assert engine_processes(RANK_MODULE) - before
    finally:
        kill(process)
    assert holds_within(lambda: engine_processes(RANK_MODULE) <= before, PATIENCE_S)


@pytest.mark.parametrize("level", [slow(1), 2])
def test_sleep_frees_the_memory_of_all_ranks(llm: LLM, alone: LLM, level: int) -> None:
    expected, weights = tokens_of(llm), call(llm, "list_weights")
    awake_bytes = shared_bytes(llm)
    report = llm.sleep(level=level)
    assert shared_bytes(llm) < awake_bytes - 2**16  # words stay
    assert report.before["kv_cache"] > 0
    assert report.after["kv_cache"] == report.after["workspaces"] == 0
    assert (report.after["weights"] == 0) == (level == 2)
    llm.wake_up(tags=["weights"])
    if level == 2:
        llm.update_weights({name: weight_of(alone, name) for name in weights})
    llm.wake_up()
    assert tokens_of(llm) == expected == tokens_of(alone)


def test_updates_reach_all_ranks_or_none(llm: LLM, alone: LLM, directory: Path) -> None:
    names = [name for name in call(llm, "list_weights") if "layers.1" in name]
    assert call(llm, "list_weights") == call(alone, "list_weights")
    stored = load_file(directory / "model.safetensors")
    for name, tensor in stored.items():
        assert torch.equal(weight_of(llm, name), tensor), name
    before = tokens_of(llm)
    changed = {name: torch.randn(stored[name].shape) for name in names}
    wrong = changed | {names[0]: torch.full(stored[names[0]].shape, float("nan"))}
    with pytest.raises(RequestError, match="not finite"):
        llm.update_weights(wrong)
    assert tokens_of(llm) == before
    try:
        llm.update_weights(changed)
        alone.update_weights(changed)
        for name in names:
            assert torch.equal(weight_of(llm, name), changed[name]), name
        assert tokens_of(llm) == tokens_of(alone) != before
        call(llm, "reload_weights")
        assert tokens_of(llm) == before
    finally:
        call(alone, "reload_weights")


def double(worker: Any, name: str) -> int:
    """Runs in each rank, with whole tensors."""
    tensor = worker.model.named_weights()[name][0].clone()
    whole = torch.where(tensor == 0, 1.0, 2 * tensor)  # zeros are others' parts
    worker.model.load_weights([(name, whole)])
    return int(worker.rank)


def fail_in_rank_1(worker: Any) -> None:
    if worker.rank == 1:
        raise ValueError("no such thing")


def read_in_rank_0(worker: Any, name: str) -> None:
    if worker.rank == 0:
        worker.get_weight(name)


def test_functions_run_in_all_ranks(llm: LLM) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    before = weight_of(llm, name)
    assert llm.collective_rpc(double, args=(name,)) == [0, 1]
    assert torch.equal(weight_of(llm, name), 2 * before)
    places = llm.apply_model(lambda model: (model.config.shard.rank, model.config.stage.index))
    assert [max(place) for place in places] == [0, 1]
    assert llm.collective_rpc("check_health") == [None]
    with pytest.raises(CallError, match="rank 1: ValueError: no such thing"):
        llm.collective_rpc(fail_in_rank_1)
    with pytest.raises(CallError, match="cannot call what itself runs in all ranks"):
        llm.collective_rpc(read_in_rank_0, args=(name,))
    tokens_of(llm)


def kernels_in(path: Path) -> Counter[str]:
    """How often each name is in a trace."""
    with gzip.open(path, "rt") as file:
        return Counter(str(event.get("name")) for event in json.load(file)["traceEvents"])


def test_each_rank_writes_its_part_of_a_profile(
    llm: LLM, alone: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "profiles", ProfilerSettings(str(tmp_path)))
    llm.start_profile("mine", delay_iterations=2, max_iterations=3)
    assert tokens_of(llm) == tokens_of(alone)
    path = Path(llm.stop_profile())
    other = path.with_name(path.name.replace(".pt.", "-rank1.pt."))
    assert {path, other} == set(tmp_path.iterdir())
    first, second = kernels_in(path), kernels_in(other)
    both = ["embed", "attend", "sum_parts"] if llm.facts.tensor_parallel_size > 1 else ["publish"]
    for name in both:
        assert first[name] == second[name] > 0, name
    assert first["embed"] == 3
    llm.start_profile("mine", delay_iterations=200)
    assert tokens_of(llm) == tokens_of(alone)
    with pytest.raises(RequestError, match="before it began"):
        llm.stop_profile()
    assert len(list(tmp_path.iterdir())) == 2


def interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_call_leaves_no_result_to_the_next_one(directory: Path) -> None:
    options = RANKS | {"multiprocess": False}
    usual = signal.signal(signal.SIGALRM, interrupt)
    try:
        with LLM(str(directory), **options) as llm:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                llm.collective_rpc(lambda worker: time.sleep(worker.rank))
            assert llm.collective_rpc(lambda worker: worker.rank) == [0, 1]
            name = "model.layers.0.mlp.down_proj.weight"
            assert llm.collective_rpc(double, args=(name,)) == [0, 1]  # of a module of its own
            tokens_of(llm)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)


def test_prompts_with_embeddings_and_vectors(llm: LLM, alone: LLM) -> None:
    prompt = {"prompt_embeds": torch.randn(7, 64)}
    ours, expected = (
        each.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        for each in (llm, alone)
    )
    assert ours == expected
    vectors = [each.embed([PROMPTS[1]], use_tqdm=False)[0].outputs for each in (llm, alone)]
    assert vectors[0].embedding == pytest.approx(vectors[1].embedding, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "tensor_parallel_size 2 and pipeline_parallel_size 2 "),
        ({"tensor_parallel_size": 3, "num_threads": 3}, "does not divide .*possible: 1, 2, 4"),
        slow({"tensor_parallel_size": 4, "num_threads": 2}, "num_threads is 2; possible: 1 to 2"),
        slow({"model_impl": "transformers"}, "model_impl='transformers' is not possible"),
        (
            {"enable_lora": True, "tensor_parallel_size": 1, "pipeline_parallel_size": 2},
            "enable_lora is not possible with pipeline_parallel_size 2",
        ),
        slow({"load_format": "dummy", "kv_cache_memory_bytes": 4}, "kv_cache_memory_bytes is 4 "),
    ],
)
def test_what_ranks_cannot_do_is_refused(
    directory: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineStartError, match=message):
        LLM(str(directory), **RANKS | options)


def test_a_rank_that_cannot_load_says_why(tmp_path: Path, directory: Path) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(EngineStartError, match=r"model\.safetensors"):
        LLM(str(tmp_path), **RANKS)


def test_a_named_engine_shows_its_ranks(tmp_path: Path) -> None:
    with named_engine(tmp_path, tensor_parallel_size=2, num_threads=2) as (name, _):
        listed = command("engine", "ls")
        assert b"cpu, 2 ranks" in listed.stdout
        with LLM.attach(name) as first, LLM.attach(name) as second:
            assert tokens_of(first) == tokens_of(second)
