"""Engines that share a prefix cache, in processes of their own: kills, damage, sleep and weights.

Each answer is compared with that of an engine that shares nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.reference_models import make_model
from support.waiting import holds_within, wait_until

from shmllm import LLM, EngineStartError, SamplingParams
from shmllm.engine import shared_kv as engine_part
from shmllm.errors import NoSpaceError
from shmllm.ipc.segment import is_locked
from shmllm.shared_kv import joining
from shmllm.shared_kv.folder import folders, places, region_path
from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.region import Region

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks", "own_regions")]

PROMPT = [*range(1, 200)]
OTHER = [*range(900, 1099)]
CACHED = 192
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "kv_cache_memory_bytes": 2**26,
    "shared_kv_cache_bytes": "16M",
}
LOCAL: dict[str, Any] = OPTIONS | {"multiprocess": False}
NUM_BYTES = 2**24


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> str:
    directory: Path = tmp_path_factory.mktemp("models") / "llama"
    make_model("llama", directory, max_position_embeddings=1024)
    return str(directory)


@pytest.fixture(scope="module")
def expected(model: str) -> dict[int, list[int]]:
    """What an engine that shares nothing answers to a prompt that begins with this token."""
    alone = {name: value for name, value in OPTIONS.items() if "shared" not in name}
    with LLM(model, multiprocess=False, **alone) as llm:
        return {prompt[0]: answer(llm, prompt)[0] for prompt in (PROMPT, OTHER)}


def answer(llm: LLM, prompt: list[int], **more: Any) -> tuple[list[int], int]:
    """The tokens, and how many of the prompt were cached."""
    [output] = llm.generate({"prompt_token_ids": prompt, **more}, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens is not None
    return output.outputs[0].token_ids, output.num_cached_tokens


def regions() -> list[Path]:
    return [region_path(each, place) for each in folders() for place in sorted(places(each))]


def shared_bytes() -> int:
    return sum(path.stat().st_blocks * 512 for path in regions())


def is_owned(path: Path) -> bool:
    with open(path, "rb") as file:
        return is_locked(file.fileno())


def test_the_owner_is_killed_while_another_reads(model: str, expected: Any) -> None:
    with LLM(model, **OPTIONS) as owner, LLM(model, **OPTIONS) as reader:
        assert answer(owner, PROMPT) == (expected[PROMPT[0]], 0)
        reader.enqueue([{"prompt_token_ids": PROMPT}], GREEDY, use_tqdm=False)
        first = regions()[0]
        assert owner.engine_pid is not None
        os.kill(owner.engine_pid, signal.SIGKILL)
        wait_until(lambda: not is_owned(first), "the owner is dead")
        [output] = reader.wait_for_completion(use_tqdm=False)
        assert output.outputs[0].token_ids == expected[PROMPT[0]]
        assert output.num_cached_tokens == CACHED
        with LLM(model, **LOCAL) as third:
            assert is_owned(first), "it has adopted the region"
            assert len(regions()) == 2
            assert answer(third, PROMPT) == (expected[PROMPT[0]], CACHED)
            assert answer(third, OTHER) == (expected[OTHER[0]], 0)
            assert answer(reader, OTHER) == (expected[OTHER[0]], CACHED)


def damage(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize("part", ["index", pytest.param("all", marks=pytest.mark.slow)])
def test_damage_is_one_error_and_answers_stay_right(model: str, expected: Any, part: str) -> None:
    with LLM(model, **LOCAL) as owner, LLM(model, **OPTIONS) as reader:
        answer(owner, PROMPT)
        assert answer(reader, PROMPT) == (expected[PROMPT[0]], CACHED)
        region = Region.open(regions()[0], 0)
        tables, end = region.layout.tables[0], region.layout.pins_offset
        region.close()
        begin = tables.index if part == "index" else 0
        damage(regions()[0], begin, b"\xff" * (end - begin))
        for prompt in (OTHER, PROMPT, OTHER, [*PROMPT, 5]):
            tokens = answer(reader, prompt)[0]
            assert len(prompt) == 200 or tokens == expected[prompt[0]]
        assert reader.health() == "ready"
        found = [each for each in reader.engine_errors() if "shared KV cache" in each.text]
        assert [each.count for each in found] == [1]


def test_files_that_are_no_regions_are_passed_over(model: str, expected: Any) -> None:
    with LLM(model, **LOCAL) as llm:
        answer(llm, PROMPT)
    [path] = regions()
    path.rename(path.with_name("1"))
    os.mkfifo(path)
    (path.parent / "2").symlink_to("nowhere")
    (path.parent / "3").write_bytes(b"x" * 10_000)
    try:
        with LLM(model, **LOCAL) as llm:
            assert answer(llm, PROMPT) == (expected[PROMPT[0]], CACHED)
    finally:
        for name in "023":
            (path.parent / name).unlink(missing_ok=True)


def test_sleep_gives_the_memory_back_until_the_engine_wakes_up(model: str, expected: Any) -> None:
    with LLM(model, **LOCAL) as llm:
        answer(llm, PROMPT)
        assert shared_bytes() >= NUM_BYTES
        llm.sleep(level=1)
        assert shared_bytes() == 0
        llm.wake_up()
        assert answer(llm, PROMPT) == (expected[PROMPT[0]], 0)
        assert shared_bytes() >= NUM_BYTES
        assert answer(llm, PROMPT) == (expected[PROMPT[0]], CACHED)


def test_a_region_that_is_found_during_a_sleep_is_given_back(
    model: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of the weights may take longer than the start waits."""
    may_join, sizes = threading.Event(), []

    def late(*arguments: Any) -> OwnRegion:
        assert may_join.wait(60)
        region = joining.join(*arguments)
        sizes.append(shared_bytes())
        return region

    monkeypatch.setattr(engine_part, "join", late)
    monkeypatch.setattr(engine_part, "START_WAIT_S", 0)
    with LLM(model, **LOCAL) as llm:
        answer(llm, PROMPT)
        llm.sleep(level=1)
        may_join.set()
        wait_until(lambda: bool(sizes), "it has a region")
        assert sizes[0] >= NUM_BYTES
        wait_until(lambda: not shared_bytes(), "the region is given back")
        llm.wake_up()
        answer(llm, PROMPT)
        assert answer(llm, PROMPT) == (expected[PROMPT[0]], CACHED)
        assert shared_bytes() >= NUM_BYTES


def test_weights_that_are_read_during_a_sleep_take_no_shared_memory(
    model: str, expected: Any
) -> None:
    with LLM(model, **LOCAL) as llm:
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        assert not holds_within(lambda: shared_bytes() > 0, 0.3)
        llm.wake_up()
        answer(llm, PROMPT)
        assert shared_bytes() >= NUM_BYTES
        assert answer(llm, PROMPT) == (expected[PROMPT[0]], CACHED)


def test_a_reset_forgets_the_own_blocks(model: str) -> None:
    with LLM(model, **LOCAL) as llm:
        answer(llm, PROMPT)
        assert llm.reset_prefix_cache(reset_connector=True)
        assert answer(llm, PROMPT)[1] == 0
        with LLM(model, **LOCAL) as other:
            assert answer(other, PROMPT)[1] == CACHED
            assert other.reset_prefix_cache(reset_connector=True)
            assert answer(other, PROMPT)[1] == CACHED, "the blocks of others stay"


def test_an_engine_that_is_closed_with_requests_leaves_its_region(model: str) -> None:
    with LLM(model, **LOCAL) as llm:
        answer(llm, PROMPT)
        llm.enqueue([{"prompt_token_ids": PROMPT}], GREEDY, use_tqdm=False)
    [path] = regions()
    assert not is_owned(path)


@pytest.mark.slow
def test_engines_that_start_at_once_get_regions_of_their_own(model: str, expected: Any) -> None:
    with LLM(model, **OPTIONS) as llm:
        answer(llm, PROMPT)
    with ThreadPoolExecutor() as threads:
        engines = [*threads.map(lambda _: LLM(model, **OPTIONS), range(2))]
    try:
        assert [is_owned(path) for path in regions()] == [True, True]
        for llm in engines:
            assert answer(llm, PROMPT) == (expected[PROMPT[0]], CACHED)
    finally:
        for llm in engines:
            llm.close()


def test_a_size_without_room_for_a_block_is_an_error_of_the_start(model: str) -> None:
    with pytest.raises(EngineStartError, match="1 has no room for a block; the smallest"):
        LLM(model, **(LOCAL | {"shared_kv_cache_bytes": 1}))
    assert not regions()


def test_an_engine_without_room_warns_and_works_alone(
    model: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise NoSpaceError("shared memory is full")

    monkeypatch.setattr(joining, "create", full)
    with LLM(model, **LOCAL) as llm:
        assert llm.facts.shared_kv_cache_bytes == 0
        assert any("not shared: shared memory is full" in each for each in llm.facts.warnings)
        assert answer(llm, PROMPT) == (expected[PROMPT[0]], 0)


def test_a_directory_that_is_none_is_an_error_of_the_start(
    model: str, own_regions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_regions / "file").write_text("")
    for name, message in ((str(own_regions / "file"), "cannot make"), ("relative", "absolute")):
        monkeypatch.setenv("SHMLLM_SHARED_KV_DIR", name)
        with pytest.raises(EngineStartError, match=message):
            LLM(model, **LOCAL)
