"""RequestOutput: the arguments that its constructor takes."""

from __future__ import annotations

import inspect
import pickle

import pytest

from shmllm import CompletionOutput, RequestOutput

FIELDS = {
    "request_id": "7",
    "prompt": "a",
    "prompt_token_ids": [1],
    "prompt_logprobs": None,
    "outputs": [],
    "finished": True,
}


def test_arguments_of_a_later_version_are_ignored_with_one_warning(caplog):
    outputs = [RequestOutput(**FIELDS, added_later=i) for i in range(2)]
    assert outputs == [RequestOutput(**FIELDS)] * 2
    assert caplog.text.count("RequestOutput: ignores the unknown arguments added_later") == 1


def test_a_missing_argument_is_an_error():
    with pytest.raises(TypeError, match="missing 5 required"):
        RequestOutput("7")
    with pytest.raises(TypeError, match="missing 1 required"):
        RequestOutput("7", None, [1], None, [], added_later=1)


def test_the_signature_shows_the_fields_and_a_copy_is_equal():
    assert list(inspect.signature(RequestOutput).parameters)[:6] == list(FIELDS)
    output = RequestOutput(**FIELDS)
    assert pickle.loads(pickle.dumps(output)) == output


def test_the_order_of_arguments_is_that_of_vllm() -> None:
    output = RequestOutput("7", "text", [1, 2], [None, {}], [], True)
    assert (output.prompt_logprobs, output.outputs, output.finished) == ([None, {}], [], True)


def test_programs_may_add_attributes() -> None:
    output = RequestOutput(**FIELDS)
    completion = CompletionOutput(0, "a", [1])
    output.is_finished, completion.delta_text = True, "a"
    assert vars(output)["is_finished"]
    assert vars(completion)["text"] == completion.delta_text
