"""An engine gives bitwise the same outputs with and without `async_scheduling`, on a CPU."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.determinism import make_requests
from support.engines import assert_idle, run_a_little, slow_steps
from support.reference_models import make_model
from support.variants import slow
from support.waiting import PATIENCE_S, wait_until

from shmllm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from shmllm.frontend.options.profiler import ProfilerSettings

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 2**26, "num_threads": 1, "max_num_seqs": 12}
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=1)
CODE = ["def f(x):\n", "import", "class A:\n    name = ", "# The answer is: "]


class Pair(NamedTuple):
    """Engines that differ in one option."""

    plain: LLM
    overlapped: LLM

    def agree(self, ask: Callable[[LLM], Any]) -> Any:
        """Check that both engines give the same result, and return it."""
        expected = ask(self.plain)
        assert ask(self.overlapped) == expected
        return expected


def make_pair(model: str = "tiny", **options: Any) -> Pair:
    settings = OPTIONS | options
    pair = Pair(*(LLM(model, async_scheduling=on, **settings) for on in (False, True)))
    assert [llm.facts.async_scheduling for llm in pair] == [False, True]
    return pair


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    pair = make_pair(max_num_batched_tokens=96, enable_sleep_mode=True, enable_prompt_embeds=True)
    yield pair
    for llm in pair:
        llm.close()


@pytest.fixture
def pair(engines: Pair) -> Iterator[Pair]:
    """Both engines with an empty prefix cache; a test that leaves requests behind fails."""
    assert all(llm.reset_prefix_cache() for llm in engines)
    yield engines
    for llm in engines:
        assert_idle(llm)


def numbers(entries: Any) -> Any:
    return entries and [
        entry and [(token, each.logprob, each.rank) for token, each in entry.items()]
        for entry in entries
    ]


def said(output: RequestOutput) -> Any:
    """The contents of an output, comparable with ==."""
    completions = [
        (
            list(each.token_ids),
            each.text,
            each.finish_reason,
            each.stop_reason,
            each.cumulative_logprob,
            numbers(each.logprobs),
        )
        for each in output.outputs
    ]
    return list(output.prompt_token_ids or ()), completions, numbers(output.prompt_logprobs)


def ask(llm: LLM, prompts: Any, params: Any, **options: Any) -> list[Any]:
    outputs = llm.generate(prompts, params, use_tqdm=False, **options)
    return [said(output) for output in outputs]


def random_ids(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(16, 4096), k=length)


def test_greedy_and_sampled_requests_in_mixed_batches(pair: Pair) -> None:
    prompts, params = zip(*make_requests(4096, 24, seed=3), strict=True)
    pair.agree(lambda llm: ask(llm, list(prompts), list(params)))
    pair.agree(lambda llm: ask(llm, list(prompts)[::-1], list(params)[::-1]))


EDITS: list[dict[str, Any]] = [
    {"presence_penalty": 1.2, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.3, "bad_words": ["self", "import os", "return x"]},
    {"logit_bias": {300: 4.0, 16: -100.0, 500: 2.5}, "stop_token_ids": [300]},
    {"allowed_token_ids": list(range(16, 1000, 3)), "min_tokens": 20},
    {"bad_words": ["a", "the", "x = "], "logprobs": 2},
    {"stop": ["\n", "re"], "include_stop_str_in_output": True},
    {"stop": ["e"], "min_tokens": 5},
    {"stop_token_ids": list(range(16, 4096, 9)), "prompt_logprobs": 1},
    {"ignore_eos": True, "logit_bias": {0: 4.0}},
    {"logit_bias": {0: 6.0}, "min_tokens": 7},
    {"n": 3, "logprobs": 0, "temperature": 0.9},
]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logits_processors_and_stop_conditions(pair: Pair, temperature: float) -> None:
    params = [
        SamplingParams(**{"temperature": temperature, "seed": number, "max_tokens": 40} | options)
        for number, options in enumerate(EDITS)
    ]
    prompts = list(itertools.islice(itertools.cycle(CODE), len(params)))
    results = pair.agree(lambda llm: ask(llm, prompts * 2, params * 2))
    reasons = {completion[2] for _, completions, _ in results for completion in completions}
    assert reasons == {"stop", "length"}


MATCHED: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"regex": r"\d{4}-(0[1-9]|1[0-2])-[0-2]\d"},
    {"choice": ["yes", "no", "perhaps"]},
    {"grammar": 'root ::= number (" + " number){1,3}\nnumber ::= [1-9] [0-9]{0,2}'},
]


def test_structured_outputs_beside_requests_without(pair: Pair) -> None:
    params = []
    for seed, kind in itertools.product(range(3), [*MATCHED, None]):
        matched = kind and StructuredOutputsParams(**kind)
        params.append(
            SamplingParams(temperature=1, seed=seed, max_tokens=40, structured_outputs=matched)
        )
    prompts = list(itertools.islice(itertools.cycle(CODE), len(params)))
    pair.agree(lambda llm: ask(llm, prompts, params))


def test_cached_prefixes(pair: Pair) -> None:
    prompt = random_ids(1, 100)

    def cached(llm: LLM) -> list[int | None]:
        found = []
        for _ in range(3):
            params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            [output] = llm.generate(prompt, params, use_tqdm=False)
            found.append(output.num_cached_tokens)
            prompt.extend(output.outputs[0].token_ids)
        del prompt[100:]
        return found

    assert pair.agree(cached)[1:] != [0, 0]


def test_embedded_prompts_and_vectors(pair: Pair) -> None:
    embeds = [torch.randn(length, 256, generator=torch.manual_seed(length)) for length in (3, 120)]
    prompts: list[Any] = [{"prompt_embeds": each} for each in embeds] + [random_ids(2, 130)]
    pair.agree(lambda llm: ask(llm, prompts, LONG))
    texts: list[Any] = [random_ids(length, length) for length in (1, 16, 200, 97)]
    for params in (PoolingParams(), PoolingParams(pooling_type="MEAN")):

        def embed(llm: LLM, params: PoolingParams = params) -> Any:
            llm.enqueue(CODE, LONG)
            vectors = [o.outputs.data.tolist() for o in llm.encode(texts, params, use_tqdm=False)]
            return vectors, [said(o) for o in llm.wait_for_completion(use_tqdm=False)]

        pair.agree(embed)


def test_requests_after_a_stream_that_was_left_early(pair: Pair) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, output_kind=RequestOutputKind.DELTA)

    def texts(llm: LLM) -> Any:
        stream = llm.stream(CODE, params)
        list(itertools.islice(stream, 7))
        stream.close()
        whole = [""] * len(CODE)
        for index, output in enumerate(llm.stream(CODE[:1], params)):
            del index
            whole[0] += output.outputs[0].text
        return whole, ask(llm, CODE, LONG)

    pair.agree(texts)


def calm(llm: LLM) -> None:
    llm.pause_generation("keep")
    llm.resume_generation()


def freeze(llm: LLM) -> None:
    llm.pause_generation("keep", clear_cache=False)
    for _ in range(3):
        llm._dispatcher.pump(0.01)
    llm.resume_generation()


def sleep(level: int) -> Callable[[LLM], None]:
    def disturb(llm: LLM) -> None:
        llm.sleep(level, mode="keep")
        llm.wake_up()
        if level == 2:
            llm.collective_rpc("reload_weights")

    return disturb


def write_weights(llm: LLM) -> None:
    names = sorted(llm.collective_rpc("list_weights")[0])[:3]
    llm.update_weights(
        [(name, llm.collective_rpc("get_weight", args=(name,))[0]) for name in names]
    )


def profile(llm: LLM) -> None:
    llm.start_profile("overlapped", delay_iterations=2, max_iterations=3)
    run_a_little(llm, num_tokens=(2 + 3 + 2) * len(CODE))
    with gzip.open(llm.stop_profile(), "rt") as file:
        names = [str(event.get("name")) for event in json.load(file)["traceEvents"]]
    assert sum(name.startswith("step ") for name in names) == 3
    assert names.count("embed") == 3


DISTURBANCES: dict[str, Callable[[LLM], Any]] = {
    "pause": freeze,
    "pause and clear": calm,
    "sleep 1": sleep(1),
    "sleep 2": sleep(2),
    "new weights": write_weights,
    "reset": lambda llm: llm.reset_prefix_cache(reset_running_requests=True),
    "function": lambda llm: llm.collective_rpc(lambda worker: worker.model.config.num_layers),
    "model": lambda llm: llm.apply_model(lambda model: model.dtype),
    "another": lambda llm: llm.generate("x", SamplingParams(max_tokens=3, seed=1), use_tqdm=False),
    "profile": profile,
}
QUICK = ("sleep 2", "reset", "model", "another")
"""Those of the default suite."""


@pytest.fixture(scope="module")
def undisturbed(engines: Pair) -> Any:
    return ask(engines.plain, CODE, LONG)


@pytest.mark.parametrize("kind", [kind if kind in QUICK else slow(kind) for kind in DISTURBANCES])
def test_calls_between_steps_change_no_token(
    pair: Pair, undisturbed: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for llm in pair:
        monkeypatch.setattr(llm, "profiles", ProfilerSettings(str(tmp_path)))
        with slow_steps(llm):
            llm.enqueue(CODE, LONG)
            for _ in range(2):
                run_a_little(llm)
                DISTURBANCES[kind](llm)
        assert [said(o) for o in llm.wait_for_completion(use_tqdm=False)] == undisturbed


def halve_weights_after(llm: LLM, num_tokens: int) -> tuple[int, list[Any]]:
    """Halve all weights after some tokens.

    Returns:
        The number of tokens generated before, and the outputs of the requests.
    """
    llm.enqueue([[5, 6, 7], [8] * 40], LONG)
    wait_until(
        lambda: llm.get_metrics()["generated_tokens"] >= num_tokens,
        f"{num_tokens} tokens",
        between=lambda: llm._dispatcher.pump(0.01),
    )
    llm.pause_generation("keep", clear_cache=False)
    so_far = llm.get_metrics()["generated_tokens"]
    names = llm.collective_rpc("list_weights")[0]
    values = ((name, llm.collective_rpc("get_weight", args=(name,))[0]) for name in names)
    llm.update_weights([(name, value * 0.5) for name, value in values])
    llm.resume_generation()
    return so_far, [said(output) for output in llm.wait_for_completion(use_tqdm=False)]


def test_weights_that_change_in_the_middle(tmp_path: Path) -> None:
    """A step that already runs uses the old weights, and all later steps the new ones."""
    make_model("llama", tmp_path)
    pair = make_pair(str(tmp_path), multiprocess=False)
    with pair.plain, pair.overlapped:
        so_far, overlapped = halve_weights_after(pair.overlapped, 20)
        assert so_far > 20
        assert halve_weights_after(pair.plain, so_far) == (so_far, overlapped)


@pytest.mark.parametrize("policy", ["fcfs", slow("priority")])
def test_preempted_requests(policy: str) -> None:
    options = {"kv_cache_memory_bytes": 90 * 2**14, "max_model_len": 256}
    prompts = [random_ids(seed, 1 + 7 * seed) for seed in range(14)]
    params = [
        SamplingParams(temperature=seed % 2, seed=seed, max_tokens=90, ignore_eos=True, logprobs=1)
        for seed in range(14)
    ]
    priority = {"priority": [seed % 3 for seed in range(14)]} if policy == "priority" else {}
    pair = make_pair(
        scheduling_policy=policy, max_num_batched_tokens=32, multiprocess=False, **options
    )
    with pair.plain, pair.overlapped:
        pair.agree(lambda llm: ask(llm, prompts, params, **priority))
        assert all(llm.get_metrics()["preemptions"] > 0 for llm in pair)


async def abort_some() -> list[Any]:
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs("tiny", async_scheduling=True, **OPTIONS))

    async def one(number: int) -> Any:
        async for output in llm.generate(CODE[number % 4], LONG, f"r{number}"):
            if number % 3 == 1 and len(output.outputs[0].token_ids) > number:
                await llm.abort(f"r{number}")
        return said(output)

    try:
        with slow_steps(llm):
            tasks = [asyncio.create_task(one(number)) for number in range(10)]
            await asyncio.gather(*tasks[1::3])
        return await asyncio.gather(*tasks)
    finally:
        llm.shutdown()


def test_aborted_coroutines(pair: Pair) -> None:
    expected = ask(pair.plain, CODE, LONG)
    for number, output in enumerate(asyncio.run(asyncio.wait_for(abort_some(), PATIENCE_S))):
        if number % 3 == 1:
            tokens, *_, finish = output[1][0][:3]
            assert finish == "abort"
            assert tokens == expected[number % 4][1][0][0][: len(tokens)]
        else:
            assert output == expected[number % 4]


def test_threads_of_one_front_end(pair: Pair) -> None:
    def both_at_once(llm: LLM) -> list[Any]:
        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(lambda prompt: ask(llm, prompt, LONG), CODE))

    pair.agree(both_at_once)
