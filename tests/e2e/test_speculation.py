"""Speculative decoding changes nothing that an engine says: a random walk over requests, drafters
and what happens to an engine, compared with an engine that does not draft."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.drafters import DRAFTING, KINDS, Kind, KnowingDrafter, use_drafter

from shmllm import LLM, SamplingParams
from shmllm.params.sampling import RepetitionDetectionParams, StructuredOutputsParams

BASE: dict[str, Any] = {
    "num_threads": 1,
    "multiprocess": False,
    "kv_cache_memory_bytes": 2**25,
    "max_model_len": 256,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "in chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 4, "block_size": 32},
    "preempting": {
        "num_gpu_blocks_override": 20,
        "scheduler_reserve_full_isl": False,
        "max_num_batched_tokens": 64,
    },
    "without a prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
}
PIECES = [
    "def f(a, b):\n",
    "    return a + b\n",
    "one two ",
    "three ",
    "abc",
    "{",
    '"x": 1, ',
    "\n",
]
GRAMMARS = [
    {"regex": r"(ab|cd|\d+){1,12}"},
    {"choice": ["one two", "one three", "four"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
]
EVENTS = ("none", "none", "none", "sleep", "update", "forget")
INTERRUPTIONS = ("none", "none", "pause", "sleep", "preempt", "update")
"""What happens while requests run, to engines that draft alone: it changes no output either."""
NAME = "model.layers.0.mlp.down_proj.weight"
NUM_EXAMPLES = 12
WALK = settings(
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # to find a smaller example takes minutes
)


def maybe(values: Any, nothing: Any = None) -> Any:
    """Mostly nothing: parameters are combined, but not all of them at once."""
    return st.one_of(st.just(nothing), st.just(nothing), st.just(nothing), values)


params_of_any_kind = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 0.7, 1.0, 1.5]),
        "seed": st.integers(0, 2**40),
        "max_tokens": st.integers(1, 48),
        "top_k": maybe(st.integers(1, 60), 0),
        "top_p": maybe(st.floats(0.1, 0.99), 1.0),
        "min_p": maybe(st.floats(0.01, 0.5), 0.0),
        "repetition_penalty": maybe(st.floats(0.5, 2.0), 1.0),
        "presence_penalty": maybe(st.floats(-2.0, 2.0), 0.0),
        "frequency_penalty": maybe(st.floats(-2.0, 2.0), 0.0),
        "ignore_eos": st.booleans(),
        "min_tokens": maybe(st.integers(0, 1), 0),
        "stop": maybe(st.lists(st.sampled_from(["e", "\n", "re", "a b", " t"]), max_size=2), []),
        "stop_token_ids": maybe(st.lists(st.integers(5, 400), max_size=30), []),
        "include_stop_str_in_output": st.booleans(),
        "bad_words": maybe(st.lists(st.sampled_from(["the", " a", "return a", "\n"]), max_size=2)),
        "logit_bias": maybe(st.dictionaries(st.integers(5, 900), st.floats(-9, 9), max_size=9)),
        "allowed_token_ids": maybe(st.just(list(range(5, 300)))),
        "logprobs": maybe(st.integers(0, 4)),
        "prompt_logprobs": maybe(st.integers(0, 2)),
        "repetition_detection": maybe(st.just(RepetitionDetectionParams(4, 1, 4))),
        "n": st.sampled_from([1, 1, 1, 2]),
    }
)
grammar = maybe(st.sampled_from(GRAMMARS))
prompts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=24).map("".join)
requests = st.lists(st.tuples(prompts, params_of_any_kind, grammar), min_size=1, max_size=12)


def make_params(fields: dict[str, Any], grammar: dict[str, Any] | None) -> SamplingParams:
    if fields["temperature"] == 0:
        fields = fields | {"n": 1}
    if grammar is not None:
        free = {"allowed_token_ids": None, "bad_words": None, "logit_bias": None, "min_tokens": 0}
        fields = fields | free | {"structured_outputs": StructuredOutputsParams(**grammar)}
    return SamplingParams(**fields)


def said(output: Any) -> list[Any]:
    """All that an output says of its completions."""
    found: list[Any] = [str(output.prompt_logprobs), output.error]
    for each in output.outputs:
        found += [list(each.token_ids), each.text, each.finish_reason, each.stop_reason]
        found += [each.cumulative_logprob, str(each.logprobs)]
    return found


@dataclass
class Walkers:
    """Engines that stay, one without drafts and one for each of SETTINGS.

    Attributes:
        plain: does not draft.
        drafting: those that do.
        num_requests: how many requests of the latter were compared.
    """

    plain: LLM
    drafting: dict[str, LLM]
    num_requests: int = 0

    def happen(self, event: str) -> None:
        """Let the same happen to all engines."""
        for llm in (self.plain, *self.drafting.values()):
            if event == "sleep":
                llm.sleep(level=1)
                llm.wake_up()
            elif event == "update":
                weight = llm.collective_rpc("get_weight", args=(NAME,))[0]
                llm.update_weights([(NAME, weight * 0.999)])
            elif event == "forget":
                llm.reset_prefix_cache()


@pytest.fixture(scope="module")
def walkers() -> Iterator[Walkers]:
    drafting = {name: LLM("tiny", **(BASE | DRAFTING | each)) for name, each in SETTINGS.items()}
    found = Walkers(LLM("tiny", **BASE), drafting)
    yield found
    for llm in (found.plain, *drafting.values()):
        llm.close()


def run(llm: LLM, texts: list[str], params: list[SamplingParams], interruption: str) -> list[Any]:
    """Complete texts; the first one that is complete is when the interruption comes."""
    found: list[Any] = []
    for output in llm.stream(texts, [each.clone() for each in params], on_error="yield"):
        found.append(output)
        if len(found) == 1:
            interrupt(llm, interruption)
    return sorted(found, key=lambda output: output.prompt_index)


def interrupt(llm: LLM, interruption: str) -> None:
    if interruption == "pause":
        llm.pause_generation("keep")
        llm.resume_generation()
    elif interruption == "sleep":
        llm.sleep(level=1, mode="keep")
        llm.wake_up()
    elif interruption == "preempt":
        assert llm.reset_prefix_cache(reset_running_requests=True)
    elif interruption == "update":
        llm.update_weights([(NAME, llm.collective_rpc("get_weight", args=(NAME,))[0])])


def walk(
    walkers: Walkers,
    given_requests: list[tuple[str, dict[str, Any], dict[str, Any] | None]],
    kind: Kind | None,
    event: str,
    interruption: str,
) -> None:
    walkers.happen(event)
    texts = [prompt for prompt, _, _ in given_requests]
    params = [make_params(fields, grammar) for _, fields, grammar in given_requests]
    expected = run(walkers.plain, texts, params, "none")
    known = {
        (tuple(output.prompt_token_ids), each.seed + completion.index): list(completion.token_ids)
        for output, each in zip(expected, params, strict=True)
        for completion in output.outputs
    }
    for name, llm in walkers.drafting.items():
        core = llm._client._core  # type: ignore[attr-defined]
        before, counted = core.drafting._drafter, drafted_by(core)
        if kind is not None:
            use_drafter(llm, KnowingDrafter(kind, core.info.vocab_size, known))
        found = run(llm, texts, params, interruption)
        core.drafting._drafter = before
        for one, other, each in zip(expected, found, params, strict=True):
            assert said(other) == said(one), (name, each)
        growth = [now - then for now, then in zip(drafted_by(core), counted, strict=True)]
        assert_counted(found, growth)
        core.scheduler.check_integrity()
        assert not core.scheduler.has_unfinished()
        walkers.num_requests += len(texts)


def drafted_by(core: Any) -> tuple[int, int]:
    return core.scheduler.stats.draft_tokens, core.scheduler.stats.accepted_tokens


def assert_counted(outputs: list[Any], growth: list[int]) -> None:
    """Check that outputs say which drafts were theirs.

    Args:
        outputs: of all requests that ran.
        growth: of the engine's counters of drafted and accepted tokens.
    """
    ran = [each for each in outputs if each.metrics is not None]  # the others were refused
    known = [each.metrics for each in ran if each.metrics.num_draft_tokens is not None]
    sums = [sum(each.num_draft_tokens for each in known)]
    sums.append(sum(each.num_accepted_tokens for each in known))
    if len(known) == len(ran):
        assert sums == growth
    else:
        assert all(one <= other for one, other in zip(sums, growth, strict=True))
    for output in ran:
        if output.metrics.num_draft_tokens is None:
            stops = [each.stop_reason for each in output.outputs]
            assert output.error or any(isinstance(stop, str) for stop in stops)


@settings(WALK, max_examples=NUM_EXAMPLES)
@given(
    requests,
    st.sampled_from([None, *KINDS]),
    st.sampled_from(EVENTS),
    st.sampled_from(INTERRUPTIONS),
)
def test_no_output_changes(
    walkers: Walkers, requests: list[Any], kind: Kind | None, event: str, interruption: str
) -> None:
    walk(walkers, requests, kind, event, interruption)


@pytest.mark.stress
@pytest.mark.parametrize("part", range(3))
@settings(WALK, max_examples=200)
@given(
    requests,
    st.sampled_from([None, *KINDS]),
    st.sampled_from(EVENTS),
    st.sampled_from(INTERRUPTIONS),
)
def test_no_output_changes_in_ten_thousand_requests(
    walkers: Walkers,
    part: int,
    requests: list[Any],
    kind: Kind | None,
    event: str,
    interruption: str,
) -> None:
    walk(walkers, requests, kind, event, interruption)


@pytest.mark.stress
def test_there_were_ten_thousand(walkers: Walkers) -> None:
    assert walkers.num_requests >= 10_000
