"""Several processes compute what one computes: transformers' greedy tokens, logits that differ by
rounding only, or in a pipeline not at all, and the same bits whatever runs beside a request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.determinism import ask, ask_one_by_one, ask_shuffled, make_requests
from support.reference_models import (
    MAX_TOKENS,
    VARIANTS,
    ReferenceModel,
    make_model,
    make_prompts,
)
from support.scoring import SCORED, scores_of
from support.variants import slow

from shmllm import LLM, EngineStartError, PoolingParams, SamplingParams
from shmllm_kernels.cpu.arithmetic import HAS_INT8

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

LOCAL: dict[str, Any] = {"dtype": "float32", "multiprocess": False}
RANKS: dict[str, Any] = LOCAL | {"tensor_parallel_size": 2}
RANKED = [kind if kind == "qwen3_next" else slow(kind) for kind in VARIANTS]
PER_LAYER = ("gemma4", "gemma3n")
UNSTAGED = (*PER_LAYER, "zamba2")
STAGED = [k if k == "deepseek_v3" else slow(k) for k in VARIANTS if k not in UNSTAGED]
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
MEAN = PoolingParams(pooling_type="MEAN")


def ask_greedy(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def logits_of(llm: LLM, prompts: list[list[int]]) -> list[float]:
    """The logit of each token of the prompts, but for the first ones."""
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], SCORED, use_tqdm=False)
    return [score for output in outputs for score in scores_of(output)]


@pytest.mark.parametrize("reference", RANKED, indirect=True)
def test_two_ranks_equal_transformers(reference: ReferenceModel) -> None:
    options = {"logprobs_mode": "raw_logits", "max_num_batched_tokens": 100}
    with LLM(str(reference.directory), **RANKS, **options) as llm:
        assert llm.facts.tensor_parallel_size == 2
        reference.assert_greedy(ask_greedy(llm, reference.prompts))
        found = logits_of(llm, reference.prompts)
    with LLM(str(reference.directory), **LOCAL, **options) as llm:
        expected = logits_of(llm, reference.prompts)
    largest = max(map(abs, expected))
    assert found == pytest.approx(expected, abs=1e-4 * largest, rel=0)


@pytest.mark.parametrize("reference", STAGED, indirect=True)
def test_two_stages_have_the_bits_of_one_process(reference: ReferenceModel) -> None:
    """Each batch has few requests, so that prompts in chunks and decoding ones share steps."""
    settings = LOCAL | {"logprobs_mode": "raw_logits", "max_num_batched_tokens": 100}
    with LLM(str(reference.directory), **settings) as llm:
        expected = logits_of(llm, reference.prompts)
    options = {"pipeline_parallel_size": 2, "max_num_seqs": 5}
    with LLM(str(reference.directory), **settings, **options) as llm:
        assert llm.facts.pipeline_parallel_size == 2
        reference.assert_greedy(ask_greedy(llm, reference.prompts))
        assert logits_of(llm, reference.prompts) == expected


@pytest.mark.parametrize("reference", ["gemma4", slow("gemma3n")], indirect=True)
def test_layers_that_all_read_the_tokens_are_refused_as_stages(reference: ReferenceModel) -> None:
    with pytest.raises(EngineStartError, match="each of its layers reads the tokens"):
        LLM(str(reference.directory), **LOCAL, pipeline_parallel_size=2)


@pytest.mark.parametrize(
    "options",
    [
        slow({}),
        {"num_gpu_blocks_override": 50, "scheduler_reserve_full_isl": False, "max_model_len": 720},
    ],
    ids=str,
)
def test_batches_of_a_pipeline_do_not_disturb_each_other(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    make_model("llama", tmp_path, max_position_embeddings=1024)
    requests = make_requests(4096, 24, seed=5)
    with LLM(str(tmp_path), **LOCAL) as llm:
        alone = ask_one_by_one(llm, requests)
    stages = {"pipeline_parallel_size": 3, "num_threads": 3, "max_num_seqs": 6}
    with LLM(str(tmp_path), **LOCAL, **options, **stages) as llm:
        assert ask(llm, requests) == alone
        assert ask_shuffled(llm, requests, seed=6) == alone
        assert (llm.get_metrics()["preemptions"] > 0) == bool(options)


def test_vectors_of_all_batches_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """Means of prompts in chunks, of more requests than there are in a batch."""
    make_model("llama", tmp_path)
    prompts = [{"prompt_token_ids": list(range(1, 20 + length))} for length in range(9)]
    found = []
    for options in ({}, {"pipeline_parallel_size": 2, "max_num_seqs": 2}):
        with LLM(str(tmp_path), **LOCAL, max_num_batched_tokens=16, **options) as llm:
            outputs = llm.embed(prompts, pooling_params=MEAN, use_tqdm=False)
            found.append([output.outputs.embedding for output in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize("reference", ["llama", slow("qwen2_moe")], indirect=True)
@pytest.mark.parametrize(
    "options",
    [slow({"tensor_parallel_size": 4}), slow({"num_threads": 4}), slow({"async_scheduling": True})],
    ids=str,
)
def test_other_numbers_of_ranks_and_threads(
    reference: ReferenceModel, options: dict[str, Any]
) -> None:
    """Four ranks share two key-value heads."""
    settings = RANKS | {"num_threads": 4} | options
    with LLM(str(reference.directory), **settings) as llm:
        assert llm.facts.num_threads == 4
        reference.assert_greedy(ask_greedy(llm, reference.prompts))


@pytest.fixture(
    scope="module",
    params=[
        slow(("llama", {"dtype": "float32"})),
        ("llama", {"dtype": "bfloat16"}),
        ("llama", {"quantization": "int8", "activation_dtype": "int8"}),
        slow(("qwen2_moe", {"quantization": "int4"})),
        slow(("qwen3_next", {"dtype": "bfloat16"})),
        slow(("deepseek_v3", {"dtype": "float32"})),
        slow(("gemma3", {"kv_cache_dtype": "int8"})),
    ],
    ids=lambda each: "-".join([each[0], *each[1].values()]),
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[LLM]:
    kind, options = request.param
    if options.get("activation_dtype") == "int8" and not HAS_INT8:
        pytest.skip("the CPU lacks AVX512_VNNI and AVX2")
    directory = tmp_path_factory.mktemp(kind)
    sizes = {"intermediate_size": 256, "max_position_embeddings": 1024}
    if "moe" in kind:  # whole groups of 4 bits
        sizes |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 128}
    make_model(kind, directory, **sizes)
    settings = {"multiprocess": False, "kv_cache_memory_bytes": 2**26}
    with LLM(str(directory), tensor_parallel_size=2, **settings, **options) as llm:
        yield llm


def test_bits_do_not_depend_on_what_runs_beside_a_request(ranks: LLM) -> None:
    requests = make_requests(4096, 16, seed=1)
    ranks.reset_prefix_cache()
    alone = ask_one_by_one(ranks, requests)
    assert ask(ranks, requests) == alone
    assert ask_shuffled(ranks, requests, seed=2) == alone


@pytest.mark.parametrize("kind", ["qwen2", slow("gemma3")])
def test_the_rounded_head_of_a_tied_model_is_divided(kind: str, tmp_path: Path) -> None:
    make_model(kind, tmp_path, tie_word_embeddings=True, intermediate_size=256)
    found = []
    for options in LOCAL, RANKS:
        with LLM(str(tmp_path), **options, quantization="int8", activation_dtype="float32") as llm:
            found.append(ask_greedy(llm, make_prompts(4096)[:3]))
    assert found[0] == found[1]


def test_rows_are_not_divided_within_a_group_of_4_bits(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    with pytest.raises(EngineStartError, match="int4 cannot be divided at column 48, within a "):
        LLM(str(tmp_path), **RANKS, quantization="int4")
