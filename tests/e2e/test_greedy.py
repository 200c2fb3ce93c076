"""Greedy tokens equal transformers' greedy tokens, for several models and engine settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.reference_models import (
    MAX_TOKENS,
    ReferenceModel,
    greedy_tokens,
    make_model,
    make_prompts,
)

from shmllm import LLM, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
# An engine computes the same in the process of the test, where it starts sooner.
LOCAL: dict[str, Any] = {"dtype": "float32", "multiprocess": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": LOCAL,
    "token-budget-16": LOCAL | {"max_num_batched_tokens": 16},
    "no-prefix-caching": LOCAL | {"enable_prefix_caching": False},
    "one-at-a-time": LOCAL | {"max_num_seqs": 1},
}


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def bytes_per_block(llm: LLM) -> int:
    return llm.facts.kv_cache_bytes // (llm.facts.num_blocks + 1)


@pytest.mark.parametrize("setting", SETTINGS)
def test_equals_transformers(reference: ReferenceModel, setting: str) -> None:
    with LLM(str(reference.directory), **SETTINGS[setting]) as llm:
        reference.assert_greedy(tokens_of(llm, reference.prompts))


@pytest.mark.parametrize("reference", ["llama", "tiny"], indirect=True)
def test_an_engine_process_equals_transformers(reference: ReferenceModel) -> None:
    with LLM(str(reference.directory), dtype="float32") as llm:
        tokens = tokens_of(llm, reference.prompts)
    reference.assert_greedy(tokens)
    some = range(0, len(tokens), 4)
    assert [tokens[i] for i in some] == [
        greedy_tokens(reference.model, reference.prompts[i]) for i in some
    ]


def test_equals_transformers_with_preemption(reference: ReferenceModel) -> None:
    options = LOCAL | {"max_model_len": 400}
    with LLM(str(reference.directory), **options) as probe:
        room_for_two = 2 * (400 // 16 + 1) * bytes_per_block(probe)
    options |= {"kv_cache_memory_bytes": room_for_two}
    with LLM(str(reference.directory), **options) as llm:
        reference.assert_greedy(tokens_of(llm, reference.prompts))
        assert llm.get_metrics()["preemptions"] > 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_size", ["1GB", "200KB"])
def test_loads_sharded_and_tied_checkpoints(
    tmp_path: Path, tied: bool, max_shard_size: str
) -> None:
    model = make_model("llama", tmp_path, max_shard_size=max_shard_size, tie_word_embeddings=tied)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or max_shard_size == "1GB"
    prompts = make_prompts(model.config.vocab_size, longest=40)[:8]
    expected = [greedy_tokens(model, prompt) for prompt in prompts]
    with LLM(str(tmp_path), **LOCAL) as llm:
        assert tokens_of(llm, prompts) == expected
