"""Requests of many kinds, and all that an engine says about them, to the last bit."""

from __future__ import annotations

import random
from typing import Any

from shmllm import LLM, RequestOutput, SamplingParams

MAX_TOKENS = 12
LONGEST = 200
LONG = (530, 700)

Request = tuple[dict[str, Any], SamplingParams]


def make_requests(vocab_size: int, count: int, seed: int) -> list[Request]:
    """Prompts of 1 to LONGEST tokens and few of LONG, some with a common beginning, each sampled
    in its own way."""
    rng = random.Random(seed)
    shared = [rng.randrange(1, vocab_size) for _ in range(LONGEST)]
    requests: list[Request] = []
    for number in range(count):
        length = rng.choice([1, 2, 15, 16, 17, 33, 100, rng.randint(1, LONGEST)])
        if number % 16 == 5:
            length = LONG[number // 16 % len(LONG)]
        own = [rng.randrange(1, vocab_size) for _ in range(length)]
        keep = min(length - 1, 64) if rng.random() < 0.4 else 0
        options: dict[str, Any] = rng.choice(
            [
                {"temperature": 0},
                {"temperature": 1.0},
                {"temperature": 0.7},
                {"temperature": 0.9, "top_p": 0.8},
                {"temperature": 1.2, "top_k": 20, "min_p": 0.01},
                {"temperature": 0.8, "repetition_penalty": 1.2},
            ]
        )
        if rng.random() < 0.3:
            options = options | {"prompt_logprobs": 2}
        params = SamplingParams(
            max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=3, seed=1000 + number, **options
        )
        requests.append(({"prompt_token_ids": shared[:keep] + own[keep:]}, params))
    return requests


def said(output: RequestOutput) -> Any:
    """Token ids and float32 numbers of an output, comparable with ==, which for them means
    the same bits: none is NaN or a negative zero."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    return (
        list(completion.token_ids),
        completion.cumulative_logprob,
        [_numbers(entry) for entry in completion.logprobs],
        output.prompt_logprobs and [entry and _numbers(entry) for entry in output.prompt_logprobs],
    )


def _numbers(entry: Any) -> list[tuple[int, float, int]]:
    return [(token, each.logprob, each.rank) for token, each in entry.items()]


def ask(llm: LLM, requests: list[Request]) -> list[Any]:
    """All at once."""
    prompts, params = zip(*requests, strict=True)
    return [said(o) for o in llm.generate(list(prompts), list(params), use_tqdm=False)]


def ask_one_by_one(llm: LLM, requests: list[Request]) -> list[Any]:
    return [ask(llm, [request])[0] for request in requests]


def ask_shuffled(llm: LLM, requests: list[Request], seed: int) -> list[Any]:
    """All at once in another order; the results in the original one."""
    order = random.Random(seed).sample(range(len(requests)), len(requests))
    results = ask(llm, [requests[place] for place in order])
    return [result for _, result in sorted(zip(order, results, strict=True))]
