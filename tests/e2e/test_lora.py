"""Requests with adapters in whole engines: tokens of the merged models, and bits that no other
request changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conformance.adapters import AdaptersConformance
from support import lora_adapters
from support.adapted_models import (
    GREEDY,
    WHICH,
    Adapted,
    alone,
    as_prompts,
    ask,
    tokens_of,
)
from support.engines import assert_idle
from support.variants import slow

from shmllm import LLM, EngineStartError, LoRARequest, RequestError

FAMILIES = ["llama", "qwen3", "mixtral", *map(slow, ("phi3", "qwen2_moe", "qwen3_moe", "gpt_oss"))]


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_tokens_are_those_of_the_merged_models(kind: str, tmp_path: Path) -> None:
    adapted = Adapted(kind, tmp_path)
    mixed = adapted.mixed()
    with adapted.engine() as llm:
        prompts = as_prompts(adapted.prompts)
        found = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=mixed)
        base = tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False))
    assert [output.lora_request for output in found] == mixed
    adapted.assert_merged(tokens_of(found))
    changed = sum(a != b for a, b in zip(base, tokens_of(found), strict=True))
    assert changed > len(adapted.prompts) // 2


@pytest.fixture(scope="module", params=["qwen3", "mixtral"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(request.param, tmp_path_factory.mktemp("adapted"))


@pytest.fixture(scope="module")
def shared_engine(adapted: Adapted) -> Iterator[LLM]:
    with adapted.engine() as llm:
        yield llm


@pytest.fixture
def llm(shared_engine: LLM) -> Iterator[LLM]:
    yield shared_engine
    assert_idle(shared_engine)


class TestAdapters(AdaptersConformance):
    pass


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 23, "enable_prefix_caching": False},  # chunks
        {
            "num_gpu_blocks_override": 14,
            "scheduler_reserve_full_isl": False,
            "max_num_seqs": 16,
        },  # preemptions
        slow({"num_threads": 1}),
        slow({"async_scheduling": True}),
        slow({"max_loras": 2, "max_cpu_loras": 3}),
        slow({"scheduling_policy": "priority", "max_loras": 1}),
    ],
)
def test_a_request_has_the_bits_that_it_has_alone(
    options: dict[str, Any], adapted: Adapted, llm: LLM
) -> None:
    expected = alone(llm, adapted, WHICH)
    with adapted.engine(**options) as other:
        assert ask(other, adapted, WHICH) == expected
        assert ask(other, adapted, WHICH[::-1])[::-1] == expected  # prefix hits, if there are any
        has_preempted = other.get_metrics()["preemptions"] > 0
    assert has_preempted == ("num_gpu_blocks_override" in options)


@pytest.mark.parametrize("drafter", ["ngram", "the base"])
def test_drafts_leave_the_bits_of_adapters(drafter: str, adapted: Adapted, llm: LLM) -> None:
    config: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 1}
    if drafter == "the base":
        config = {"model": str(adapted.directory)}
    config |= {"adaptive": False, "num_speculative_tokens": 4}
    with adapted.engine(speculative_config=config) as other:
        assert ask(other, adapted, WHICH) == alone(llm, adapted, WHICH)
        stats = other._client._core.scheduler.stats  # type: ignore[attr-defined]
        assert stats.accepted_tokens > 0


def test_a_reload_gives_other_tokens_and_no_stale_hit(
    adapted: Adapted, llm: LLM, tmp_path: Path
) -> None:
    path = lora_adapters.write(tmp_path / "one", adapted.tensors[3], r=4)
    lora = LoRARequest("changing", 101, str(path))
    prompt = as_prompts(adapted.prompts[8:9])

    def generate() -> tuple[list[int], int]:
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=lora)
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    first, num_cached = generate()
    assert num_cached == 0
    assert generate() == (first, 80)
    lora_adapters.write(path, adapted.tensors[5], r=6)
    assert generate() == (first, 80)
    assert llm.add_lora(LoRARequest("changing", 101, str(path), load_inplace=True))
    second, num_cached = generate()
    assert num_cached == 0
    assert second != first
    assert generate() == (second, 80)
    assert llm.remove_lora(101)


def test_sleep_and_new_weights_keep_adapters(adapted: Adapted) -> None:
    prompts, loras = as_prompts(adapted.prompts[:4]), adapted.loras[:4]
    with adapted.engine() as llm:
        before = tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=loras))
        llm.sleep(2)
        llm.wake_up(["weights"])
        llm.update_weights(dict(adapted.model.state_dict()))
        llm.wake_up()
        after = tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=loras))
        assert after == before
        assert llm.list_loras() == {1, 2, 3, 4}


def test_streams_and_queues_take_an_adapter_for_each_prompt(adapted: Adapted, llm: LLM) -> None:
    prompts, mixed = as_prompts(adapted.prompts[:9]), adapted.mixed()[:9]
    expected = tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=mixed))
    streamed = llm.stream(prompts, GREEDY, ordered=True, lora_request=iter(mixed))
    assert tokens_of(list(streamed)) == expected
    llm.enqueue(prompts, GREEDY, lora_request=mixed)
    assert tokens_of(llm.wait_for_completion(use_tqdm=False)) == expected
    with pytest.raises(RequestError, match="lora_request ended before prompt 3"):
        list(llm.stream(prompts, GREEDY, lora_request=mixed[:3]))


def test_wrong_arguments_queue_nothing(adapted: Adapted, llm: LLM) -> None:
    prompts = as_prompts(adapted.prompts[:2])
    bad = LoRARequest("bad", 200, "/nowhere")
    for lora, message in (
        ("name", "must be a LoRARequest or a list"),
        ([adapted.loras[0]], "2 prompts and 1 lora_requests"),
        ([adapted.loras[0], "x"], "must be a LoRARequest, got 'x'"),
        ([adapted.loras[0], bad], r"cannot read /nowhere/adapter_config\.json"),
    ):
        steps = llm.get_metrics()["steps"]
        with pytest.raises(RequestError, match=message):
            llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=lora)
        assert llm.get_metrics()["steps"] == steps
    with (
        adapted.engine(enable_lora=False) as plain,
        pytest.raises(RequestError, match="enable_lora"),
    ):
        plain.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapted.loras[0])


@pytest.mark.parametrize(
    "chosen", [["q_proj", "v_proj"], slow(["experts"]), slow(["up_proj", "o_proj"])]
)
def test_an_adapter_has_the_bits_of_its_chosen_modules(
    chosen: list[str], adapted: Adapted, llm: LLM, tmp_path: Path
) -> None:
    number, which = 3, [3, 12]
    kept = {}
    for name, tensor in adapted.tensors[number - 1].items():
        path = name.partition(".lora_")[0].split(".")
        if ("experts" if "experts" in path else path[-1]) in chosen:
            kept[name] = tensor
    prompts = as_prompts([adapted.prompts[index] for index in which])
    if not kept:  # a model without experts
        with pytest.raises(EngineStartError, match=r"lora_target_modules \['experts'\] names no"):
            adapted.engine(lora_target_modules=chosen)
        return
    config = json.loads(Path(adapted.loras[number - 1].path, "adapter_config.json").read_text())
    path = lora_adapters.write(tmp_path / "part", kept, **config)
    part = LoRARequest("part", 77, str(path))
    expected = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=part)
    llm.remove_lora(77)
    with adapted.engine(lora_target_modules=chosen, enable_prefix_caching=False) as other:
        whole = adapted.loras[number - 1]
        found = other.generate(prompts, GREEDY, use_tqdm=False, lora_request=whole)
        base = other.generate(prompts, GREEDY, use_tqdm=False)
    assert tokens_of(found) == tokens_of(expected)
    assert tokens_of(base) != tokens_of(found)
