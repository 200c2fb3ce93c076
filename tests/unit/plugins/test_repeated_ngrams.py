"""NoRepeatedNGrams: which tokens it forbids, alone and in an engine."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shmllm import LLM, RequestError, SamplingParams
from shmllm.plugins.repeated_ngrams import NoRepeatedNGrams, repeating_tokens

NAME = "shmllm.plugins.repeated_ngrams:NoRepeatedNGrams"


@pytest.mark.parametrize(
    ("output", "size", "window", "expected"),
    [
        ([], 2, 9, set()),
        ([1], 2, 9, set()),
        ([1, 2, 1], 2, 9, {2}),
        ([1, 2, 1, 3, 1], 2, 9, {2, 3}),
        ([1, 2, 1, 3, 1], 2, 3, {3}),
        ([1, 2, 3, 4, 1, 2], 3, 9, {3}),
        ([1, 2, 3, 4, 1, 2], 3, 5, set()),
        ([1, 1, 1], 2, 9, {1}),
        ([4, 5], 1, 9, {4, 5}),
        ([4, 5, 6], 1, 2, {5, 6}),
    ],
)
def test_tokens_that_repeat_a_sequence(
    output: list[int], size: int, window: int, expected: set[int]
) -> None:
    assert repeating_tokens(output, size, window) == expected


def test_a_sequence_is_never_twice_in_a_window() -> None:
    rng = random.Random(3)
    output: list[int] = []
    for _ in range(400):
        allowed = {*range(4)} - repeating_tokens(output, 3, 12)
        output.append(rng.choice(sorted(allowed)))
        ends = [tuple(output[i - 3 : i]) for i in range(max(len(output) - 9, 3), len(output) + 1)]
        assert len(ends) == len(set(ends))


def test_an_output_of_an_engine_repeats_nothing() -> None:
    free = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    given: dict[str, Any] = {"ngram_size": 3, "window_size": 60, "whitelist_token_ids": {7, 5}}
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, extra_args=given)
    options: dict[str, Any] = {"multiprocess": False, "kv_cache_memory_bytes": 2**26}
    with LLM(logits_processors=[NAME], **options) as llm:
        outputs = llm.generate(["a a a a a", "a a a a a"], [free, params], use_tqdm=False)
        wrong = SamplingParams(extra_args={"ngram_size": 0})
        (refused,) = llm.generate("a", wrong, use_tqdm=False)
        with pytest.raises(RequestError, match="it has a object"):
            llm.generate("a", SamplingParams(extra_args={"x": object()}), use_tqdm=False)
    assert refused.outputs[0].finish_reason == "error"
    assert "ngram_size must be a whole number" in (refused.error or "")
    repeated, unrepeated = (
        [tuple(ids[i : i + 3]) for i in range(len(ids) - 2)]
        for ids in (output.outputs[0].token_ids for output in outputs)
    )
    assert len(set(repeated)) < len(repeated)
    assert len(set(unrepeated)) == len(unrepeated)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ngram_size": 2, "window_size": 0}, "window_size must be"),
        ({"ngram_size": True}, "ngram_size must be"),
        ({"ngram_size": 2, "whitelist_token_ids": "12"}, "whitelist_token_ids must be a list"),
        ({"ngram_size": 2, "whitelist_token_ids": [1.5]}, "whitelist_token_ids must be a list"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NoRepeatedNGrams.validate_params(SamplingParams(extra_args=given))
    NoRepeatedNGrams.validate_params(SamplingParams(extra_args=given | {"ngram_size": None}))
