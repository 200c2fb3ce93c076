"""The requests of `shmllm generate`: what an output of `LLM.stream` means."""

from __future__ import annotations

import pytest
from support.batch_helpers import answer

from shmllm.cli.batch import stream
from shmllm.errors import EnginePausedError


class FakeLLM:
    """Has an output for each prompt."""

    def __init__(self, *outputs):
        self._outputs = outputs

    def stream(self, prompts, params, **_):
        for place, (_, output) in enumerate(zip(prompts, self._outputs, strict=True)):
            output.prompt_index = place
            yield output


def results(*outputs):
    requests = iter([("x", None, None)] * len(outputs))
    return [output for _, output in stream(FakeLLM(*outputs), requests, True, None)]


@pytest.mark.parametrize("reason", ["abort", None])
def test_an_aborted_request_has_no_result(reason):
    first, second = answer("a"), answer("b")
    first.outputs[0].finish_reason = reason
    assert results(first, second) == [None, second]


def test_a_refused_request_has_its_error():
    first, second = answer("a"), answer("b", error="prompt 1 is empty")
    second.outputs[0].finish_reason = "error"
    assert [one.error for one in results(first, second)] == [None, "the prompt is empty"]


def test_a_paused_engine_refuses_no_row():
    paused = answer("a", error="the engine sleeps")
    paused.is_retryable = True
    with pytest.raises(EnginePausedError, match="the engine sleeps"):
        results(paused)
