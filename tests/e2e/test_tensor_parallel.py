"""Several ranks compute what one process computes: transformers' greedy tokens, logits that differ
by rounding only, and the same bits whatever runs beside a request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.determinism import ask, ask_one_by_one, ask_shuffled, make_requests
from support.reference_models import KINDS, MAX_TOKENS, ReferenceModel, make_model
from support.variants import slow

from shmllm import LLM, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

LOCAL: dict[str, Any] = {"dtype": "float32", "multiprocess": False}
RANKS: dict[str, Any] = LOCAL | {"tensor_parallel_size": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, logprobs=0)


def ask_greedy(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def logits_of(llm: LLM, prompts: list[list[int]]) -> list[float]:
    """The logit of each token of the prompts, but for the first ones."""
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], SCORED, use_tqdm=False)
    return [
        entry[token].logprob
        for output in outputs
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        if entry is not None
    ]


@pytest.mark.parametrize("reference", KINDS, indirect=True)
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


@pytest.mark.parametrize("reference", ["llama", slow("qwen2_moe")], indirect=True)
@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel_size": 4}, slow({"num_threads": 4}), {"async_scheduling": True}],
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
        ("llama", {"dtype": "float32"}),
        ("llama", {"dtype": "bfloat16"}),
        ("llama", {"quantization": "int8", "activation_dtype": "int8"}),
        ("qwen2_moe", {"quantization": "int4"}),
        slow(("qwen3_next", {"dtype": "bfloat16"})),
        slow(("deepseek_v3", {"dtype": "float32"})),
        slow(("gemma3", {"kv_cache_dtype": "int8"})),
    ],
    ids=lambda each: "-".join([each[0], *each[1].values()]),
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[LLM]:
    kind, options = request.param
    directory = tmp_path_factory.mktemp(kind)
    make_model(kind, directory, intermediate_size=256, max_position_embeddings=1024)
    settings = {"multiprocess": False, "kv_cache_memory_bytes": 2**26}
    with LLM(str(directory), tensor_parallel_size=2, **settings, **options) as llm:
        yield llm


def test_bits_do_not_depend_on_what_runs_beside_a_request(ranks: LLM) -> None:
    requests = make_requests(4096, 16, seed=1)
    ranks.reset_prefix_cache()
    alone = ask_one_by_one(ranks, requests)
    assert ask(ranks, requests) == alone
    assert ask_shuffled(ranks, requests, seed=2) == alone
