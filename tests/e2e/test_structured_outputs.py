"""Structured outputs of a real engine match, and requests beside them are unaffected."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.variants import diagonal

from shmllm import LLM, RequestError, RequestOutput, SamplingParams, StructuredOutputsParams
from shmllm.frontend.model_files import resolve_model

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

PROMPTS = ["def f(x):\n", "import", "class A:\n    name = ", "# The answer is: "]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
DATE = r"\d{4}-(0[1-9]|1[0-2])-[0-2]\d"
SUM = 'root ::= number (" + " number){1,3}\nnumber ::= [1-9] [0-9]{0,2}'


def is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        person.keys() == {"name", "age"}
        and isinstance(person["name"], str)
        and len(person["name"]) <= 12
        and person["age"] in range(131)
    )


MATCHES: dict[str, tuple[StructuredOutputsParams, Any]] = {
    "json": (StructuredOutputsParams(json=PERSON, disable_any_whitespace=True), is_person),
    "regex": (StructuredOutputsParams(regex=DATE), re.compile(DATE).fullmatch),
    "choice": (StructuredOutputsParams(choice=["yes", "no"]), {"yes", "no"}.__contains__),
    "grammar": (
        StructuredOutputsParams(grammar=SUM),
        re.compile(r"[1-9]\d{0,2}( \+ [1-9]\d{0,2}){1,3}").fullmatch,
    ),
    "json_object": (
        StructuredOutputsParams(json_object=True, disable_any_whitespace=True),
        lambda text: isinstance(json.loads(text), dict),
    ),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", max_num_seqs=16, max_num_batched_tokens=96) as engine:
        yield engine


def run(llm: LLM, prompts: list[Any], params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def some(kind: str, temperature: float, seed: int = 0, max_tokens: int = 200) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        structured_outputs=MATCHES[kind][0],
    )


@pytest.mark.parametrize(("kind", "temperature"), diagonal(list(MATCHES), [0.0, 1.0, 2.0]))
def test_finished_outputs_match(llm: LLM, kind: str, temperature: float) -> None:
    outputs = [
        output.outputs[0]
        for seed in range(3)
        for output in run(llm, PROMPTS, some(kind, temperature, seed))
    ]
    finished = [output for output in outputs if output.finish_reason == "stop"]
    assert [o.text for o in finished if not MATCHES[kind][1](o.text)] == []
    assert all(output.stop_reason is None for output in finished)
    assert "<|endoftext|>" not in "".join(output.text for output in finished)
    # A string without a bound may well be longer than max_tokens.
    assert len(finished) == len(outputs) or kind == "json_object"
    assert finished


def test_the_end_of_sequence_is_allowed_where_the_grammar_accepts(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0,
        max_tokens=20,
        structured_outputs=StructuredOutputsParams(regex="a*"),
        logit_bias={llm.facts.eos_token_ids[0]: 50},
    )
    (output,) = run(llm, ["x"], params)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "stop")
    assert output.outputs[0].token_ids == [llm.facts.eos_token_ids[0]]


@pytest.mark.parametrize("options", [{}, {"ignore_eos": True}, {"detokenize": False}])
def test_other_options_do_not_change_how_it_ends(llm: LLM, options: dict[str, Any]) -> None:
    params = SamplingParams(
        temperature=0, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]), **options
    )
    (output,) = run(llm, ["Is it?"], params)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text in (("yes", "no") if params.detokenize else ("",))
    assert output.outputs[0].token_ids[-1] in llm.facts.eos_token_ids
    assert len(output.outputs[0].token_ids) > 1


def test_a_complete_match_ends_the_output_before_min_tokens(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=50, min_tokens=40, structured_outputs=StructuredOutputsParams(choice=["a"])
    )
    (output,) = run(llm, ["x"], params)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("a", "stop")
    assert output.outputs[0].token_ids[-1] not in llm.facts.eos_token_ids


def test_before_min_tokens_a_longer_match_is_continued(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=9, min_tokens=5, structured_outputs=StructuredOutputsParams(regex="[ab]+")
    )
    outputs = run(llm, PROMPTS, params)
    assert min(len(output.outputs[0].token_ids) for output in outputs) > 5


def test_in_a_mixed_batch_each_request_equals_its_solo_run(llm: LLM) -> None:
    kinds = [None, *MATCHES]
    params = []
    for index in range(24):
        kind, temperature = kinds[index % len(kinds)], [0.0, 0.8, 1.5][index % 3]
        params.append(
            SamplingParams(temperature=temperature, seed=index, max_tokens=30)
            if kind is None
            else some(kind, temperature, index, max_tokens=30)
        )
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(24)]
    together = run(llm, prompts, params)
    alone = [run(llm, [prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


def test_an_impossible_request_ends_alone_and_says_why(llm: LLM) -> None:
    impossible = SamplingParams(
        structured_outputs=StructuredOutputsParams(choice=["a"]), allowed_token_ids=[7]
    )
    unknown = SamplingParams(structured_outputs=StructuredOutputsParams(grammar="start: <|foo|>"))
    fine = SamplingParams(temperature=0, max_tokens=5)
    first, second, third = run(llm, ["x", "y", PROMPTS[0]], [impossible, unknown, fine])
    assert first.outputs[0].finish_reason == second.outputs[0].finish_reason == "error"
    assert "leave no token that the grammar allows" in (first.error or "")
    assert "unknown special token" in (second.error or "")
    assert third.outputs[0].token_ids == run(llm, [PROMPTS[0]], fine)[0].outputs[0].token_ids


def test_an_invalid_constraint_queues_nothing_and_leaves_the_engine_alive(llm: LLM) -> None:
    for wrong in ({"regex": "("}, {"choice": []}, {"json": {"minimun": 3}}):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**wrong))
        with pytest.raises(RequestError, match="structured_outputs"):
            run(llm, PROMPTS, [SamplingParams(), SamplingParams(), SamplingParams(), params])
    assert llm.get_metrics()["running"] == llm.get_metrics()["waiting"] == 0
    assert run(llm, ["x"], some("choice", 0.0))[0].outputs[0].finish_reason == "stop"


def test_each_of_several_completions_has_its_own_grammar_state(llm: LLM) -> None:
    params = some("regex", 1.5, seed=5)
    params.n = 4
    (output,) = run(llm, ["The date: "], params)
    texts = [completion.text for completion in output.outputs]
    assert all(re.fullmatch(DATE, text) for text in texts)
    assert len(set(texts)) > 1


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    constraint = StructuredOutputsParams(regex="[xyz]{6}")
    params = SamplingParams(temperature=0, logprobs=0, structured_outputs=constraint)
    (output,) = run(llm, [PROMPTS[0]], params)
    tokens = output.outputs[0].token_ids
    again = {"prompt_token_ids": [*output.prompt_token_ids, *tokens]}
    (scored,) = run(llm, [again], SamplingParams(max_tokens=1, prompt_logprobs=0))
    for token_id, own, free in zip(
        tokens, output.outputs[0].logprobs, scored.prompt_logprobs[-len(tokens) :], strict=True
    ):
        assert own[token_id].logprob == pytest.approx(free[token_id].logprob, abs=1e-4)
        assert own[token_id].rank == free[token_id].rank


def test_preemption_changes_no_token(llm: LLM) -> None:
    # Three of these need more blocks than there are.
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=90,
            structured_outputs=StructuredOutputsParams(regex="([a-z]+ ){200}"),
        )
        for seed in range(4)
    ]
    expected = [o.outputs[0].token_ids for o in run(llm, PROMPTS, params)]
    little = {
        "max_num_seqs": 4,
        "max_model_len": 128,
        "num_gpu_blocks_override": 16,
        "scheduler_reserve_full_isl": False,
    }
    with LLM("tiny", multiprocess=False, **little) as small:
        outputs = run(small, PROMPTS, params)
        assert small.get_metrics()["preemptions"] > 0
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert all(re.fullmatch("([a-z]+ )*[a-z]*", output.outputs[0].text) for output in outputs)


def test_equal_grammars_are_compiled_once_also_in_this_process() -> None:
    with LLM("tiny", multiprocess=False, max_num_seqs=8) as local:
        for _ in range(2):
            outputs = run(local, PROMPTS * 5, some("choice", 1.0))
            assert {o.outputs[0].text for o in outputs} <= {"yes", "no"}
        compiler = local._client._core.runner._grammars
        assert compiler.num_compiled == 1


def test_the_mask_is_made_for_the_tokenizer_option(tmp_path: Any) -> None:
    """The engine computes masks with the tokenizer that the front end decodes with."""
    source = resolve_model("tiny")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text((source / "tokenizer_config.json").read_text())
    with LLM("tiny", tokenizer=str(tmp_path), max_num_seqs=4) as llm:
        params = SamplingParams(
            temperature=0, structured_outputs=StructuredOutputsParams(choice=["a"])
        )
        assert run(llm, ["x"], params)[0].outputs[0].text == "a"
