"""An engine with quantized weights compared with one in float32, on the bundled model."""

from __future__ import annotations

from typing import Any

import pytest

from shmllm import LLM, SamplingParams

PROMPT = "def count_words(text):\n    words = {}\n    for word in text.split():\n"
GREEDY = SamplingParams(temperature=0, max_tokens=24, prompt_logprobs=0)


def prompt_logprobs(llm: LLM) -> list[float]:
    output = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]
    return [
        entry[token].logprob
        for entry, token in zip(
            output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True
        )
    ]


def largest_difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def exact() -> list[float]:
    with LLM(multiprocess=False, kv_cache_memory_bytes=2**26) as llm:
        return prompt_logprobs(llm)


@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.5), ("int4", 2.5)])
def test_log_probabilities_stay_close_and_updates_are_quantized(
    exact: list[float], quantization: str, bound: float
) -> None:
    options: dict[str, Any] = {"multiprocess": False, "kv_cache_memory_bytes": 2**26}
    with LLM(quantization=quantization, **options) as llm:
        assert llm.facts.precision.startswith(quantization)
        before = prompt_logprobs(llm)
        assert 0 < largest_difference(before, exact) < bound
        name = "model.layers.0.mlp.down_proj.weight"
        weight = llm.collective_rpc("get_weight", args=(name,))[0]
        llm.collective_rpc("load_weights", args=([(name, weight * 0)],))
        assert largest_difference(prompt_logprobs(llm), before) > 0.5
        llm.collective_rpc("load_weights", args=([(name, weight)],))
        assert prompt_logprobs(llm) == before
