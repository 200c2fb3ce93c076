"""Rollouts that run across updates of the weights, and what the engine keeps of the old weights.

The long random walks take a minute:
tools/test -m slow tests/process/test_partial_rollouts.py -s
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import run_a_little, slow_steps
from support.partial_rollouts import (
    OPTIONS,
    SHORT,
    Policy,
    Walk,
    check_current,
    continuation,
    said,
    spans_of,
    tokens_of,
)
from transformers import AutoModelForCausalLM

from shmllm import LLM, RequestOutput, RequestOutputKind, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

NUM_TOKENS = 40
LONG = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
PROMPT = [(7 * index) % 4000 + 1 for index in range(150)]
"""Three chunks."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory, compiled_kernels: None) -> Iterator[Policy]:
    with Policy(tmp_path_factory.mktemp("policy")) as policy:
        yield policy


@pytest.fixture(scope="module")
def engine(policy: Policy) -> Iterator[LLM]:
    """An engine in this process: it computes a step each time it is polled, so tests know exactly
    where an update falls."""
    with policy.start(multiprocess=False) as llm:
        yield llm


@pytest.fixture
def llm(engine: LLM, policy: Policy) -> Iterator[LLM]:
    """The engine of the module, with version 0 of the weights and an empty prefix cache."""
    engine.update_weights(policy.weights[0], version=0)
    yield engine
    engine.pause_generation("abort")  # a test that failed
    engine.resume_generation()
    engine.wait_for_completion(use_tqdm=False)


def run_steps(llm: LLM, count: int) -> None:
    """On a busy machine a short timeout may be over before the engine looks at it, and no step is
    run."""
    for _ in range(count):
        llm._dispatcher.pump(10.0)


def update(llm: LLM, policy: Policy, version: int, **options: Any) -> None:
    llm.update_weights(policy.weights[version], version=version, **options)


def collected(llm: LLM) -> RequestOutput:
    (output,) = llm.wait_for_completion(use_tqdm=False)
    return output


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 12, 25], ids=lambda count: f"after {count} steps")
def test_no_later_request_hits_what_the_old_weights_computed(
    llm: LLM, policy: Policy, steps: int
) -> None:
    """The update comes in the middle of the prompt, or of the output. The request fills blocks
    before and after it."""
    llm.generate(tokens_of(PROMPT), SHORT, use_tqdm=False)  # finished before the update
    llm.reset_prefix_cache()
    llm.enqueue([tokens_of(PROMPT)], LONG, use_tqdm=False)
    run_steps(llm, steps)
    llm.pause_generation("keep", clear_cache=False)
    update(llm, policy, 1)
    assert llm.resume_generation()
    assert_first_hits(llm, policy, PROMPT)
    run_steps(llm, 20)
    output = collected(llm)
    first = max(steps - 2, 0)
    assert spans_of(output) == [span for span in ((0, 0, first), (1, first, 40)) if span[2]]
    whole = PROMPT + output.outputs[0].token_ids
    (later,) = llm.generate(tokens_of(whole), SHORT, use_tqdm=False)
    assert later.num_cached_tokens == 144  # of the new request; none of the rollout
    assert said(later) == continuation(policy.fresh[1], whole, SHORT)
    check_current(llm, policy.fresh[1], 1, [whole, whole[:-7]])


def assert_first_hits(llm: LLM, policy: Policy, prompt: list[int]) -> None:
    """Two equal requests while the rollout runs: the second hits what the first has computed."""
    for cached in (0, 144):
        (output,) = llm.generate(tokens_of(prompt), SHORT, use_tqdm=False)
        assert output.num_cached_tokens == cached
        assert said(output) == continuation(policy.fresh[1], prompt, SHORT)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("steps", [2, 9], ids=["in the prompt", "in the output"])
def test_keep_combines_old_keys_and_values_with_new_weights(
    llm: LLM, policy: Policy, steps: int
) -> None:
    """As transformers does with its cache."""
    llm.enqueue([tokens_of(PROMPT)], LONG, use_tqdm=False)
    run_steps(llm, steps)
    update(llm, policy, 1)
    token_ids = collected(llm).outputs[0].token_ids
    num_old = 128 if steps == 2 else len(PROMPT) + steps - 3
    old, new = (AutoModelForCausalLM.from_pretrained(policy.paths[version]) for version in (0, 1))
    given = torch.tensor([PROMPT + token_ids])
    with torch.inference_mode():
        past = old(given[:, :num_old], use_cache=True).past_key_values
        logits = new(given[:, num_old:-1], past_key_values=past).logits
    num_new = len(PROMPT) + len(token_ids) - num_old - 1
    chosen = logits[0].argmax(dim=1).tolist()
    assert len(chosen) == num_new
    count = min(num_new, len(token_ids))
    assert chosen[-count:] == token_ids[-count:]


@pytest.mark.parametrize("steps", [2, 9], ids=["in the prompt", "in the output"])
def test_a_pause_that_clears_the_cache_recomputes_with_the_new_weights(
    llm: LLM, policy: Policy, steps: int
) -> None:
    llm.enqueue([tokens_of(PROMPT)], LONG, use_tqdm=False)
    run_steps(llm, steps)
    llm.pause_generation("keep")
    update(llm, policy, 1)
    llm.resume_generation()
    token_ids, logprobs = said(output := collected(llm))
    first = max(steps - 2, 0)
    assert spans_of(output)[-1] == (1, first, NUM_TOKENS)
    rest = SamplingParams(temperature=0, max_tokens=NUM_TOKENS - first, ignore_eos=True, logprobs=1)
    expected = continuation(policy.fresh[1], PROMPT + token_ids[:first], rest)
    assert (token_ids[first:], logprobs[first:]) == expected
    whole = PROMPT + token_ids
    (later,) = llm.generate(tokens_of(whole), SHORT, use_tqdm=False)
    assert later.num_cached_tokens == (len(whole) - 1) // 16 * 16  # all of it is the new weights'
    assert said(later) == continuation(policy.fresh[1], whole, SHORT)


def test_several_updates_in_one_rollout(llm: LLM, policy: Policy) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    llm.enqueue([tokens_of(PROMPT)], params, use_tqdm=False)
    for steps, version in ((5, 1), (4, 2), (0, 0), (20, 2)):
        run_steps(llm, steps)
        update(llm, policy, version)
        check_current(llm, policy.fresh[version], version, [PROMPT])  # takes seven steps
    output = collected(llm)
    spans = spans_of(output)
    assert [version for version, _, _ in spans] == [0, 1, 2, 0, 2]
    assert spans[0] == (0, 0, 3)
    assert [end for _, _, end in spans[:-1]] == [start for _, start, _ in spans[1:]]
    check_current(llm, policy.fresh[2], 2, [PROMPT + output.outputs[0].token_ids])


def test_each_of_several_completions_has_its_versions(llm: LLM, policy: Policy) -> None:
    params = SamplingParams(n=3, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    llm.enqueue([tokens_of(PROMPT)], params, use_tqdm=False)
    run_steps(llm, 12)
    counts = [len(state.token_ids) for state in llm._enqueued._states[0].parent.states]
    update(llm, policy, 1)
    output = collected(llm)
    assert all(counts)
    for index, count in enumerate(counts):
        assert spans_of(output, index) == [(0, 0, count), (1, count, NUM_TOKENS)]
    trajectories = [PROMPT + each.token_ids for each in output.outputs]
    check_current(llm, policy.fresh[1], 1, trajectories)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_streams_end_with_the_versions(llm: LLM, policy: Policy, kind: RequestOutputKind) -> None:
    prompts = [tokens_of(PROMPT), tokens_of(PROMPT[:20])]
    stream = llm.stream(prompts, LONG, output_kind=RequestOutputKind.DELTA)
    counts = {0: 0, 1: 0}
    for output in stream:
        counts[output.prompt_index] += len(output.outputs[0].token_ids)
        if min(counts.values()) > 5:
            break_at = dict(counts)
            update(llm, policy, 1)
            break
    for output in stream:
        if output.finished:
            index = output.prompt_index
            (first, second) = spans_of(output)
            assert first[:2] == (0, 0)
            assert first[2] >= break_at[index]
            assert second == (1, first[2], NUM_TOKENS)


def test_prefixes_that_an_update_kept_go_with_the_next_one(llm: LLM, policy: Policy) -> None:
    llm.enqueue([tokens_of(PROMPT)], LONG, use_tqdm=False)
    run_steps(llm, 10)
    update(llm, policy, 1, reset_prefix_cache=False)
    (mixed,) = llm.generate(tokens_of(PROMPT), SHORT, use_tqdm=False)
    assert mixed.num_cached_tokens == 144
    update(llm, policy, 2)
    check_current(llm, policy.fresh[2], 2, [PROMPT])
    collected(llm)
    check_current(llm, policy.fresh[2], 2, [PROMPT])


@pytest.mark.slow
@pytest.mark.parametrize("option", ["data_parallel_size", "tensor_parallel_size"])
def test_engines_in_processes(policy: Policy, option: str) -> None:
    settings = OPTIONS | {"num_threads": 2, option: 2}
    with ExitStack() as engines:
        llm = engines.enter_context(LLM(str(policy.paths[0]), **settings))
        fresh = policy.fresh[1]
        if option == "tensor_parallel_size":  # ranks round sums in their own way
            fresh = engines.enter_context(LLM(str(policy.paths[1]), **settings))
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        with slow_steps(llm):
            llm.enqueue([tokens_of(PROMPT[:count]) for count in (150, 90, 40, 9)], params)
            run_a_little(llm, 20)
            llm.pause_generation("keep", clear_cache=False)
            llm._dispatcher.pump(0.001)
            counts = [len(state.token_ids) for state in llm._enqueued._states]
            update(llm, policy, 1)
            llm.resume_generation()
        check_current(llm, fresh, 1, [PROMPT])
        outputs = llm.wait_for_completion(use_tqdm=False)
        assert any(counts)
        for count, output in zip(counts, outputs, strict=True):
            expected = [(0, 0, count), (1, count, 100)]
            assert spans_of(output) == [span for span in expected if span[1] < span[2]]
        check_current(llm, fresh, 1, [PROMPT + outputs[0].outputs[0].token_ids])


def test_a_short_walk(llm: LLM, policy: Policy) -> None:
    Walk(llm, policy, random.Random(5)).run(60)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3_next"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"num_gpu_blocks_override": 40, "scheduler_reserve_full_isl": False},
        {"pipeline_parallel_size": 2, "max_num_seqs": 4, "num_threads": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=["plain", "overlapped", "few blocks", "stages", "drafts"],
)
def test_a_long_walk(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """A window, and states, which the engine keeps apart from keys and values. With few blocks
    requests are preempted, also by themselves."""
    seed = random.randrange(10**6)
    print(f"\nseed {seed}")
    settings = {} if "pipeline_parallel_size" in options else {"multiprocess": False}
    with Policy(tmp_path, kind) as policy, policy.start(**(settings | options)) as llm:
        Walk(llm, policy, random.Random(seed)).run(400)
