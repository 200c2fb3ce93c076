"""Many random requests through engines with and without overlapped steps.

SHMLLM_TEST_SEED repeats a run.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest

from shmllm import LLM, RequestOutput, SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.stress

SEED = int(os.environ.get("SHMLLM_TEST_SEED", str(time.time_ns() % 10**9)))
NUM_BATCHES = 12
WORDS = ["def ", "return ", "x = ", "\n", "import os", "(1, 2)", "class A:", "    "]
GRAMMARS: list[dict[str, Any]] = [
    {"regex": r"[a-z]{1,20}(, [a-z]{1,9})*"},
    {"choice": ["yes", "no", "perhaps not"]},
    {"json_object": True},
]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"top_k": 20, "min_p": 0.02},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.3},
    {"bad_words": ["self", "return x", "a b"]},
    {"allowed_token_ids": list(range(16, 900, 2))},
    {"logit_bias": {0: 5.0}, "min_tokens": 9},
    {"stop": ["e", "\n\n"], "include_stop_str_in_output": True},
    {"stop_token_ids": list(range(20, 4096, 15))},
    {"logprobs": 3},
    {"prompt_logprobs": 1},
    {"n": 2},
]


def random_params(rng: random.Random, seed: int) -> SamplingParams:
    options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": rng.randint(1, 60)}
    for each in rng.sample(OPTIONS, rng.randrange(4)):
        options |= each
    options["min_tokens"] = min(options.get("min_tokens", 0), options["max_tokens"])
    if options["temperature"] == 0:
        options.pop("n", None)
    if rng.random() < 0.25:
        options.pop("allowed_token_ids", None)
        options.pop("bad_words", None)
        options["structured_outputs"] = StructuredOutputsParams(**rng.choice(GRAMMARS))
    return SamplingParams(**options)


def said(output: RequestOutput) -> Any:
    def numbers(entries: Any) -> Any:
        return entries and [
            entry and [(token, each.logprob, each.rank) for token, each in entry.items()]
            for entry in entries
        ]

    completions = [
        (list(o.token_ids), o.text, o.finish_reason, o.stop_reason, numbers(o.logprobs))
        for o in output.outputs
    ]
    return completions, numbers(output.prompt_logprobs)


@pytest.mark.parametrize("run", range(6))
def test_random_requests_get_the_same_tokens_with_overlapped_steps(run: int) -> None:
    seed = SEED + run
    print(f"SHMLLM_TEST_SEED={seed}")
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "max_num_seqs": rng.choice((3, 16)),
        "max_num_batched_tokens": rng.choice((24, 512)),
        "kv_cache_memory_bytes": rng.choice((24, 60, 1000)) * 2**17,
        "scheduling_policy": rng.choice(("fcfs", "priority")),
        "max_model_len": 300,
        "num_threads": 1,
        "multiprocess": False,
    }
    plain, overlapped = (LLM(async_scheduling=on, **options) for on in (False, True))
    with plain, overlapped:
        for number in range(NUM_BATCHES):
            count = rng.randint(1, 24)
            prompts = ["".join(rng.choices(WORDS, k=rng.randint(1, 60))) for _ in range(count)]
            params = [random_params(rng, 1000 * number + each) for each in range(count)]
            priority = {}
            if options["scheduling_policy"] == "priority":
                priority = {"priority": [rng.randrange(3) for _ in range(count)]}
            results = []
            for llm in (plain, overlapped):
                outputs = llm.generate(prompts, params, use_tqdm=False, **priority)
                results.append([said(output) for output in outputs])
            assert results[0] == results[1], f"batch {number} of {options}"
