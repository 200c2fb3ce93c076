"""Greedy tokens equal transformers' greedy tokens, for several models and engine settings."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from support.cache_shapes import cache_shape
from support.reference_models import (
    ALIKE,
    MAX_TOKENS,
    VARIANTS,
    ReferenceModel,
    greedy_tokens,
    make_model,
    make_prompts,
)
from support.variants import diagonal, slow

from shmllm import LLM, RequestError, SamplingParams, StructuredOutputsParams
from shmllm.core.kv_groups import most_blocks
from shmllm.models.config import ModelConfig
from shmllm.worker.cpu.cache import layout_of

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
# An engine computes the same in the process of the test, where it starts sooner.
LOCAL: dict[str, Any] = {"dtype": "float32", "multiprocess": False}
PREEMPTED = ("llama", "mixtral", "qwen3_next")
"""The families of the default suite: blocks of keys and values alone, experts, states."""
SETTINGS: dict[str, dict[str, Any]] = {
    "default": LOCAL,
    "short-chunks": LOCAL | {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 5},
    "no-prefix-caching": LOCAL | {"enable_prefix_caching": False},
    "one-at-a-time": LOCAL | {"max_num_seqs": 1},
}


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("reference", "setting"),
    diagonal([kind for kind in (*VARIANTS, "tiny") if kind not in ALIKE], list(SETTINGS))
    + [slow(*each) for each in itertools.product(ALIKE, SETTINGS)],
    indirect=["reference"],
)
def test_equals_transformers(reference: ReferenceModel, setting: str) -> None:
    with LLM(str(reference.directory), **SETTINGS[setting]) as llm:
        reference.assert_greedy(tokens_of(llm, reference.prompts))


@pytest.mark.parametrize("reference", ["llama", slow("tiny")], indirect=True)
def test_an_engine_process_equals_transformers(reference: ReferenceModel) -> None:
    with LLM(str(reference.directory), dtype="float32") as llm:
        tokens = tokens_of(llm, reference.prompts)
    reference.assert_greedy(tokens)
    some = range(0, len(tokens), 4)
    assert [tokens[i] for i in some] == [
        greedy_tokens(reference.model, reference.prompts[i]) for i in some
    ]


@pytest.mark.parametrize(
    "reference",
    [kind if kind in PREEMPTED else slow(kind) for kind in (*VARIANTS, "tiny")],
    indirect=True,
)
def test_equals_transformers_with_preemption(reference: ReferenceModel) -> None:
    options = LOCAL | {"max_model_len": 400}
    config = ModelConfig.from_directory(reference.directory)
    shape = cache_shape(config, 16, lambda heads: layout_of(heads, 16, "float32").block_bytes)
    grows = bool(config.all_attentions)  # a request without attention holds one state
    blocks = most_blocks(shape.groups, 400, 2048, 16) if grows else 1
    options |= {"num_gpu_blocks_override": 2 * (blocks + 1), "scheduler_reserve_full_isl": False}
    with LLM(str(reference.directory), **options) as llm:
        assert 2 < llm.facts.max_concurrency <= 3
        reference.assert_greedy(tokens_of(llm, reference.prompts))
        assert (llm.get_metrics()["preemptions"] > 0) == grows


def test_preemption_with_a_given_number_of_blocks(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path)
    prompts = make_prompts(model.config.vocab_size, longest=40)[:8]
    options = LOCAL | {
        "max_model_len": 80,
        "num_gpu_blocks_override": 8,
        "scheduler_reserve_full_isl": False,
    }
    with LLM(str(tmp_path), **options) as llm:
        assert llm.facts.num_blocks == 7
        assert tokens_of(llm, prompts) == [greedy_tokens(model, prompt) for prompt in prompts]
        assert llm.get_metrics()["preemptions"] > 0


def test_without_a_tokenizer(tmp_path: Path) -> None:
    """Token ids are computed as ever; what needs text is an error, and the engine goes on."""
    model = make_model("llama", tmp_path)
    prompts = make_prompts(model.config.vocab_size, longest=40)[:3]
    (tmp_path / "tokenizer.json").unlink(missing_ok=True)
    with LLM(str(tmp_path), skip_tokenizer_init=True, **LOCAL) as llm:
        for call in (
            lambda: llm.generate("text"),
            lambda: llm.chat([{"role": "user", "content": "text"}]),
            lambda: llm.generate([prompts[0]], SamplingParams(stop="x")),
            lambda: llm.generate([prompts[0]], SamplingParams(bad_words=["x"])),
            lambda: llm.generate(
                [prompts[0]],
                SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")),
            ),
            llm.get_tokenizer,
        ):
            with pytest.raises(RequestError, match="started with `skip_tokenizer_init=True`: pass"):
                call()
        assert tokens_of(llm, prompts) == [greedy_tokens(model, prompt) for prompt in prompts]
        params = SamplingParams(temperature=0, max_tokens=3, logprobs=1)
        [output] = llm.generate({"prompt_token_ids": prompts[0]}, params, use_tqdm=False)
        assert output.outputs[0].text == ""
        assert output.outputs[0].logprobs[0]


@pytest.mark.parametrize(("max_shard_size", "tied"), diagonal(["1GB", "200KB"], [False, True]))
def test_loads_sharded_and_tied_checkpoints(
    tmp_path: Path, tied: bool, max_shard_size: str
) -> None:
    model = make_model("llama", tmp_path, max_shard_size=max_shard_size, tie_word_embeddings=tied)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or max_shard_size == "1GB"
    prompts = make_prompts(model.config.vocab_size, longest=40)[:8]
    expected = [greedy_tokens(model, prompt) for prompt in prompts]
    with LLM(str(tmp_path), **LOCAL) as llm:
        assert tokens_of(llm, prompts) == expected
