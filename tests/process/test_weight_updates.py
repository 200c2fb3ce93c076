"""Updates of the weights of real engines: complete, wrong, and by a trainer that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import (
    assert_idle,
    assert_unused,
    named_engine,
    run_a_little,
    slow_steps,
    tensor_bytes,
)
from support.programs import environment, start_at_go
from support.reference_models import greedy_tokens, make_model
from support.trainers import can_update
from support.waiting import PATIENCE_S, wait_until

from shmllm import LLM, AsyncLLM, RequestError, SamplingParams
from shmllm.errors import CallOrderError
from shmllm.wire.weight_bucket import BUCKET_BYTES

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

OPTIONS: dict[str, Any] = {
    "kv_cache_memory_bytes": 2**26,
    "num_threads": 1,
    "dtype": "float32",
}  # numpy reads float32
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
PROMPT = [5, 7, 11, 13] * 9


def tokens(llm: LLM, prompt: list[int] = PROMPT) -> list[int]:
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def spans(output: Any) -> list[tuple[int | str, int, int]]:
    return [(s.version, s.start, s.end) for s in output.outputs[0].weight_versions]


def weights_of(llm: LLM) -> dict[str, torch.Tensor]:
    names = llm.collective_rpc("list_weights")[0]
    return {name: llm.collective_rpc("get_weight", args=(name,))[0] for name in names}


def disturbed(model: Any) -> Any:
    """The same model with other weights."""
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * parameter.std() + parameter.mean())
    return model


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    """An engine in a process of its own."""
    with LLM(**OPTIONS) as llm:
        yield llm


@pytest.fixture
def apart(engine: LLM) -> Iterator[LLM]:
    """The engine in its own process; the test must leave its weights as they were."""
    before = tokens(engine)
    yield engine
    engine.start_weight_update()  # none is under way
    engine.abandon_weight_update()
    assert tokens(engine) == before
    assert_idle(engine)


@pytest.fixture(params=["process", "local"])
def llm(request: pytest.FixtureRequest, apart: LLM) -> Iterator[LLM]:
    if request.param == "process":
        yield apart
        return
    with LLM(multiprocess=False, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with named_engine(tmp_path_factory.mktemp("engine"), allow_callables=True) as (name, _):
        yield name


@pytest.fixture
def name(named: str) -> Iterator[str]:
    """A named engine, which the test must leave unused and with the weights it had."""
    with LLM.attach(named) as llm:
        before = tokens(llm)
    yield named
    assert_unused(named)
    with LLM.attach(named) as llm:
        assert tokens(llm) == before


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_new_weights_make_it_the_new_model(tmp_path: Path, kind: str) -> None:
    """The embeddings of qwen2 are tied, and all have their projections fused."""
    make_model(kind, tmp_path / "model")
    new = disturbed(make_model(kind, tmp_path / "new"))
    new.save_pretrained(tmp_path / "new")
    with LLM(str(tmp_path / "model"), multiprocess=False, **OPTIONS) as llm:
        tokens(llm)
        llm.update_weights(new.named_parameters())
        (output,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == greedy_tokens(new, PROMPT, 16)
        assert output.num_cached_tokens == 0
    with LLM(str(tmp_path / "new"), multiprocess=False, **OPTIONS) as fresh:
        (expected,) = fresh.generate(PROMPT, GREEDY, use_tqdm=False)
    assert expected.outputs[0].token_ids == output.outputs[0].token_ids
    assert expected.outputs[0].cumulative_logprob == output.outputs[0].cumulative_logprob
    ours, theirs = output.outputs[0].logprobs, expected.outputs[0].logprobs
    assert [list(entry.items()) for entry in ours] == [list(entry.items()) for entry in theirs]


def test_a_bfloat16_model_takes_float32(tmp_path: Path) -> None:
    make_model("llama", tmp_path / "model")
    new = disturbed(make_model("llama", tmp_path / "new"))
    options = OPTIONS | {"dtype": "bfloat16", "multiprocess": False}
    with LLM(str(tmp_path / "model"), **options) as llm:
        llm.update_weights({name: p.detach() for name, p in new.named_parameters()})
        for name, weight in weights_of(llm).items():
            assert torch.equal(weight, new.get_parameter(name).bfloat16())


def test_three_calls_are_one_update(llm: LLM) -> None:
    before, weights = tokens(llm), weights_of(llm)
    items = [(name, weight * 0.5) for name, weight in weights.items()]
    for call in (llm.finish_weight_update,):
        with pytest.raises(RuntimeError, match="start_weight_update"):
            call()
    llm.start_weight_update()
    with pytest.raises(RuntimeError, match="under way"):
        llm.start_weight_update()
    half = len(items) // 2
    llm.update_weights(items[:half])
    assert tokens(llm) == before
    with pytest.raises(RuntimeError, match="finish_weight_update"):
        llm.update_weights([], version=3)
    llm.update_weights(items[half:])
    llm.finish_weight_update("new")
    assert llm.get_weight_version() == "new"
    assert tokens(llm) != before
    llm.start_weight_update()
    llm.update_weights(weights)
    llm.abandon_weight_update()
    llm.update_weights(weights.items())
    assert tokens(llm) == before


@pytest.mark.parametrize("parts", [True, False], ids=["three calls", "one call"])
def test_a_wrong_update_changes_nothing_and_names_the_tensors(llm: LLM, parts: bool) -> None:
    version, before, weights = llm.get_weight_version(), tokens(llm), weights_of(llm)
    wrong = {
        **{name: weight * 2 for name, weight in weights.items()},
        "no.such.weight": torch.ones(2),
        "model.norm.weight": torch.ones(3),
        "lm_head.bias": torch.ones(2),
    }
    if parts:
        llm.start_weight_update()
    with pytest.raises(RequestError) as caught:
        llm.update_weights(wrong)
    for name in ("no.such.weight", "model.norm.weight has shape [3]", "lm_head.bias"):
        assert name in str(caught.value)
    with pytest.raises(RuntimeError):
        llm.finish_weight_update()
    with pytest.raises(RequestError, match="finite"):
        llm.update_weights([("model.norm.weight", weights["model.norm.weight"] * float("nan"))])
    assert (llm.get_weight_version(), tokens(llm)) == (version, before)


def test_the_prefix_cache_goes_with_the_weights_unless_told_otherwise(llm: LLM) -> None:
    def cached() -> int:
        return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].num_cached_tokens

    tokens(llm)
    assert cached() == 32
    llm.update_weights([], reset_prefix_cache=False)
    assert cached() == 32
    llm.update_weights([])
    assert (cached(), cached()) == (0, 32)


def test_requests_continue_over_an_update_and_report_both_versions(apart: LLM) -> None:
    weights = weights_of(apart)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    stream = apart.stream([PROMPT] * 3, params)
    apart.update_weights(weights, version="a")
    with slow_steps(apart):
        ids = apart.enqueue([PROMPT], params)
        run_a_little(apart)
        apart.update_weights(weights, version="b")
    (output,) = apart.wait_for_completion(use_tqdm=False)
    assert output.request_id in ids
    assert [version for version, _, _ in spans(output)] == ["a", "b"]
    assert (spans(output)[0][1], spans(output)[-1][2]) == (0, 100)
    for streamed in stream:
        assert spans(streamed)[-1] == ("b", 0, 100)
    alone = tokens(apart)
    assert output.outputs[0].token_ids[:16] == alone


def test_requests_end_with_the_update_if_asked(name: str) -> None:
    async def main() -> None:
        llm = AsyncLLM.attach(name)
        first = await llm.get_weight_version()
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        weights = weights_of(llm._llm)
        outputs: list[Any] = []

        async def run() -> None:
            async for output in llm.generate(PROMPT, params):
                outputs.append(output)
                started.set()

        started = asyncio.Event()
        with slow_steps(llm):
            task = asyncio.create_task(run())
            await started.wait()
            await llm.update_weights(weights, version=7, mode="abort")
        await task
        last = outputs[-1]
        assert last.outputs[0].finish_reason == "abort"
        assert spans(last) == [(first, 0, len(last.outputs[0].token_ids))]
        assert await llm.get_weight_version() == 7
        await llm.start_weight_update()
        await llm.update_weights(weights)
        await llm.finish_weight_update()
        assert await llm.get_weight_version() == 8
        llm.shutdown()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_one_update_at_a_time_and_versions_reach_every_front_end(name: str) -> None:
    with LLM.attach(name) as trainer, LLM.attach(name) as reader:
        weights = weights_of(trainer)
        trainer.start_weight_update()
        for call in (reader.start_weight_update, lambda: reader.update_weights(weights)):
            with pytest.raises(CallOrderError, match="another front end"):
                call()
        trainer.update_weights(weights)
        trainer.finish_weight_update("first")
        output = reader.generate(PROMPT, GREEDY, use_tqdm=False)[0]
        assert spans(output) == [("first", 0, 16)]
        with LLM.attach(name) as late:
            output = late.generate(PROMPT, GREEDY, use_tqdm=False)[0]
            assert spans(output) == [("first", 0, 16)]
        reader.start_weight_update()
        reader.update_weights(weights)
        reader.close()  # and what it staged is forgotten with it
        wait_until(lambda: can_update(trainer), "the update is dropped")
        assert trainer.get_weight_version() == "first"


TRAINER = """
import os, signal, sys
import numpy
from shmllm import LLM
name, where = sys.argv[1:]
llm = LLM.attach(name)
weights = {n: numpy.ones(shape, dtype)
           for n, (dtype, shape) in llm.collective_rpc("list_weights")[0].items()}

def halves():
    for index, (n, weight) in enumerate(weights.items()):
        if where == "generator" and index == len(weights) // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        yield n, weight * 0.5

print("ready", flush=True)
sys.stdin.readline()
llm.start_weight_update()
if where == "started":
    os.kill(os.getpid(), signal.SIGKILL)
llm.update_weights(halves())
if where == "sent":
    os.kill(os.getpid(), signal.SIGKILL)
if where == "asked":
    import threading
    threading.Timer(0.0, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
for _ in range(10**6):
    llm.update_weights(halves())
"""


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("started", marks=pytest.mark.slow),
        "generator",
        pytest.param("sent", marks=pytest.mark.slow),
        "asked",
        pytest.param("outside", marks=pytest.mark.slow),
    ],
)
def test_a_trainer_killed_in_the_middle_leaves_the_old_weights(name: str, where: str) -> None:
    with LLM.attach(name) as llm:
        before = llm.get_weight_version(), tokens(llm)
        held = tensor_bytes(llm)
        with start_at_go(TRAINER, name, where, env=environment()) as trainer:
            if where == "outside":
                time.sleep(0.2)
                trainer.send_signal(signal.SIGKILL)
            assert trainer.wait(PATIENCE_S) == -signal.SIGKILL
        wait_until(lambda: can_update(llm), "the update is dropped")
        assert (llm.get_weight_version(), tokens(llm)) == before
        assert tensor_bytes(llm) == held
        llm.update_weights(weights_of(llm), version="next")
        assert llm.get_weight_version() == "next"


def shared_bytes() -> int:
    """Memory of the segments that this process has open."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(link).startswith("/dev/shm/"):
                found[link.stat().st_ino] = link.stat().st_blocks * 512
    assert found
    return sum(found.values())


def test_staged_weights_take_no_shared_memory_and_are_freed(apart: LLM) -> None:
    weights = weights_of(apart)
    size = sum(weight.nbytes for weight in weights.values())
    shared, held = shared_bytes(), tensor_bytes(apart)
    apart.start_weight_update()
    staged = set()
    for _ in range(5):
        apart.update_weights(weights)
        staged.add(tensor_bytes(apart) - held)
    assert len(staged) == 1
    assert size <= staged.pop() < 2 * size
    assert shared_bytes() <= shared + 9 * BUCKET_BYTES < shared + 5 * apart.facts.weight_bytes
    apart.abandon_weight_update()
    assert tensor_bytes(apart) == held
