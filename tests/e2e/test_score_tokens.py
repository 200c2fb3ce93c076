"""`score_tokens`: the numbers of `prompt_logprobs`, for completions that somebody else sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from shmllm import LLM, AsyncLLM, RequestError, SamplingParams

OPTIONS: dict[str, Any] = {
    "multiprocess": False,
    "num_threads": 1,
    "kv_cache_memory_bytes": 2**25,
    "max_model_len": 256,
}
PROMPTS: list[Any] = ["def main():\n", [5, 7, 11, 13] * 9, {"prompt_token_ids": [3]}]
COMPLETIONS = [[17, 300, 5], [9] * 40, []]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**OPTIONS) as llm:
        yield llm


def expected(llm: LLM) -> list[list[float]]:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        (alone,) = llm.generate([prompt], params, use_tqdm=False)
        whole = {"prompt_token_ids": [*alone.prompt_token_ids, *completion]}
        (output,) = llm.generate([whole], params, use_tqdm=False)
        entries = [*output.prompt_logprobs][len(alone.prompt_token_ids) :]
        found.append(
            [entry[token].logprob for entry, token in zip(entries, completion, strict=True)]
        )
    return found


def test_scores_are_those_of_prompt_logprobs(llm: LLM) -> None:
    assert llm.score_tokens(PROMPTS, COMPLETIONS) == expected(llm)
    assert llm.score_tokens([], []) == []


def test_scores_of_a_greedy_completion_are_its_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=0)
    outputs = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    token_ids = [output.outputs[0].token_ids for output in outputs]
    for scores, output in zip(llm.score_tokens(PROMPTS[:2], token_ids), outputs, strict=True):
        entries = zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
        assert scores == [entry[token].logprob for entry, token in entries]


@pytest.mark.parametrize(
    "mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
)
def test_a_whole_context_has_the_scores_of_a_longer_one(mode: str) -> None:
    prompts, completions = [[5, 7, 11] * 60, [3] * 255], [list(range(76)), [9]]
    found = []
    for length in 256, 257:
        with LLM(**OPTIONS | {"max_model_len": length}, logprobs_mode=mode) as llm:
            found.append(llm.score_tokens(prompts, completions))
    assert found[0] == found[1]
    assert [*map(len, found[0])] == [76, 1]


def test_coroutines_get_the_same(llm: LLM) -> None:
    async def main() -> list[list[float]]:
        async with AsyncLLM(**OPTIONS) as engine:
            with pytest.raises(RequestError, match="1 prompts and 2 completions"):
                await engine.score_tokens("x", [[1], [2]])
            return await engine.score_tokens(PROMPTS, COMPLETIONS)

    assert asyncio.run(main()) == expected(llm)


@pytest.mark.parametrize(
    ("prompts", "completions", "message"),
    [
        (PROMPTS, COMPLETIONS[:2], "3 prompts and 2 completions"),
        (["x"], ["text"], "completion 0 must be a list of token ids, got 'text'"),
        (["x"], [[1.5]], r"completion 0 must be a list of token ids, got \[1.5\]"),
        (["x"], "text", "completions must be a list of lists of token ids, got str"),
        ([[5] * 200], [[5] * 57], "prompt 0 with its completion has 257 tokens"),
        ([[5] * 255], [[10**8]], "completion 0 has token id 100000000; the vocabulary has ids"),
        ([[5], [5]], [[5], [7, -1]], "completion 1 has token id -1; the vocabulary has ids from 0"),
        ([""], [[5]], "the prompt is empty"),
    ],
)
def test_errors(llm: LLM, prompts: Any, completions: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.score_tokens(prompts, completions)
