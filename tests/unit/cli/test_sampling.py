"""The sampling options of the commands: the table, the values, and what is refused at once."""

from __future__ import annotations

import re
import sys

import click
import pytest

from shmllm.cli import session
from shmllm.cli.main import main
from shmllm.cli.sampling import (
    CONSTRAINTS,
    OPTIONS,
    OPTIONS_OF_TEXTS,
    completed,
    sampling_options,
    take_sampling,
    text_sampling_options,
)
from shmllm.params.sampling import SamplingParams
from shmllm.params.structured_outputs import StructuredOutputsParams

TABLE = (*OPTIONS, *OPTIONS_OF_TEXTS)
NOT_IN_THE_SHELL = {
    # These choose what an output object has; a command writes texts or records.
    *("output_kind", "stream_interval", "detokenize", "extra_args", "prompt_logprobs"),
    *("logprob_token_ids", "flat_logprobs", "trace_decode_token_ids"),
    *("routed_experts_prompt_start", "prompt_logprob_token_ids", "prompt_logprob_start"),
    *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
    # Rows of a file may have these.
    *("stop_token_ids", "bad_words", "min_tokens", "allowed_token_ids"),
    *("repetition_detection", "skip_reading_prefix_cache"),
    "structured_outputs",  # by the options of CONSTRAINTS
}


def test_every_sampling_parameter_has_one_option_or_none_on_purpose():
    names = [each.name for each in TABLE]
    assert len(set(names)) == len(names)
    assert {*names} | NOT_IN_THE_SHELL == {*SamplingParams.__struct_fields__}
    assert not {*names} & NOT_IN_THE_SHELL
    assert {each.name for each in CONSTRAINTS} <= {*StructuredOutputsParams.__annotations__}


@pytest.mark.parametrize("each", TABLE, ids=lambda each: each.flag)
def test_the_help_has_the_default_that_holds(each):
    """In words: "all" and "none" stand for the values that limit nothing."""
    value = completed().get(each.name, getattr(SamplingParams(), each.name))
    words = {"top_k": "all", "seed": "none", "thinking_token_budget": "none"}.get(
        each.name, f"{value or 0:g}" if value else "0"
    )
    shown = each.default.removeprefix("the model's, else ").split(",")[0]
    if each.default:
        assert shown == words
    else:
        assert value in (None, False, [])


@click.command
@sampling_options
@text_sampling_options
def take(**options):
    return take_sampling(options)


def taken(*arguments):
    return take.main(list(arguments), standalone_mode=False)


SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
EBNF = 'root ::= "yes" | "no"'


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {}),
        (["-n", "3"], {"n": 3}),
        (["--presence-penalty", "0"], {"presence_penalty": 0}),
        (["--frequency-penalty", "-1.5"], {"frequency_penalty": -1.5}),
        (["--repetition-penalty", "1.2"], {"repetition_penalty": 1.2}),
        (
            ["--logit-bias", "5=-inf", "--logit-bias", "7=2"],
            {"logit_bias": {5: float("-inf"), 7: 2}},
        ),
        (["--logprobs", "0"], {"logprobs": 0}),
        (["--stop", "a", "--stop", "b"], {"stop": ["a", "b"]}),
        (["--json-schema", SCHEMA], {"structured_outputs": {"json": SCHEMA}}),
        (["--regex", "[ab]+"], {"structured_outputs": {"regex": "[ab]+"}}),
        (["--choice", "a", "--choice", "b"], {"structured_outputs": {"choice": ["a", "b"]}}),
        (["--grammar", EBNF], {"structured_outputs": {"grammar": EBNF}}),
    ],
    ids=str,
)
def test_options_become_parameters(arguments, expected):
    assert taken(*arguments) == expected


@pytest.mark.parametrize(
    ("flag", "name", "text"), [("--json-schema", "json", SCHEMA), ("--grammar", "grammar", EBNF)]
)
def test_a_file_stands_for_its_text(tmp_path, flag, name, text):
    (tmp_path / "file").write_text(text)
    assert taken(flag, str(tmp_path / "file")) == {"structured_outputs": {name: text}}


def test_several_completions_are_not_greedy_unless_the_model_or_the_user_says_so():
    assert completed({"n": 1})["temperature"] == 0
    assert completed({"n": 2})["temperature"] == 1
    assert completed({"temperature": 0.5}, {"n": 2})["temperature"] == 0.5


REFUSED = {
    "no schema": (["--json-schema", "schema.json"], "neither a file nor a JSON schema"),
    "bad schema": (["--json-schema", "{"], "--json-schema is no JSON schema"),
    "no grammar": (["--grammar", "nothing.lark"], "neither a file nor a grammar"),
    "bad grammar": (["--grammar", "root ::= x"], "--grammar line 1: .*x"),
    "folder": (["--grammar", "/"], "/: Is a directory"),
    "regex": (["--regex", "("], "--regex: unclosed group"),
    "two constraints": (["--regex", "a", "--choice", "b"], "--regex and --choice"),
    "bias": (["--logit-bias", "5"], "'5' is not a token id and a number"),
    "greedy copies": (["-n", "2", "--temperature", "0"], "n must be 1 when temperature is 0"),
    "n": (["-n", "0"], "n must be"),
    "penalty": (["--presence-penalty", "3"], "presence_penalty must be .*got 3"),
    "priority": (["--priority", "1"], "--scheduling-policy priority"),
    "no template": (["--chat-template", "/no/such"], "/no/such: No such file"),
    "bad template": (["--chat-template", "TEMPLATE"], "TEMPLATE: .*"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_value_is_one_line_and_exit_code_2_before_an_engine_starts(
    name, tmp_path, monkeypatch, capfd
):
    arguments, message = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "TEMPLATE").write_text("{% for %}")
    monkeypatch.setattr(session, "_start", lambda engine: pytest.fail("an engine was started"))
    monkeypatch.setattr("sys.argv", ["shmllm", "generate", "x", *arguments])
    monkeypatch.setattr("sys.stderr", sys.stderr)  # `main` replaces it
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    (line,) = (line for line in shown.err.splitlines() if not re.match(r"Usage|Try|$", line))
    assert re.search(message, line)
