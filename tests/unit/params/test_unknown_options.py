"""The error for an unknown option names what replaced it, or the most similar known one."""

from __future__ import annotations

import pytest

from shmllm import LLM
from shmllm.config.engine import OPTIONS
from shmllm.params.replaced_names import REPLACED_NAMES
from shmllm.params.sampling import SamplingParams
from shmllm.params.unknown_options import reject_unknown_options

KNOWN = ["temperature", "top_p", "max_tokens", "stop"]


@pytest.mark.parametrize("given", [[], ["stop"], KNOWN])
def test_known_options_pass(given):
    reject_unknown_options("f", given, KNOWN)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("max_token", "max_tokens"), ("temp", "temperature"), ("topp", "top_p"), ("stops", "stop")],
)
def test_an_unknown_option_names_callee_option_and_nearest(given, nearest):
    words = rf"f\(\) got an unknown option '{given}'; the nearest option is '{nearest}'"
    with pytest.raises(TypeError, match=words):
        reject_unknown_options("f", [given], KNOWN)


def test_a_name_that_is_similar_to_none_still_gets_a_suggestion():
    with pytest.raises(TypeError, match="the nearest option is"):
        reject_unknown_options("f", ["qqq"], KNOWN)


def test_the_first_unknown_of_several_is_named():
    with pytest.raises(TypeError, match="'zeta'"):
        reject_unknown_options("f", ["stop", "zeta", "alpha"], KNOWN)


def test_without_known_options_there_is_no_suggestion():
    with pytest.raises(TypeError) as error:
        reject_unknown_options("f", ["x"], [])
    assert str(error.value) == "f() got an unknown option 'x'"


def test_known_names_may_be_a_generator():
    reject_unknown_options("f", ["stop", "top_p"], (name for name in KNOWN))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("best_of", "use n, and choose"),
        ("guided_json", "use structured_outputs=StructuredOutputsParams(json=...)"),
        ("use_beam_search", "use LLM.beam_search"),
        ("logits_processors", "name their classes"),
    ],
)
def test_an_old_name_of_vllm_says_what_replaced_it(old, new):
    with pytest.raises(TypeError) as caught:
        SamplingParams(**{old: 1})
    assert f"unknown option {old!r}; {new}" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [("max_seq_len_to_capture", "use compilation_config"), ("rope_scaling", "change config.json")],
)
def test_so_does_an_old_option_of_an_engine(old, new):
    with pytest.raises(TypeError, match=rf"LLM\(\) got an unknown option '{old}'; {new}"):
        LLM(**{old: 1})


def test_no_option_that_is_known_counts_as_replaced():
    known = {*SamplingParams.__struct_fields__, *(each.name for each in OPTIONS)}
    moved = {"logits_processors"}  # from SamplingParams to the options
    assert known & REPLACED_NAMES.keys() == moved
    assert moved.isdisjoint(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"structured_outputs": {"jsn": {}}},
            r"StructuredOutputsParams\(\) .* 'jsn'; the nearest option is 'json'",
        ),
        ({"structured_outputs": {5: 1}}, r"StructuredOutputsParams\(\) .* '5'"),
        (
            {"repetition_detection": {"min_cont": 2}},
            r"RepetitionDetectionParams\(\) .* 'min_cont'; the nearest option is 'min_count'",
        ),
    ],
)
def test_keys_of_mappings_are_options(given, message):
    with pytest.raises(TypeError, match=message):
        SamplingParams(**given)
