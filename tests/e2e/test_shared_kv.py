"""Engines that share a prefix cache: what they say has the bits of an engine that shares nothing.

The first engine fills the cache. The second one finds what the first has computed, while the first
still runs or after it has ended, in place or by copies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.adapted_models import Adapted
from support.determinism import ask, ask_shuffled, make_requests
from support.reference_models import RECURRENT, VARIANTS, make_model
from support.variants import slow

from shmllm import LLM, LoRARequest, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks", "own_regions")]

BASE: dict[str, Any] = {"dtype": "float32", "multiprocess": False, "num_threads": 1}
SHARED: dict[str, Any] = BASE | {"shared_kv_cache_bytes": "48M"}
FAMILIES = ["gemma3", "qwen3_next"]
"""Those in the default suite: one with windows, one with states."""
OTHERS = [kind for kind in dict.fromkeys([*VARIANTS, *RECURRENT]) if kind not in FAMILIES]
SETTINGS: dict[str, dict[str, Any]] = {
    "in-place": {},
    "copies": {"shared_kv_cache_reads": "copy"},
    "short-chunks": {"max_num_batched_tokens": 19},
    "overlapped": {"async_scheduling": True},
    "copies-overlapped": {"shared_kv_cache_reads": "copy", "async_scheduling": True},
    "other-sizes": {"shared_kv_cache_bytes": "16M", "max_num_seqs": 3, "num_threads": 2},
    "smallest-cache": {"kv_cache_memory_bytes": 3 * 2**19, "max_model_len": 720},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


FEW = ["in-place", "copies-overlapped"]


@pytest.fixture(scope="module", params=[*FAMILIES, *map(slow, OTHERS)])
def model(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    directory: Path = tmp_path_factory.mktemp("models") / request.param
    make_model(request.param, directory, max_position_embeddings=1024)
    return directory


def num_cached(llm: LLM, ids: list[int], **prompt: Any) -> int:
    params = SamplingParams(temperature=0, max_tokens=2)
    [output] = llm.generate({"prompt_token_ids": ids, **prompt}, params, use_tqdm=False)
    assert output.num_cached_tokens is not None
    return output.num_cached_tokens


@pytest.mark.parametrize("names", [FEW, slow([*SETTINGS])], ids=["few", "all"])
def test_blocks_of_another_engine_change_no_bit(model: Path, names: list[str]) -> None:
    requests = make_requests(4096, 16, seed=3)
    states = {"mamba_block_size": 32}
    with LLM(str(model), **BASE, **states) as alone:
        expected = ask(alone, requests)
        once = alone.get_metrics()["prefix_hit_tokens"]
    with LLM(str(model), **SHARED, **states) as first:
        assert ask(first, requests) == expected
        for name in names:
            with LLM(str(model), **(SHARED | states | SETTINGS[name])) as second:
                assert ask_shuffled(second, requests, seed=4) == expected, name
                hits = second.get_metrics()["prefix_hit_tokens"]
                assert hits > 2 * once, name
                assert ask(second, requests) == expected, f"{name}, repeated"
        assert ask(first, requests) == expected
    with LLM(str(model), **SHARED, **states) as third:
        assert ask(third, requests) == expected
        assert third.get_metrics()["prefix_hit_tokens"] > 2 * once


def test_a_prefix_is_found_by_the_next_engine(model: Path) -> None:
    prompt = [*range(1, 300)]
    states = {"mamba_block_size": 32}
    with LLM(str(model), **SHARED, **states) as llm:
        assert num_cached(llm, prompt) == 0
        found = num_cached(llm, prompt)
        assert found >= 256
    for _ in range(2):
        with LLM(str(model), **SHARED, **states) as llm:
            assert num_cached(llm, prompt) == found


def test_salts_and_dtypes_share_nothing(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    prompt = [*range(1, 200)]
    with LLM(str(tmp_path), **SHARED) as llm:
        assert num_cached(llm, prompt, cache_salt="one") == 0
    with LLM(str(tmp_path), **SHARED) as llm:
        assert num_cached(llm, prompt, cache_salt="two") == 0
        assert num_cached(llm, prompt) == 0
        assert num_cached(llm, prompt, cache_salt="one") == 192
    with LLM(str(tmp_path), **(SHARED | {"dtype": "bfloat16"})) as llm:
        assert num_cached(llm, prompt) == 0
    with LLM(str(tmp_path), **SHARED, block_size=32) as llm:
        assert num_cached(llm, prompt) == 0


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_a_draft_model_is_right_behind_copied_hits(ranks: int) -> None:
    """It has not computed the hits: they lie in blocks that it has filled for other prompts."""
    options = SHARED | {
        "tensor_parallel_size": ranks,
        "num_threads": ranks,
        "kv_cache_memory_bytes": ranks * 5 * 2**19,
        "max_model_len": 256,
        "speculative_config": {"model": "tiny", "adaptive": False},
    }
    prompts = [[*range(first, first + 100)] for first in range(1, 900, 100)]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)

    def ask_all(llm: LLM, some: list[list[int]]) -> list[Any]:
        inputs = [{"prompt_token_ids": prompt} for prompt in some]
        found = llm.generate(inputs, params, use_tqdm=False)
        metrics = llm.get_metrics()
        assert 0 < metrics["draft_tokens"] == metrics["accepted_tokens"]
        return [output.outputs[0].token_ids for output in found]

    with LLM("tiny", **options) as first, LLM("tiny", **options) as second:
        expected = ask_all(first, prompts)
        ask_all(second, [prompt[::-1] for prompt in prompts])
        before = second.get_metrics()["prefix_hit_tokens"]
        assert ask_all(second, prompts) == expected
        assert second.get_metrics()["prefix_hit_tokens"] >= before + 96 * len(prompts)


@pytest.mark.parametrize("reads", ["in_place", "copy"])
def test_sleep_and_new_weights(tmp_path: Path, reads: str) -> None:
    """A sleeping engine gives its blocks back; blocks of other weights are never found."""
    weights = make_model("llama", tmp_path).state_dict()
    prompt = [*range(1, 200)]
    with LLM(str(tmp_path), **SHARED, shared_kv_cache_reads=reads) as llm:
        assert num_cached(llm, prompt) == 0
        llm.sleep(level=1)
        llm.wake_up()
        assert num_cached(llm, prompt) == 0
        assert num_cached(llm, prompt) == 192
        llm.update_weights([(name, tensor * 1.01) for name, tensor in weights.items()])
        assert num_cached(llm, prompt) == 0
    with LLM(str(tmp_path), **SHARED, shared_kv_cache_reads=reads) as llm:
        assert num_cached(llm, prompt) == 192, "of the weights in the directory"
        llm.update_weights([(name, tensor * 1.01) for name, tensor in weights.items()])
        assert num_cached(llm, prompt) == 0
        llm.collective_rpc("reload_weights")
        assert num_cached(llm, prompt) == 192


def test_random_weights_share_nothing_with_those_of_their_directory(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    prompt, directory = [*range(1, 200)], str(tmp_path)
    random: dict[str, Any] = SHARED | {"load_format": "dummy"}
    with LLM(directory, **random) as llm:
        assert num_cached(llm, prompt) == 0
        llm.collective_rpc("reload_weights", args=(directory,))
        assert num_cached(llm, prompt) == 0
        with LLM(directory, **SHARED) as other:
            assert num_cached(other, prompt) == 192
        llm.collective_rpc("reload_weights")
        assert num_cached(llm, prompt) == 192, "of the random weights"
    with LLM(directory, **random) as llm:
        assert num_cached(llm, prompt) == 192


def test_weights_that_are_written_behind_a_reload_are_not_shared(tmp_path: Path) -> None:
    weights = make_model("llama", tmp_path).state_dict()
    prompt = [*range(1, 200)]

    def patch(worker: Any) -> None:
        worker.reload_weights()
        worker.load_weights([(name, tensor * 1.01) for name, tensor in weights.items()])

    with LLM(str(tmp_path), **SHARED) as llm:
        llm.collective_rpc(patch)
        assert num_cached(llm, prompt) == 0
        with LLM(str(tmp_path), **SHARED) as other:
            assert num_cached(other, prompt) == 0


def test_an_adapter_finds_only_what_it_has_computed(tmp_path: Path) -> None:
    adapted = Adapted("llama", tmp_path)
    shared: dict[str, Any] = {"shared_kv_cache_bytes": "48M", "num_threads": 1}
    prompt = {"prompt_token_ids": [*range(1, 90)]}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def ask_with(llm: LLM, lora: LoRARequest | None) -> tuple[list[int], int | None]:
        [output] = llm.generate(prompt, params, use_tqdm=False, lora_request=lora)
        return output.outputs[0].token_ids, output.num_cached_tokens

    first, other = adapted.loras[:2]
    with adapted.engine() as alone:
        expected = [ask_with(alone, lora)[0] for lora in (None, first, other)]
    with adapted.engine(**shared) as one, adapted.engine(**shared) as two:
        assert ask_with(one, first) == (expected[1], 0)
        assert ask_with(two, None) == (expected[0], 0)
        assert ask_with(two, other) == (expected[2], 0)
        renamed = LoRARequest("another name", 77, first.lora_path)
        assert ask_with(two, renamed) == (expected[1], 80), "the contents count"
        assert ask_with(one, None) == (expected[0], 80)


@pytest.mark.slow
def test_blocks_of_others_are_no_memory_of_the_engine(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    options = SHARED | {"multiprocess": True, "shared_kv_cache_bytes": "400M"}
    with LLM(str(tmp_path), **options) as first, LLM(str(tmp_path), **options) as second:
        assert num_cached(first, [*range(1, 200)]) == 0
        assert num_cached(second, [*range(1, 200)]) == 192
        own = second.sleep(level=0).before
    alone = {name: value for name, value in options.items() if "shared" not in name}
    with LLM(str(tmp_path), **alone) as llm:
        assert num_cached(llm, [*range(1, 200)]) == 0
        assert own.total < llm.sleep(level=0).before.total + 200 * 2**20
