"""Replies of real engines in parts: reasoning, content, tool calls, forced calls, budgets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chat_models import FAMILIES, TIME, WEATHER, make_chat_model, scripted
from support.variants import diagonal

from shmllm import LLM, AsyncLLM, RequestError, RequestOutputKind, SamplingParams

pytestmark = pytest.mark.usefixtures("no_leaks")

ASK = [{"role": "user", "content": "How is the weather in Oslo?"}]
OSLO = '{"city": "Oslo", "days": 2}'
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'
BEGIN, SEP, END = (
    f"<\uff5ctool\u2581{n}\uff5c>" for n in ("call\u2581begin", "sep", "call\u2581end")
)
CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>{}<\uff5ctool\u2581calls\u2581end\uff5c>"
# family: (what the model writes, whether it reasons)
SCRIPTS = {
    "qwen3": (f"<think>\nHm.\n</think>\n\nI look.\n{HERMES}", True),
    "qwen3_coder": (
        "<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n<function=weather>\n<parameter=city>\n"
        "Oslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        True,
    ),
    "llama3": (f'{{"name": "weather", "parameters": {OSLO}}}', False),
    "mistral": (f'I look.[TOOL_CALLS][{{"name": "weather", "arguments": {OSLO}}}]', False),
    "mistral_ids": (f"I look.[TOOL_CALLS]weather[CALL_ID]abcdefgh9[ARGS]{OSLO}", False),
    "deepseek": (
        "Hm.\n</think>\n\nI look."
        + CALLS.format(f"{BEGIN}function{SEP}weather\n```json\n{OSLO}\n```{END}"),
        True,
    ),
    "gpt_oss": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{OSLO}",
        True,
    ),
}


@pytest.fixture(scope="module")
def llms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LLM]]:
    started = {}
    for family in FAMILIES:
        directory = make_chat_model(tmp_path_factory.mktemp(family), family)
        started[family] = LLM(
            str(directory),
            load_format="dummy",
            multiprocess=False,
            kv_cache_memory_bytes=2**24,
        )
    yield started
    for llm in started.values():
        llm.close()


def chat(llm: LLM, params: SamplingParams, **options: Any) -> Any:
    return llm.chat(ASK, params, use_tqdm=False, **options)[0].outputs[0]


def calls_of(completion: Any) -> list[tuple[str, Any]]:
    return [
        (call.function.name, json.loads(call.function.arguments)) for call in completion.tool_calls
    ]


@pytest.mark.parametrize("family", SCRIPTS)
def test_a_reply_has_the_parts_that_the_model_wrote(llms: dict[str, LLM], family: str) -> None:
    text, reasons = SCRIPTS[family]
    llm = llms[family]
    found = chat(llm, scripted(llm, text), tools=[WEATHER, TIME])
    assert calls_of(found) == [("weather", json.loads(OSLO))]
    assert found.reasoning == ("Hm." if reasons else "")
    assert found.content == ("" if family == "llama3" else "I look.")
    assert found.text == llm.front_end.tokenizer.decode(found.token_ids)


@pytest.mark.parametrize("family", SCRIPTS)
def test_without_tools_calls_are_content(llms: dict[str, LLM], family: str) -> None:
    text, reasons = SCRIPTS[family]
    found = chat(llms[family], scripted(llms[family], text))
    if not reasons:
        assert (found.reasoning, found.content, found.tool_calls) == (None, None, None)
    else:
        assert (found.reasoning, found.tool_calls) == ("Hm.", [])
        assert "Oslo" in found.content
    none = chat(llms[family], scripted(llms[family], text), tools=[WEATHER], tool_choice="none")
    assert (none.reasoning, none.content, none.tool_calls) == (
        (found.reasoning, found.content, found.tool_calls)
    )


def test_generate_returns_text_alone(llms: dict[str, LLM]) -> None:
    params = scripted(llms["qwen3"], SCRIPTS["qwen3"][0])
    found = llms["qwen3"].generate("x", params, use_tqdm=False)[0].outputs[0]
    assert (found.reasoning, found.content, found.tool_calls) == (None, None, None)


@pytest.mark.parametrize(
    ("family", "choice_and_temperature"),
    diagonal(list(SCRIPTS), [("required", 1.0), ("named", 0.0)]),
)
def test_a_forced_call_matches_the_schema(
    llms: dict[str, LLM], family: str, choice_and_temperature: tuple[str, float]
) -> None:
    """Random weights write any call that the grammar allows; reasoning ends by its budget."""
    choice, temperature = choice_and_temperature
    llm = llms[family]
    named = {"type": "function", "function": {"name": "weather"}}
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=250)
    if SCRIPTS[family][1]:
        params.thinking_token_budget = 5
    found = chat(
        llm,
        params,
        tools=[WEATHER, TIME] if choice == "named" else [WEATHER],
        tool_choice=named if choice == "named" else "required",
    )
    assert choice == "required" or found.finish_reason == "stop", found.text
    assert choice == "required" or found.content == ""
    assert {name for name, _ in calls_of(found)} == {"weather"}
    assert choice == "required" or len(found.tool_calls) == 1
    for _, arguments in calls_of(found):
        assert arguments.keys() == {"city", "days"}
        assert isinstance(arguments["city"], str)
        assert arguments["days"] in range(1, 10)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_stream_adds_up_to_the_whole_reply(llms: dict[str, LLM], family: str) -> None:
    llm = llms[family]
    prompt = llm.front_end.chat_prompt(ASK, tools=[WEATHER])
    params = scripted(llm, SCRIPTS[family][0])
    reasoning = content = ""
    calls = []
    for output in llm.stream([prompt], params, output_kind=RequestOutputKind.DELTA):
        [new] = output.outputs
        reasoning, content, calls = (
            reasoning + new.reasoning,
            content + new.content,
            calls + new.tool_calls,
        )
    assert (reasoning, content, len(calls)) == ("Hm.", "I look.", 1)
    last = list(llm.stream([prompt], params, output_kind=RequestOutputKind.CUMULATIVE))[-1]
    assert (last.outputs[0].reasoning, last.outputs[0].content) == (reasoning, content)
    assert calls_of(last.outputs[0]) == [("weather", json.loads(OSLO))]


def test_an_async_chat_streams_deltas(tmp_path: Any) -> None:
    async def run() -> list[Any]:
        model = str(make_chat_model(tmp_path, "qwen3"))
        engine = AsyncLLM(model, load_format="dummy", multiprocess=False)
        try:
            params = scripted(engine._llm, SCRIPTS["qwen3"][0])
            params.output_kind = RequestOutputKind.DELTA
            chat = engine.chat(ASK, params, tools=[WEATHER])
            return [output.outputs[0] async for output in chat]
        finally:
            engine.shutdown()

    found = asyncio.run(run())
    assert "".join(each.reasoning for each in found) == "Hm."
    assert "".join(each.content for each in found) == "I look."
    assert [call.function.name for each in found for call in each.tool_calls] == ["weather"]


def test_a_stop_string_ends_the_reply(llms: dict[str, LLM]) -> None:
    params = SamplingParams(
        max_tokens=40,
        stop=["look"],
        structured_outputs={"choice": ["<think>a</think>I look here."]},
    )
    llm = llms["mistral"]
    llm.front_end._replies._reasoning, before = "qwen3", llm.front_end._replies._reasoning
    try:
        found = chat(llm, params)
    finally:
        llm.front_end._replies._reasoning = before
    assert (found.text, found.stop_reason) == ("<think>a</think>I ", "look")
    assert (found.reasoning, found.content) == ("a", "I ")


def test_several_completions_have_a_reply_each(llms: dict[str, LLM]) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=200, thinking_token_budget=2)
    [output] = llms["qwen3"].chat(
        ASK, params, use_tqdm=False, tools=[WEATHER], tool_choice="required"
    )
    assert all(each.tool_calls for each in output.outputs)


def test_reasoning_ends_after_its_budget_whatever_runs_beside_it(llms: dict[str, LLM]) -> None:
    llm = llms["deepseek"]  # whose prompt begins the reasoning
    end = llm.front_end.tokenizer.added_tokens["</think>"]
    prompt = llm.front_end.chat_prompt(ASK)
    free = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    free.logit_bias = {end: -100.0}

    def limited(limit: int, seed: int) -> SamplingParams:
        params = free.clone()
        params.thinking_token_budget, params.seed = limit, seed
        return params

    alone = [
        llm.generate(prompt, limited(limit, limit), use_tqdm=False)[0].outputs[0].token_ids
        for limit in (0, 3, 9)
    ]
    for limit, ids in zip((0, 3, 9), alone, strict=True):
        assert ids.index(end) == max(limit - 1, 0)  # the prompt has a line end behind the mark
        assert ids.count(end) == 1
    params = [limited(limit, limit) for limit in (0, 3, 9)]
    together = llm.generate([prompt] * 4, [*params, free], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in together[:3]] == alone


def test_reasoning_ends_by_the_text_of_the_reasoning_config(tmp_path: Path, no_leaks: None) -> None:
    directory = str(make_chat_model(tmp_path, "deepseek"))
    marks = {"reasoning_end_str": "That is all.</think>"}
    options: dict[str, Any] = {"load_format": "dummy", "multiprocess": False}
    with LLM(directory, kv_cache_memory_bytes=2**24, reasoning_config=marks, **options) as llm:
        tokenizer = llm.front_end.tokenizer
        close = tokenizer.added_tokens["</think>"]
        forced = tokenizer.encode(marks["reasoning_end_str"], add_special_tokens=False)
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
        params.thinking_token_budget, params.logit_bias = 3, {close: -100.0}
        prompt = llm.front_end.chat_prompt(ASK)
        ids = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        assert ids[2 : 2 + len(forced)] == forced  # the prompt has a line end behind the mark
        assert ids.count(close) == 1


def test_a_budget_has_the_same_effect_in_overlapped_steps_and_after_preemption(
    tmp_path: Any,
) -> None:
    model = str(make_chat_model(tmp_path, "qwen3"))
    few_blocks = {
        "num_gpu_blocks_override": 14,
        "scheduler_reserve_full_isl": False,
        "max_model_len": 200,
    }
    found, num_preempted = [], []
    for options in ({}, {"async_scheduling": True}, few_blocks):
        with LLM(model, load_format="dummy", multiprocess=False, **options) as llm:
            text = "<think>hello"
            ids = llm.front_end.tokenizer.encode(text, add_special_tokens=False)
            params = [
                SamplingParams(
                    temperature=1.0,
                    seed=seed,
                    max_tokens=80,
                    ignore_eos=True,
                    repetition_penalty=1.1,
                    thinking_token_budget=budget,
                )
                for seed, budget in enumerate((0, 4, 30, 60))
            ]
            outputs = llm.generate([{"prompt_token_ids": ids}] * 4, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            num_preempted.append(sum(output.metrics.num_preemptions for output in outputs))
            end = llm.front_end.tokenizer.added_tokens["</think>"]
    assert num_preempted[:2] == [0, 0]
    assert num_preempted[2] > 0
    assert found[0] == found[1] == found[2]
    for ids, budget in zip(found[0], (0, 4, 30, 60), strict=True):
        assert ids.index(end) <= max(budget - 1, 0)


# (options of the chat, the error)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "any"}, "tool_choice must be 'auto', 'none', 'required' or"),
    ({"tool_choice": "required", "tools": None}, "needs one of the tools"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "tim"}}},
        "their names are: weather, time",
    ),
    (
        {"tool_choice": "required", "params": SamplingParams(structured_outputs={"regex": "a"})},
        "a tool_choice that forces a call, and structured_outputs: give one of them",
    ),
    (
        {"tool_choice": "required", "tools": [{"name": "f", "parameters": {"not": {}}}]},
        "has the keyword 'not'",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[m[:30] for _, m in REFUSED])
def test_what_cannot_be_forced_is_refused(
    llms: dict[str, LLM], options: dict[str, Any], message: str
) -> None:
    params = options.pop("params", SamplingParams())
    with pytest.raises(RequestError) as caught:
        chat(llms["qwen3"], params, **{"tools": [WEATHER, TIME]} | options)
    assert message in str(caught.value)


def test_a_budget_needs_reasoning(llms: dict[str, LLM]) -> None:
    with pytest.raises(RequestError, match="set the option reasoning_parser"):
        llms["llama3"].generate("x", SamplingParams(thinking_token_budget=1), use_tqdm=False)
