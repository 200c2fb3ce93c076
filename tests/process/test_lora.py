"""Adapters across processes: private and named engines, coroutines, commands, and deaths."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file
from support import commands, lora_adapters
from support.engines import attached, named_engine
from support.pools import pids_of

from shmllm import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    EngineDeadError,
    LoRARequest,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from shmllm.frontend.model_files import resolve_model

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

OPTIONS: dict[str, Any] = {
    "kv_cache_memory_bytes": 2**26,
    "num_threads": 1,
    "dtype": "float32",
    "enable_lora": True,
    "max_loras": 2,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CONFIG = {"r": 8, "lora_alpha": 16}
PROMPTS = ["import os\n", "def f(x):", "class A"]


def shapes_of_tiny() -> dict[str, tuple[int, int]]:
    """The [out, in] of the projections of the bundled model."""
    with safe_open(resolve_model("tiny") / "model.safetensors", "pt") as file:
        names = list(file.keys())
        shapes = {name.removesuffix(".weight"): file.get_slice(name).get_shape() for name in names}
    return {
        name: (shape[0], shape[1])
        for name, shape in lora_adapters.with_suffixes(shapes, lora_adapters.PROJECTIONS).items()
    }


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    shapes, found = shapes_of_tiny(), []
    for number in (1, 2, 3):
        path = tmp_path_factory.mktemp(f"adapter-{number}")
        lora_adapters.write(path, lora_adapters.draw(shapes, number, factor=0.6))
        found.append(LoRARequest(f"adapter-{number}", number, str(path)))
    return found


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One named engine for all tests that do not end it."""
    options = {"enable_lora": True, "max_loras": 2}
    with named_engine(tmp_path_factory.mktemp("engine"), **options) as (name, _):
        yield name


@pytest.fixture(scope="module")
def expected(loras: list[LoRARequest]) -> list[list[str]]:
    """The texts of the prompts with no adapter, and with each."""
    with LLM("tiny", multiprocess=False, **OPTIONS) as llm:
        found = [
            texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=lora))
            for lora in (None, *loras)
        ]
    assert len(set(map(tuple, found))) == 4
    return found


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_front_ends_of_a_named_engine_share_its_adapters(
    engine: str, loras: list[LoRARequest], expected: list[list[str]]
) -> None:
    with attached(engine) as first, LLM.attach(engine) as second:
        assert first.add_lora(loras[0])
        assert not second.add_lora(loras[0])
        assert second.list_loras() == {1}
        mixed = [loras[0], None, loras[2]]
        outputs = second.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=mixed)
        assert texts(outputs) == [expected[1][0], expected[0][1], expected[3][2]]
        assert first.pin_lora(1)
        assert first.list_loras() == {1, 3}
        with pytest.raises(RequestError, match=r"cannot read .*adapter_config\.json"):
            first.add_lora(LoRARequest("bad", 9, "/nowhere"))
        for number in (1, 3):
            assert first.remove_lora(number)


def test_beams_are_searched_with_an_adapter_for_each_prompt(
    engine: str, loras: list[LoRARequest], expected: list[list[str]]
) -> None:
    with attached(engine) as llm:
        params = BeamSearchParams(1, max_tokens=8, ignore_eos=True)
        found = llm.beam_search(PROMPTS, params, lora_request=[loras[0], None, loras[2]])
        wanted = [expected[1][0], expected[0][1], expected[3][2]]
        for output, text in zip(found, wanted, strict=True):
            assert output.sequences[0].text.endswith(text)
        assert llm.list_loras() == {1, 3}
        for number in (1, 3):
            assert llm.remove_lora(number)


def test_coroutines_take_adapters(
    engine: str, loras: list[LoRARequest], expected: list[list[str]]
) -> None:
    async def text(llm: AsyncLLM, prompt: str, lora: LoRARequest | None) -> str:
        async for output in llm.generate(prompt, GREEDY, lora_request=lora):
            last = output
        assert last.lora_request is lora
        return last.outputs[0].text if last.error is None else last.error

    async def run() -> list[str]:
        async with AsyncLLM.attach(engine) as llm:
            assert await llm.add_lora(loras[1])
            every = [None, *loras, LoRARequest("bad", 9, "/nowhere")]
            tasks = (text(llm, PROMPTS[0], lora) for lora in every)
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert await llm.list_loras() == {1, 2, 3}
            assert await llm.pin_lora(2)
            assert all([await llm.remove_lora(number) for number in (1, 2, 3)])
            return [str(each) for each in found]

    *found, error = asyncio.run(run())
    assert found == [each[0] for each in expected]
    assert "cannot read /nowhere/adapter_config.json" in error


def test_a_killed_engine_is_one_error(loras: list[LoRARequest]) -> None:
    endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    with LLM("tiny", **OPTIONS) as llm:
        stream = llm.stream([PROMPTS[0]] * 4, endless, lora_request=loras[0], output_kind=None)
        llm.enqueue(PROMPTS, endless, lora_request=[*loras[:2], None])
        os.kill(llm.engine_pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
            list(stream)


def test_a_front_end_that_ends_leaves_the_engine_idle(
    engine: str, loras: list[LoRARequest], expected: list[list[str]]
) -> None:
    endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    with attached(engine) as first:
        with LLM.attach(engine) as second:
            second.enqueue(PROMPTS * 4, endless, lora_request=[*loras] * 4)
        outputs = first.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=loras[2])
        assert texts(outputs) == expected[3]


def test_rows_choose_among_the_adapters_of_a_command(
    engine: str, loras: list[LoRARequest], expected: list[list[str]], tmp_path: Path
) -> None:
    rows = [
        {"prompt": PROMPTS[0], "lora": "one"},
        {"prompt": PROMPTS[1], "lora": None},
        {"prompt": PROMPTS[2], "lora": "two"},
        {"prompt": PROMPTS[2], "lora": "three"},
        {"prompt": PROMPTS[2], "lora": 3},
        {"prompt": PROMPTS[1]},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    adapters = [f"--lora=one={loras[0].lora_path}", f"--lora=two={loras[1].lora_path}"]
    limits = ["--temperature", "0", "--max-tokens", "8", "--ignore-eos", "--ordered"]
    done = commands.shmllm(
        "generate", "--attach", engine, *adapters, *limits, "-i", str(source), "-o", str(target)
    )
    assert done.returncode == 1, done.stderr
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert [record.get("text") for record in found] == [
        expected[1][0], expected[0][1], expected[2][2], None, None, expected[0][1],
    ]  # fmt: skip
    assert found[3]["error"] == "'lora' names no adapter: pass --lora three=DIR"
    assert found[4]["error"] == "'lora' must be a string, got 3"


def test_one_adapter_of_a_command_is_for_all_prompts(
    engine: str, loras: list[LoRARequest], expected: list[list[str]]
) -> None:
    path = loras[0].lora_path
    common = ["generate", "--attach", engine, "--temperature", "0", "--max-tokens", "8"]
    done = commands.shmllm(*common, "--ignore-eos", "--lora", f"one={path}", PROMPTS[1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().rstrip("\n") == expected[1][1].rstrip("\n")
    for given, message in (
        (["--lora", "one"], "'one' is not NAME=DIR"),
        (["--lora", f"one={path}", "--lora", "one=x"], "'one' is named twice"),
        (["--lora", f"one={path}", "--lora", "two=x"], "several --lora are for rows of --input"),
    ):
        done = commands.shmllm(*common, *given, PROMPTS[1])
        assert done.returncode == 2
        assert message in done.stderr.decode()
    done = commands.shmllm(*common, "--lora", "bad=/nowhere", PROMPTS[1])
    assert done.returncode == 2
    assert "cannot read /nowhere/adapter_config.json" in done.stderr.decode()


def test_tensors_come_through_shared_memory(
    engine: str, loras: list[LoRARequest], expected: list[list[str]]
) -> None:
    shapes = shapes_of_tiny()
    one, two = (lora_adapters.draw(shapes, number, factor=0.6) for number in (1, 2))
    config = {"r": 8, "lora_alpha": 16}
    synced = LoRARequest("synced", 50)
    with attached(engine) as llm:

        def generate() -> list[str]:
            return texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=synced))

        with pytest.raises(RequestError, match=r"has no adapter 50 \(synced\)"):
            generate()
        assert llm.add_lora(synced, tensors=one, config=config)
        assert generate() == expected[1]
        with pytest.raises(RequestError, match="adapter 50 exists: pass load_inplace=True"):
            llm.add_lora(synced, tensors=two, config=config)
        replaced = LoRARequest("synced", 50, load_inplace=True)
        assert llm.add_lora(replaced, tensors=two, config=config)
        assert generate() == expected[2]
        llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=loras)  # evict nothing of it
        assert generate() == expected[2]
        with pytest.raises(RequestError, match="the adapter's config: 'use_dora' is not supported"):
            llm.add_lora(replaced, tensors=two, config=config | {"use_dora": True})
        assert generate() == expected[2]
        for number in (1, 2, 3, 50):
            assert llm.remove_lora(number)


def known_adapters(worker: Any) -> str:
    """The adapters that an engine knows, with their digests."""
    known = sorted(worker._core.adapters._known.items())
    return repr([(number, e.name, e.path, e.loaded.digest, e.is_pinned) for number, e in known])


def refuse_at(worker: Any, pid: int, name: str) -> None:
    """Lets a method of the adapters of one engine fail, once."""
    if os.getpid() != pid:
        return
    adapters = worker._core.adapters

    def refuse(*_: object) -> None:
        delattr(adapters, name)
        raise RequestError("no")

    setattr(adapters, name, refuse)


def test_a_pool_changes_an_adapter_at_all_engines_or_none(loras: list[LoRARequest]) -> None:
    tensors = load_file(Path(loras[2].lora_path, "adapter_model.safetensors"))
    replaced = LoRARequest("new", 1, loras[1].lora_path, load_inplace=True)
    sent = LoRARequest("sent", 9)
    with LLM("tiny", data_parallel_size=2, **OPTIONS | {"num_threads": 2}) as llm:
        assert llm.add_lora(loras[0])
        before = llm.collective_rpc(known_adapters)
        assert before[0] == before[1]
        changes: list[tuple[str, Callable[[], object]]] = [
            ("add", lambda: llm.add_lora(loras[1])),
            ("add", lambda: llm.add_lora(replaced)),
            ("pin", lambda: llm.pin_lora(1)),
            ("remove", lambda: llm.remove_lora(1)),
            ("add_made", lambda: llm.add_lora(sent, tensors=tensors, config=CONFIG)),
        ]
        for name, change in changes:
            llm.collective_rpc(refuse_at, args=(pids_of(llm)[1], name))
            with pytest.raises(RequestError, match=r"^engine 1 of the pool: no$"):
                change()
            assert llm.collective_rpc(known_adapters) == before
            change()
            before = llm.collective_rpc(known_adapters)
            assert before[0] == before[1]
        assert llm.list_loras() == {2, 9}
