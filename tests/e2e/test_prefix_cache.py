"""Which requests hit the prefix cache, as an engine's outputs report it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from support.engines import assert_idle, run_a_little, slow_steps

from shmllm import LLM, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    with LLM("tiny", max_num_seqs=8) as engine:
        yield engine


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    """The engine with an empty prefix cache; a test that leaves requests behind fails."""
    assert engine.reset_prefix_cache()
    yield engine
    assert_idle(engine)


def random_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(16, 4096), k=length)


def cached(llm: LLM, ids: list[int], **prompt: str) -> int:
    [output] = llm.generate({"prompt_token_ids": ids, **prompt}, GREEDY, use_tqdm=False)
    return output.num_cached_tokens


def test_the_second_of_two_equal_prompts_reuses_all_blocks_but_the_last(llm: LLM) -> None:
    prompt = random_prompt(1, 48)
    assert [cached(llm, prompt), cached(llm, prompt)] == [0, 32]


def test_equal_prompts_in_one_batch_share_blocks_too(llm: LLM) -> None:
    prompt = {"prompt_token_ids": random_prompt(2, 48)}
    outputs = llm.generate([prompt, prompt], GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 32]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_prompts_with_different_salts_share_no_blocks(llm: LLM) -> None:
    prompt = random_prompt(3, 48)
    assert cached(llm, prompt, cache_salt="one") == 0
    assert cached(llm, prompt, cache_salt="two") == 0
    assert cached(llm, prompt) == 0
    assert cached(llm, prompt, cache_salt="one") == 32


def test_a_continued_conversation_hits_its_own_output(llm: LLM) -> None:
    prompt = random_prompt(4, 40)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    [first] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    conversation = prompt + first.outputs[0].token_ids + random_prompt(5, 10)
    # 79 of the 80 tokens were computed: the last one was only sampled.
    assert cached(llm, conversation) == 64


def test_hits_do_not_change_the_tokens(llm: LLM) -> None:
    prompts = [random_prompt(6, 100)[:n] + random_prompt(n, 20) for n in (33, 48, 64, 80)]
    requests = [{"prompt_token_ids": p} for p in prompts]
    cold = [o.outputs[0].token_ids for o in llm.generate(requests, GREEDY, use_tqdm=False)]
    warm = llm.generate(requests, GREEDY, use_tqdm=False)
    assert all(output.num_cached_tokens > 0 for output in warm)
    assert [output.outputs[0].token_ids for output in warm] == cold


def test_reset_forgets_everything(llm: LLM) -> None:
    prompt = random_prompt(7, 48)
    cached(llm, prompt)
    assert llm.reset_prefix_cache()
    assert cached(llm, prompt) == 0


def test_reset_while_requests_run(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": random_prompt(seed, 48)} for seed in (9, 10)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    with slow_steps(llm):
        llm.enqueue(prompts, params)
        run_a_little(llm)
        assert not llm.reset_prefix_cache()
        assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_disabled_caching_never_hits() -> None:
    with LLM("tiny", enable_prefix_caching=False, multiprocess=False) as llm:
        prompt = random_prompt(8, 48)
        assert [cached(llm, prompt), cached(llm, prompt)] == [0, 0]
