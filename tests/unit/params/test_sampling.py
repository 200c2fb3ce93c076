"""SamplingParams: ranges, error messages and the conversion of values."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
from array import array

import numpy as np
import pytest

from shmllm.errors import RequestError
from shmllm.params.sampling import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from shmllm.params.structured_outputs import StructuredOutputsParams
from shmllm.params.token_table import TokenTable

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -0.1}, "temperature must be a number from 0 to 2, got -0.1"),
        ({"temperature": 2.1}, "temperature must be a number from 0 to 2, got 2.1"),
        ({"temperature": NAN}, "temperature must be .* got nan"),
        ({"temperature": INF}, "temperature must be .* got inf"),
        ({"temperature": "1"}, "temperature must be .* got '1'"),
        ({"temperature": None}, "temperature must be .* got None"),
        ({"temperature": True}, "temperature must be .* got True"),
        ({"top_p": 0}, "top_p must be a number above 0 and up to 1, got 0"),
        ({"top_p": 1.01}, "top_p must be .* got 1.01"),
        ({"top_p": NAN}, "top_p must be .* got nan"),
        ({"top_k": -2}, "top_k must be -1, 0 or a positive whole number, got -2"),
        ({"top_k": 1.5}, "top_k must be .* got 1.5"),
        ({"top_k": True}, "top_k must be .* got True"),
        ({"min_p": -0.1}, "min_p must be a number from 0 to 1, got -0.1"),
        ({"min_p": 1.1}, "min_p must be .* got 1.1"),
        ({"seed": 1.0}, "seed must be None or a 64-bit whole number, got 1.0"),
        ({"seed": 2**63}, "seed must be .* got 9223372036854775808"),
        ({"seed": -(2**63) - 1}, "seed must be "),
        ({"max_tokens": 0}, "max_tokens must be None or a whole number of at least 1, got 0"),
        ({"max_tokens": 2.0}, "max_tokens must be .* got 2.0"),
        ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0 and .*, got -1"),
        ({"min_tokens": 17}, r"min_tokens must be less than or equal to max_tokens \(16\), got 17"),
        ({"min_tokens": 3, "max_tokens": 2}, r"equal to max_tokens \(2\), got 3"),
        ({"stop": ""}, "stop must be a non-empty string or a list of them, got "),
        ({"stop": ["a", ""]}, "stop must be .* got "),
        ({"stop": [b"a"]}, "stop must be "),
        ({"stop": 5}, "stop must be .* got 5"),
        ({"stop": "a", "detokenize": False}, "stop must be empty when detokenize is False"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids must be a list of token ids, got \[-1\]"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids must be "),
        ({"stop_token_ids": ["5"]}, "stop_token_ids must be "),
        ({"stop_token_ids": [True]}, "stop_token_ids must be "),
        ({"stop_token_ids": 5}, "stop_token_ids must be .* got 5"),
        ({"n": 0}, "n must be a whole number from 1 to 16384, got 0"),
        ({"n": 16385}, "n must be a whole number from 1 to 16384, got 16385"),
        ({"n": 1.0}, "n must be .* got 1.0"),
        ({"n": 2, "temperature": 0}, "n must be 1 when temperature is 0.*, got 2"),
        ({"presence_penalty": 2.1}, "presence_penalty must be a number from -2 to 2, got 2.1"),
        ({"presence_penalty": NAN}, "presence_penalty must be .* got nan"),
        ({"frequency_penalty": -2.1}, "frequency_penalty must be a number from -2 to 2, got -2.1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a finite number above 0, got 0"),
        ({"repetition_penalty": -1}, "repetition_penalty must be .* got -1"),
        ({"repetition_penalty": INF}, "repetition_penalty must be .* got inf"),
        ({"repetition_penalty": NAN}, "repetition_penalty must be .* got nan"),
        ({"bad_words": [""]}, "bad_words must be a list of at most 1000 non-empty strings, got "),
        ({"bad_words": [f"{i}" for i in range(1001)]}, "bad_words must be a list of at most 1000 "),
        ({"bad_words": [5]}, "bad_words must be "),
        ({"logprobs": -2}, "logprobs must be None, -1 for the whole vocabulary, or .* got -2"),
        ({"logprobs": 1.0}, "logprobs must be .* got 1.0"),
        ({"prompt_logprobs": -2}, "prompt_logprobs must be None, -1 .* got -2"),
        ({"prompt_logprobs": "5"}, "prompt_logprobs must be .* got '5'"),
        ({"detokenize": None}, "detokenize must be True or False, got None"),
        ({"skip_special_tokens": 1}, "skip_special_tokens must be True or False, got 1"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"include_stop_str_in_output": 0}, "include_stop_str_in_output must be True or False"),
        ({"thinking_token_budget": -2}, "thinking_token_budget must be None, -1 or a whole number"),
        (
            {"thinking_token_budget": 1.5},
            "thinking_token_budget must be None, -1 or a whole number",
        ),
        ({"spaces_between_special_tokens": 2}, "spaces_between_special_tokens must be True or"),
        ({"output_kind": 1}, "output_kind must be a RequestOutputKind, got 1"),
        ({"output_kind": None}, "output_kind must be a RequestOutputKind, got None"),
        ({"stream_interval": 0}, "stream_interval must be None or a whole .* 1, got 0"),
        ({"logit_bias": [1]}, r"logit_bias must be None or a dict .* got \[1\]"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias must be .* got {'x': 1.0}"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must be "),
        ({"logit_bias": {1: INF}}, "logit_bias must be .* numbers below infinity, got "),
        ({"logit_bias": {1: NAN}}, "logit_bias must be "),
        ({"logit_bias": {1: "2"}}, "logit_bias must be "),
        ({"allowed_token_ids": []}, r"allowed_token_ids must be None or a non-empty list.*\[\]"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids must be "),
        ({"allowed_token_ids": [1.0]}, "allowed_token_ids must be "),
        ({"structured_outputs": "json"}, "structured_outputs must be a StructuredOutputsParams"),
        ({"repetition_detection": 3}, "repetition_detection must be a RepetitionDetectionParams"),
        ({"skip_reading_prefix_cache": 1}, "skip_reading_prefix_cache must be None, True or False"),
        ({"extra_args": [1]}, r"extra_args must be None or a dict with str keys, and .* got \[1\]"),
        ({"extra_args": {1: 2}}, "extra_args must be "),
        ({"extra_args": {"a": 2**64}}, r"extra_args integers from -2\*\*63 to 2\*\*64 - 1"),
        ({"extra_args": {"a": [{"b": (-(2**63) - 1,)}]}}, "extra_args integers"),
        ({"extra_args": {"a": {2**64: 1}}}, "extra_args integers"),
        ({"stop_token_ids": [[1]]}, r"stop_token_ids must be .* got \[\[1\]\]"),
        ({"structured_outputs": {}}, "structured_outputs needs exactly one of json, .*; got none"),
        (
            {"structured_outputs": {"json": "{}", "regex": "a"}},
            "structured_outputs needs exactly one of .*; got json and regex",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 3}},
            "repetition_detection.min_count must be at least 2, got 0",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 4}},
            r"min_pattern_size must be at most max_pattern_size \(3\), got 4",
        ),
        (
            {"repetition_detection": {"max_pattern_size": -1}},
            "repetition_detection must have whole numbers from 0, got .*max_pattern_size=-1",
        ),
    ],
    ids=str,
)
def test_the_error_for_a_value_out_of_range_has_field_range_and_value(options, words):
    with pytest.raises(RequestError, match=words):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 2},
        {"temperature": 0.01},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 10**6},
        {"min_p": 0},
        {"min_p": 1},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"seed": 0},
        {"max_tokens": 1},
        {"max_tokens": None, "min_tokens": 1000},
        {"min_tokens": 16},
        {"stop": ["a", "b"]},
        {"stop": ("a",)},
        {"stop_token_ids": [0, 2**31 - 1]},
        {"detokenize": False, "stop": []},
        {"n": 16384},
        {"n": 1, "temperature": 0},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"repetition_penalty": 1e-9},
        {"repetition_penalty": 1e9},
        {"logprobs": 0},
        {"logprobs": -1, "prompt_logprobs": -1},
        {"prompt_logprobs": 10**6},
        {"stream_interval": 1},
        {"logit_bias": {0: -100, 5: float("-inf")}},
        {"allowed_token_ids": [0]},
        {"bad_words": ["a", " b"]},
        {"extra_args": {}},
        {"extra_args": {"a": [{"b": (-(2**63), 2**64 - 1, True)}, Ellipsis]}},
        {"skip_reading_prefix_cache": True},
    ],
    ids=str,
)
def test_the_ends_of_the_ranges_are_allowed(options):
    params = SamplingParams(**options)
    assert {name: getattr(params, name) for name in options} == options


def test_a_request_error_is_a_value_error():
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams(top_p=2)


@pytest.mark.parametrize(
    ("given", "taken"), [("END", ["END"]), (None, []), ([], []), (["a"], ["a"])], ids=str
)
def test_stop_becomes_a_list(given, taken):
    assert SamplingParams(stop=given).stop == taken


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("stop_token_ids", None, []),
        ("seed", -1, None),
        ("stop_token_ids", [42, 7, 42, 9, 7], [42, 7, 9]),
        ("stop_token_ids", (5, 5), [5]),
        ("bad_words", None, []),
        ("bad_words", ["bad", "worse", "bad"], ["bad", "worse"]),
        ("bad_words", "word", ["word"]),
        ("logprobs", True, 1),
        ("prompt_logprobs", True, 1),
        ("logit_bias", {}, None),
        ("logit_bias", {"17": 2.5}, {17: 2.5}),
        ("structured_outputs", {"regex": "a+"}, StructuredOutputsParams(regex="a+")),
        (
            "repetition_detection",
            {"max_pattern_size": 3, "min_count": 2},
            RepetitionDetectionParams(max_pattern_size=3, min_count=2),
        ),
    ],
)
def test_other_forms_of_values_are_converted(name, given, taken):
    assert getattr(SamplingParams(**{name: given}), name) == taken


@pytest.mark.parametrize("temperature", [1e-5, 0.001, 0.0099, 1e-6, 1e-12])
def test_a_temperature_too_low_to_compute_is_raised_with_a_warning(temperature, caplog):
    with caplog.at_level(logging.WARNING):
        params = SamplingParams(temperature=temperature)
    assert (params.temperature, params.is_greedy) == (0.01, False)
    assert f"temperature {temperature} raised to 0.01" in caplog.text


def test_usual_temperatures_cause_no_warning(caplog):
    for temperature in (0, 0.01, 1.0):
        SamplingParams(temperature=temperature)
    assert caplog.text == ""


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (0.0, True), (0.01, False)])
def test_only_temperature_zero_is_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).is_greedy == greedy


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("temprature", "temperature"), ("topp", "top_p"), ("max_new_tokens", "max_tokens")],
)
def test_an_unknown_option_names_the_nearest(given, nearest):
    with pytest.raises(TypeError, match=f"SamplingParams.* '{given}'; .* '{nearest}'"):
        SamplingParams(**{given: 1})


def test_defaults_are_not_shared():
    SamplingParams().stop.append("x")
    SamplingParams().stop_token_ids.append(1)
    assert (SamplingParams().stop, SamplingParams().stop_token_ids) == ([], [])


def copies():
    return {
        "clone": SamplingParams.clone,
        "deepcopy": copy.deepcopy,
        "pickle": lambda params: pickle.loads(pickle.dumps(params)),
    }


def full():
    return {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 3,
        "stop": ["a"],
        "stop_token_ids": [4],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "max_tokens": 9,
        "min_tokens": 2,
        "skip_special_tokens": False,
        "n": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "bad_words": ["x"],
        "logprobs": 2,
        "prompt_logprobs": 0,
        "logprob_token_ids": [5, 0],
        "flat_logprobs": True,
        "detokenize": True,
        "spaces_between_special_tokens": False,
        "output_kind": RequestOutputKind.DELTA,
        "stream_interval": 4,
        "structured_outputs": StructuredOutputsParams(choice=["a", "b"]),
        "logit_bias": {3: 1.5},
        "allowed_token_ids": [3, 4],
        "repetition_detection": RepetitionDetectionParams(4, 1, 3),
        "skip_reading_prefix_cache": True,
        "thinking_token_budget": 12,
        "extra_args": {"mine": 1},
        "trace_decode_token_ids": None,
        "prompt_logprob_token_ids": None,
        "prompt_logprob_start": None,
        "routed_experts_prompt_start": 3,
    }


@pytest.mark.parametrize(
    "given", [[[1, 2], [3, -1]], ((1, 2), (3, -1)), np.array([[1, 2], [3, -1]], np.int64)]
)
def test_rows_of_token_ids_become_a_table(given):
    params = SamplingParams(prompt_logprob_token_ids=given, prompt_logprob_start=4)
    assert params.prompt_logprob_token_ids == TokenTable(2, array("i", [1, 2, 3, -1]))
    assert len(params.prompt_logprob_token_ids) == 2
    assert SamplingParams(**{name: getattr(params, name) for name in full()}) == params


@pytest.mark.parametrize(
    "given", [5, [], [[]], [[1], [2, 3]], [[1.0]], [[True]], [[-2]], [[2**31]], ["ab"]]
)
def test_what_is_no_table_of_token_ids_is_an_error(given):
    with pytest.raises(RequestError, match="prompt_logprob_token_ids must be None or rows of tok"):
        SamplingParams(prompt_logprob_token_ids=given)


def test_parameters_reconstructed_from_their_fields_are_equal():
    """Programs written for vLLM copy and change parameters in this way."""
    params = SamplingParams(**full())
    names = SamplingParams.__struct_fields__
    assert set(names) == set(full()) == set(SamplingParams.__annotations__)
    assert SamplingParams(**{name: getattr(params, name) for name in names}) == params
    plain = SamplingParams()
    assert SamplingParams(**{name: getattr(plain, name) for name in names}) == plain


def test_parameters_take_keywords_only():
    with pytest.raises(TypeError):
        SamplingParams(1)


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        ({}, True),
        ({"prompt_logprobs": 0}, False),
        ({"skip_reading_prefix_cache": True}, False),
        ({"skip_reading_prefix_cache": False}, True),
        ({"prompt_logprobs": 1, "skip_reading_prefix_cache": False}, False),
    ],
    ids=str,
)
def test_a_request_with_prompt_logprobs_or_the_option_reads_no_prefix_cache(options, reads):
    assert SamplingParams(**options).reads_prefix_cache is reads


@pytest.mark.parametrize("kind", copies())
def test_a_copy_is_equal(kind):
    params = SamplingParams(**full())
    copied = copies()[kind](params)
    assert copied is not params
    assert type(copied) is SamplingParams
    assert copied == params


@pytest.mark.parametrize("kind", copies())
def test_a_copy_shares_nothing_with_the_original(kind):
    params = SamplingParams(**full())
    copied = copies()[kind](params)
    copied.temperature = 1.0
    copied.stop.append("b")
    copied.stop_token_ids.append(5)
    assert params == SamplingParams(**full())


def test_parameters_with_different_values_are_not_equal():
    assert SamplingParams(top_k=3) != SamplingParams(top_k=4)


def test_repr_reads_as_a_call():
    params = SamplingParams(**full())
    assert eval(repr(params)) == params


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 3), ("max_tokens", 0), ("min_tokens", 17), ("stop", [""]), ("top_k", 0.5)],
)
def test_check_finds_invalid_values_that_were_assigned_later(name, value):
    params = SamplingParams()
    setattr(params, name, value)
    with pytest.raises(RequestError, match=name):
        params.check()


def test_check_does_not_treat_a_string_assigned_to_stop_as_a_list_of_letters():
    params = SamplingParams()
    params.stop = "END"
    try:
        params.check()
    except RequestError:
        return
    assert params.stop == ["END"]


def test_a_misspelt_attribute_is_refused():
    with pytest.raises(AttributeError):
        SamplingParams().temprature = 1


def test_a_message_shows_the_beginning_of_a_long_list() -> None:
    with pytest.raises(RequestError, match="stop_token_ids") as caught:
        SamplingParams(stop_token_ids=[-1] * 1_000_000)
    assert len(str(caught.value)) < 500


def test_an_error_has_the_parameter_and_its_value():
    with pytest.raises(RequestError) as caught:
        SamplingParams(top_p=7)
    assert (caught.value.parameter, caught.value.value) == ("top_p", 7)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (str(copied), copied.parameter) == (str(caught.value), "top_p")


def test_the_signature_shows_the_fields():
    parameters = inspect.signature(SamplingParams).parameters
    assert list(parameters) == list(SamplingParams.__struct_fields__)
    assert parameters["temperature"].default == 1.0
    assert parameters["stop"].default == []


def test_none_means_the_default_for_from_optional():
    given = {"temperature": None, "top_k": 7, "stop": None, "max_tokens": None}
    assert SamplingParams.from_optional(**given) == SamplingParams(top_k=7, max_tokens=None)
    assert SamplingParams.from_optional() == SamplingParams()
    with pytest.raises(TypeError, match="nearest option is 'top_k'"):
        SamplingParams.from_optional(topk=7)


def test_parameters_of_vllm_that_change_nothing_are_accepted():
    assert SamplingParams(skip_clone=True, watermarking=False, top_k=7) == SamplingParams(top_k=7)
    assert SamplingParams.from_optional(skip_clone=False, watermarking=None) == SamplingParams()
    with pytest.raises(RequestError, match="watermarking can only be None or False: texts have"):
        SamplingParams(watermarking=True)
    with pytest.raises(TypeError, match="unknown option 'topk'"):
        SamplingParams(skip_clone=True, topk=7)
