"""A request's tokens are its own: whatever runs beside it, they equal its solo run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from shmllm import LLM, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

NUM_REQUESTS = 32


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", max_num_seqs=12, max_num_batched_tokens=96) as engine:
        yield engine


def mixed_requests() -> tuple[list[Any], list[SamplingParams]]:
    rng = random.Random(11)
    prompts, params = [], []
    for index in range(NUM_REQUESTS):
        ids = rng.choices(range(16, 4096), k=rng.randint(1, 120))
        prompts.append({"prompt_token_ids": ids})
        params.append(
            SamplingParams(
                temperature=[0.0, 0.3, 0.8, 1.0, 1.5][index % 5],
                top_k=[0, 5, 50][index % 3],
                top_p=[1.0, 0.9][index % 2],
                min_p=[0.0, 0.0, 0.05, 0.2][index % 4],
                seed=1000 + index,
                max_tokens=rng.randint(1, 40),
                min_tokens=index % 2,
            )
        )
    return prompts, params


def tokens(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


def test_mixed_requests_equal_their_solo_runs(llm: LLM) -> None:
    prompts, params = mixed_requests()
    together = tokens(llm, prompts, params)
    alone = [tokens(llm, [p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    assert together == alone
    order = random.Random(5).sample(range(NUM_REQUESTS), NUM_REQUESTS)
    shuffled = tokens(llm, [prompts[i] for i in order], [params[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_seeds_matter(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [300, 301, 302]}
    params = [SamplingParams(seed=s, max_tokens=20, ignore_eos=True) for s in range(8)]
    outputs = tokens(llm, [prompt] * 8, params)
    assert len({tuple(ids) for ids in outputs}) == 8


def test_requests_without_a_seed_differ_but_repeat_with_the_engine_seed() -> None:
    prompt = {"prompt_token_ids": [300, 301, 302]}
    params = [SamplingParams(max_tokens=20, ignore_eos=True)] * 4
    runs = []
    for seed in (0, 0, 1):
        with LLM("tiny", seed=seed, multiprocess=False) as llm:
            runs.append(tokens(llm, [prompt] * 4, params))
    assert len({tuple(ids) for ids in runs[0]}) == 4
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_min_tokens_hold_back_the_end(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(100, 130))}
    [free] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    stop = free.outputs[0].token_ids[3]
    params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[stop], min_tokens=10)
    [held] = llm.generate(prompt, params, use_tqdm=False)
    assert stop not in held.outputs[0].token_ids[:10]
    assert len(held.outputs[0].token_ids) >= 10


def test_stop_token_ends_and_is_named(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(100, 130))}
    [free] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    ids = free.outputs[0].token_ids
    params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[ids[3]])
    [stopped] = llm.generate(prompt, params, use_tqdm=False)
    completion = stopped.outputs[0]
    assert completion.token_ids == ids[: ids.index(ids[3]) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", ids[3])


def test_stop_string_ends_and_is_cut_off(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60)
    [free] = llm.generate("import os\n", params, use_tqdm=False)
    text = free.outputs[0].text
    stop = text[10:14]
    [stopped] = llm.generate(
        "import os\n", SamplingParams(temperature=0, max_tokens=60, stop=stop), use_tqdm=False
    )
    completion = stopped.outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_max_tokens_none_goes_on_to_the_context_limit(llm: LLM) -> None:
    ids = list(range(100, 100 + 1000))
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    [output] = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == llm.facts.max_model_len - 1000
    assert output.outputs[0].finish_reason == "length"


def test_a_request_larger_than_the_ring_takes_travels_in_a_slot(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(100, 130))}
    small = SamplingParams(temperature=0, max_tokens=30)
    [free] = llm.generate(prompt, small, use_tqdm=False)
    stop = free.outputs[0].token_ids[3]
    large = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[stop] * 100_000)
    [stopped] = llm.generate(prompt, large, use_tqdm=False)
    assert stopped.outputs[0].stop_reason == stop
    many = llm.generate([prompt] * 40, large, use_tqdm=False)
    assert {o.outputs[0].stop_reason for o in many} == {stop}
