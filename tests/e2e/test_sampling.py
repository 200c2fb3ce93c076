"""Sampling parameters: a request gets the same tokens alone and beside other requests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from shmllm import LLM, RequestError, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

NUM_REQUESTS = 32


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", max_num_seqs=12, max_num_batched_tokens=96) as engine:
        yield engine


EXTRAS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.2, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.3},
    {"logit_bias": {300: 4.0, 16: -100.0, 500: 2.5}},
    {"allowed_token_ids": list(range(16, 1000, 3))},
    {"bad_words": ["self", "import os", "a"]},
    {"logprobs": 3},
    {"repetition_penalty": 0.8, "logprobs": 0, "bad_words": ["the"], "logit_bias": {400: 5.0}},
]


def mixed_requests() -> tuple[list[Any], list[SamplingParams]]:
    rng = random.Random(11)
    prompts, params = [], []
    for index in range(NUM_REQUESTS):
        ids = rng.choices(range(16, 4096), k=rng.randint(1, 120))
        prompts.append({"prompt_token_ids": ids})
        params.append(
            SamplingParams(
                **EXTRAS[index % len(EXTRAS)],
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


def test_a_reused_row_keeps_nothing_of_the_previous_request(llm: LLM) -> None:
    """More requests than rows, alternately with and without logits processors, use each row."""
    prompts, params = mixed_requests()
    plain = SamplingParams(temperature=0, max_tokens=12)
    expected = tokens(llm, prompts, [plain] * NUM_REQUESTS)
    both = [each for pair in zip(prompts, prompts, strict=True) for each in pair]
    turns = [each for own in params for each in (own, plain)]
    assert tokens(llm, both, turns)[1::2] == expected


def test_requests_that_arrive_late_change_no_tokens(llm: LLM) -> None:
    """Requests join a batch that runs and leave it in another order."""
    prompts, params = mixed_requests()
    alone = {i: tokens(llm, [prompts[i]], [params[i]])[0] for i in range(0, NUM_REQUESTS, 5)}
    order = random.Random(6).sample(range(NUM_REQUESTS), NUM_REQUESTS)
    found: dict[int, list[int]] = {}
    requests = llm.front_end.prepare([prompts[i] for i in order], [params[i] for i in order])
    for changed in llm.front_end.serve(requests, streaming=True):
        found |= {order[s.index]: s.token_ids for s in changed if s.finish_reason is not None}
    assert {i: found[i] for i in alone} == alone


def completions(llm: LLM, **options: Any) -> Any:
    params = SamplingParams(**{"max_tokens": 12, "ignore_eos": True} | options)
    [output] = llm.generate({"prompt_token_ids": list(range(100, 150))}, params, use_tqdm=False)
    return output


def test_completions_are_runs_with_seeds_counted_up(llm: LLM) -> None:
    output = completions(llm, n=4, seed=40, logprobs=1, prompt_logprobs=0)
    assert [each.index for each in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(each.token_ids) for each in output.outputs}) == 4
    for index, each in enumerate(output.outputs):
        alone = completions(llm, seed=40 + index, logprobs=1)
        assert each.token_ids == alone.outputs[0].token_ids
        assert list(each.logprobs[0]) == list(alone.outputs[0].logprobs[0])
    assert len(output.prompt_logprobs) == 50
    assert output.finished


def test_completions_share_the_blocks_of_their_prompt(llm: LLM) -> None:
    ids = random.Random(77).choices(range(16, 4096), k=80)
    params = SamplingParams(n=8, max_tokens=1, seed=1)
    before = llm.get_metrics()
    llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    after = llm.get_metrics()
    assert after["prefix_hit_tokens"] - before["prefix_hit_tokens"] == 7 * 64
    assert after["prefix_query_tokens"] - before["prefix_query_tokens"] == 8 * 80


def test_outputs_of_several_requests_with_completions_keep_their_order(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": [300 + i, 301]} for i in range(5)]
    params = [SamplingParams(n=1 + i % 3, seed=i, max_tokens=1 + 3 * i) for i in range(5)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs) for output in outputs] == [1, 2, 3, 1, 2]
    assert [output.prompt_token_ids[0] for output in outputs] == [300, 301, 302, 303, 304]


def test_allowed_tokens_are_the_only_ones(llm: LLM) -> None:
    allowed = [300, 400, 500]
    for temperature in (0, 1.5):
        output = completions(llm, temperature=temperature, allowed_token_ids=allowed, seed=2)
        assert set(output.outputs[0].token_ids) <= set(allowed)


def test_a_large_bias_forces_and_forbids(llm: LLM) -> None:
    forced = completions(llm, temperature=0, logit_bias={777: 100.0}).outputs[0].token_ids
    assert set(forced) == {777}
    free = completions(llm, temperature=0).outputs[0].token_ids
    bias = {free[0]: float("-inf")}
    assert free[0] not in completions(llm, temperature=0, logit_bias=bias).outputs[0].token_ids


def test_bad_words_do_not_appear(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60)
    [free] = llm.generate("import os\nimport ", params, use_tqdm=False)
    word = free.outputs[0].text.split()[0]
    params = SamplingParams(temperature=0, max_tokens=60, bad_words=[word])
    [held] = llm.generate("import os\nimport ", params, use_tqdm=False)
    assert free.outputs[0].text != held.outputs[0].text
    tokenizer = llm.front_end.tokenizer
    sequence = tokenizer.encode(word, add_special_tokens=False)
    ids = held.outputs[0].token_ids
    places = range(len(ids) - len(sequence) + 1)
    assert not any(ids[i : i + len(sequence)] == sequence for i in places)


def test_presence_penalty_keeps_tokens_from_coming_back(llm: LLM) -> None:
    plain = completions(llm, temperature=0, max_tokens=60).outputs[0].token_ids
    held = completions(
        llm, temperature=0, max_tokens=60, presence_penalty=2.0, frequency_penalty=2.0
    )
    assert len(set(held.outputs[0].token_ids)) > len(set(plain))


def test_a_repetition_ends_the_request(llm: LLM) -> None:
    detection = {"max_pattern_size": 2, "min_count": 5}
    output = completions(
        llm, temperature=0, logit_bias={777: 100.0}, repetition_detection=detection
    )
    completion = output.outputs[0]
    assert completion.token_ids == [777] * 5
    assert (completion.finish_reason, completion.stop_reason) == (
        "repetition",
        "repetition_detected",
    )


BAD_INPUT: list[tuple[Any, dict[str, Any], str]] = [
    ("x", {"stop_token_ids": [4096]}, "stop_token_ids has 4096; the vocabulary has ids from 0 to"),
    ("x", {"allowed_token_ids": [9999]}, "allowed_token_ids has 9999; the vocabulary has ids"),
    (
        "x",
        {"logit_bias": {4096: 1.0}},
        "logit_bias has 4096; the vocabulary has ids from 0 to 4095",
    ),
    ("x", {"logprobs": 21}, "logprobs=21 asks for 21 tokens .* max_logprobs is 20"),
    ("x", {"logprobs": -1}, "logprobs=-1 asks for 4,096 tokens .* max_logprobs is 20"),
    ("x", {"prompt_logprobs": 50}, "prompt_logprobs=50 asks for 50 tokens .* max_logprobs is 20"),
    ("x", {"bad_words": [" "]}, "bad_words has ' ', which has no tokens"),
    ("", {}, "the prompt is empty"),
    ([], {}, None),  # no prompts, no outputs
    ([5000], {}, "token id 5000; the vocabulary has ids from 0 to 4095"),
    ([-1], {}, "token id -1"),
    ({"prompt": 5}, {}, "'prompt' must be a str, got int"),
    ({"prompt_token_ids": ["a"]}, {}, "'prompt_token_ids' must be a list of whole numbers"),
    ({"prompts": "x"}, {}, "unknown keys"),
    (7, {}, "prompts must be a str, a list of token ids, a dict"),
]


@pytest.mark.parametrize(("prompt", "options", "words"), BAD_INPUT, ids=str)
def test_bad_input_is_refused_by_name_and_the_engine_lives(
    llm: LLM, prompt: Any, options: dict[str, Any], words: str | None
) -> None:
    params = SamplingParams(**{"max_tokens": 2} | options)
    if words is None:
        assert llm.generate(prompt, params, use_tqdm=False) == []
        return
    with pytest.raises(RequestError, match=words):
        llm.generate(prompt, params, use_tqdm=False)
    assert llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)[0].finished


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


def test_min_tokens_prevent_an_early_end(llm: LLM) -> None:
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


def test_without_max_tokens_a_request_ends_at_the_context_limit(llm: LLM) -> None:
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
