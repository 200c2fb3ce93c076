"""shmllm's own format: the request of a row, and the fields of its record."""

from __future__ import annotations

import base64
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
from support.batch_helpers import answer

from shmllm.batch.native import NativeFormat
from shmllm.batch.rows import Row
from shmllm.outputs import SamplingMask
from shmllm.outputs.request import CompletionOutput
from shmllm.params.sampling import SamplingParams

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}


def row(fields, **options):
    return NativeFormat(**options).row(3, fields)


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"prompt": "a"}, "a"),
        ({"prompt": ""}, ""),
        ({"messages": [USER]}, [USER]),
        ({"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [1, 2]}),
        ({"prompt": "a", "cache_salt": "s"}, {"prompt": "a", "cache_salt": "s"}),
        (
            {"prompt": "a", "prompt_token_ids": [1]},
            {"prompt": "a", "prompt_token_ids": [1]},
        ),
    ],
)
def test_the_prompt_of_a_row(fields, prompt):
    found = row(fields)
    assert found.error is None
    assert found.prompt == prompt
    assert found.line == 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "none of 'prompt', 'messages', 'prompt_token_ids' is given"),
        ({"prompt": 5}, "'prompt' must be a string, got 5"),
        ({"prompt": None}, "'prompt' must be a string, got null"),
        ({"prompt": ["a", "b"]}, "'prompt' must be a string, got ["),
        ({"messages": "hi"}, "'messages' must be a list, got \"hi\""),
        ({"prompt_token_ids": "1"}, "'prompt_token_ids' must be a list"),
        ({"prompt": "a", "messages": [USER]}, "'prompt' and 'messages' are both given"),
        ({"messages": [USER], "prompt_token_ids": [1]}, "are both given; give one"),
        ({"messages": [USER], "cache_salt": "s"}, "'cache_salt' cannot be used with 'messages'"),
        ({"prompt": "a", "sampling_params": 5}, "'sampling_params' must be an object, got 5"),
        ({"prompt": "a", "sampling_params": None}, "'sampling_params' must be an object"),
    ],
)
def test_the_record_of_an_invalid_row_keeps_its_id_and_fields(fields, words):
    found = row(fields | {"id": "x", "split": "train"})
    assert words in (found.error or "")
    assert NativeFormat().failure(found, found.error) == {
        "id": "x",
        "line": 3,
        "error": found.error,
        "split": "train",
    }


@pytest.mark.parametrize(
    ("fields", "options", "prompt"),
    [
        ({"prompt": "hi"}, {"chat": True}, [USER]),
        ({"prompt": "hi"}, {"system": "be brief"}, [SYSTEM, USER]),
        ({"messages": [USER]}, {"system": "be brief"}, [SYSTEM, USER]),
    ],
)
def test_chat_turns_prompts_into_messages(fields, options, prompt):
    assert row(fields, **options).prompt == prompt


@pytest.mark.parametrize("fields", [{"prompt_token_ids": [1]}, {"prompt": "a", "cache_salt": "s"}])
def test_token_ids_and_salt_cannot_be_used_with_chat(fields):
    assert "chat" in (row(fields, chat=True).error or "")


def test_a_record_has_id_result_and_copied_fields_in_this_order():
    found = row({"id": "x", "prompt": "abc", "split": "train", "m": None})
    record = NativeFormat().record(found, answer("abc", num_cached_tokens=2))
    assert list(record.items()) == [
        ("id", "x"),
        ("line", 3),
        ("text", "cba"),
        ("finish_reason", "stop"),
        ("num_prompt_tokens", 3),
        ("num_output_tokens", 3),
        ("num_cached_tokens", 2),
        ("split", "train"),
        ("m", None),
    ]


@pytest.mark.parametrize("identity", [0, "", None, 7, [1, {"a": 2}]], ids=repr)
def test_the_record_has_the_row_s_id_or_none(identity):
    form = NativeFormat()
    assert form.record(row({"id": identity, "prompt": "a"}), answer("a"))["id"] == identity
    assert "id" not in form.record(row({"prompt": "a"}), answer("a"))


def test_a_copied_field_with_a_result_s_name_gets_a_prefix():
    fields = {"prompt": "abc", "text": "mine", "line": 9, "input_line": 8, "error": "old"}
    record = NativeFormat().record(row(fields), answer("abc"))
    assert record["text"] == "cba"
    assert record["line"] == 3
    assert record["input_text"] == "mine"
    assert record["input_line"] == 8
    assert record["input_input_line"] == 9
    assert record["input_error"] == "old"
    assert "error" not in record


def test_the_output_of_a_job_can_be_the_input_of_the_next():
    form = NativeFormat()
    first = form.record(row({"id": 1, "prompt": "abc", "k": 1}), answer("abc"))
    second = form.record(row(first | {"prompt": "de"}), answer("de"))
    assert second["text"] == "ed"
    assert second["input_text"] == "cba"
    assert second["k"] == 1


def test_sampling_parameters_may_stand_beside_the_prompt():
    found = row(
        {"prompt": "a", "max_tokens": 3, "stop": "x", "seed": None, "temprature": 1}
        | {"sampling_params": {"top_k": 4}}
    )
    assert found.error is None
    assert found.sampling == {"top_k": 4, "max_tokens": 3, "stop": "x"}
    assert found.carried == {"temprature": 1}


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_every_sampling_parameter_is_one_and_is_not_copied(name):
    found = row({"prompt": "a", name: 1})
    assert found.sampling == {name: 1}
    assert found.carried == {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 2, "sampling_params": {"n": 2}}, "'n' is also in 'sampling_params'; give one"),
        ({"max_new_tokens": 9}, "'max_new_tokens' is 'max_tokens' here"),
        ({"guided_json": {}}, "'guided_json' is 'structured_outputs' here"),
    ],
)
def test_a_parameter_given_twice_or_under_another_name_is_refused(fields, message):
    assert row({"prompt": "a"} | fields).error == message


@pytest.mark.parametrize("name", ["multi_modal_data", "mm_processor_kwargs"])
def test_items_under_the_names_of_prompts_in_python_are_refused(name):
    found = row({"prompt": "a", name: {"image": "a.png"}})
    assert found.error.startswith(
        f"'{name}' is not read from rows: the lists images, audio, videos"
    )
    assert row({"prompt": "a", name: None}).error is None


def test_log_probabilities_of_an_earlier_job_are_not_a_parameter():
    found = row({"prompt": "a", "logprobs": [[{"token_id": 1}]], "prompt_logprobs": [None]})
    assert found.sampling == {}
    assert set(found.carried) == {"input_logprobs", "input_prompt_logprobs"}


def test_a_table_may_hold_objects_as_json():
    fields = {"prompt": "a", "logit_bias": '{"5": 1}', "structured_outputs": {"regex": "a"}}
    found = row(fields, texts_are_json=True)
    assert found.sampling == {"logit_bias": {"5": 1}, "structured_outputs": {"regex": "a"}}
    broken = row({"prompt": "a", "logit_bias": "{"}, texts_are_json=True)
    assert "'logit_bias' is not JSON" in (broken.error or "")


def test_options_add_prompt_and_token_ids():
    record = NativeFormat(echo=True, token_ids=True).record(row({"prompt": "ab"}), answer("ab"))
    assert record["prompt"] == "ab"
    assert record["token_ids"] == [97, 98]


def test_routed_experts_are_the_base64_of_an_npy_file():
    output = answer("a")
    output.outputs[0].routed_experts = experts = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
    text = NativeFormat().record(row({"prompt": "a"}), output)["routed_experts"]
    read = np.load(io.BytesIO(base64.b64decode(text)))
    assert read.dtype == np.uint8
    assert np.array_equal(read, experts)


def test_sampling_masks_are_lists_of_token_ids():
    output = answer("ab")
    output.outputs[0].sampling_mask = SamplingMask([[97, 99], [98]])
    assert NativeFormat().record(row({"prompt": "a"}), output)["sampling_mask"] == [[97, 99], [98]]


def test_logprobs_are_lists_of_entries_with_the_sampled_token_first():
    output = answer("ab")
    entry = SimpleNamespace(logprob=-0.5, rank=2, decoded_token="a")
    other = SimpleNamespace(logprob=-0.25, rank=1, decoded_token="b")
    output.outputs[0].logprobs = [{97: entry, 98: other}, {98: other}]
    output.prompt_logprobs = [None, {98: other}]
    record = NativeFormat().record(row({"prompt": "ab"}), output)
    b = {"token_id": 98, "token": "b", "logprob": -0.25, "rank": 1}
    a = {"token_id": 97, "token": "a", "logprob": -0.5, "rank": 2}
    assert record["logprobs"] == [[a, b], [b]]
    assert record["prompt_logprobs"] == [None, [b]]
    json.dumps(record)


def test_a_record_holds_all_completions():
    output = answer("ab")
    output.outputs.append(CompletionOutput(1, "zz", [1, 2, 3], finish_reason="length"))
    record = NativeFormat().record(row({"prompt": "ab"}), output)
    assert record["text"] == "ba"
    assert record["num_output_tokens"] == 5
    assert [one["text"] for one in record["outputs"]] == ["ba", "zz"]
    assert record["outputs"][1]["finish_reason"] == "length"


def test_columns_may_hold_lists_and_objects_as_json_text():
    fields = {"messages": json.dumps([USER]), "sampling_params": '{"seed": 1}'}
    found = row(fields, texts_are_json=True)
    assert found.error is None
    assert (found.prompt, found.sampling) == ([USER], {"seed": 1})
    broken = row({"prompt": "a", "sampling_params": "{"}, texts_are_json=True)
    assert "'sampling_params' is not JSON" in (broken.error or "")


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({"line": 4, "text": ""}, 4),
        ({"line": 4, "error": "x"}, 4),
        ({"line": 0, "text": ""}, None),
        ({"line": "4", "text": ""}, None),
        ({"line": 4}, None),
        ({"prompt": "a"}, None),
    ],
)
def test_only_records_have_a_line(record, line):
    assert NativeFormat().line_of(record) == line


@pytest.mark.parametrize("failed", [False, True])
def test_row_and_record_share_a_tag(failed):
    form = NativeFormat(echo=True, token_ids=True)
    found = row({"id": "x", "prompt": "a", "split": "train", "text": "t"})
    record = form.failure(found, "no") if failed else form.record(found, answer("a"))
    assert form.tag_of_record(record) == form.tag_of_row(found)
    other = row({"id": "y", "prompt": "a", "split": "train", "text": "t"})
    assert form.tag_of_row(other) != form.tag_of_row(found)


def test_the_record_of_a_plain_line_holds_its_prompt():
    found = NativeFormat().text_row(5, 2, "abc")
    record = NativeFormat().record(found, answer("abc"))
    assert (record["line"], record["index"], record["prompt"]) == (5, 2, "abc")
    assert NativeFormat(chat=True).text_row(5, 2, "hi").prompt == [USER]
    assert NativeFormat().tag_of_row(found) == NativeFormat().tag_of_record(record)


def test_the_record_of_an_unreadable_row_holds_its_line():
    assert NativeFormat().failure(Row(8), "not JSON") == {"line": 8, "error": "not JSON"}


@pytest.mark.parametrize(
    ("fields", "images"),
    [
        ({"prompt": "a", "images": ["a.png", "data:image/png;base64,AA=="]}, ["a.png", "data:"]),
        ({"prompt_token_ids": [1], "images": ["a.png"]}, ["a.png"]),
        ({"prompt": "a", "images": []}, []),
        ({"prompt": "a", "images": None}, []),
        ({"messages": [USER], "images": None}, []),
    ],
)
def test_images_beside_a_prompt(fields, images):
    found = row(fields)
    assert found.error is None
    assert [
        name[: len(start)] for name, start in zip(found.items.get("image", []), images, strict=True)
    ] == images
    assert "images" not in found.carried


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": "a", "images": "a.png"}, "'images' must be a list, got \"a.png\""),
        ({"prompt": "a", "images": [3]}, "'images' must be a list of paths and data URLs"),
        ({"prompt": "a", "images": [""]}, "'images' must be a list of paths and data URLs"),
        ({"messages": [USER], "images": ["a.png"]}, "cannot be used with 'messages'"),
    ],
)
def test_what_is_no_list_of_images_is_an_error_of_the_row(fields, words):
    assert words in row(fields).error


def test_images_of_a_table_may_be_json():
    assert row({"prompt": "a", "images": '["a.png"]'}, texts_are_json=True).items == {
        "image": ["a.png"]
    }
