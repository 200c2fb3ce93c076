"""Calls of engine methods: their exceptions are returned as text and do not end the engine."""

from __future__ import annotations

import json

import pytest
from support.fakes import FakeRunner, info

from shmllm.client.rpc_client import content_of
from shmllm.config.engine import EngineConfig, SchedulerConfig
from shmllm.config.load import LoadConfig
from shmllm.engine import calls
from shmllm.engine.core import EngineCore
from shmllm.errors import CallError, RequestError
from shmllm.wire.messages import Call, Method

PLACE = 3


@pytest.fixture
def core():
    config = EngineConfig(LoadConfig("nowhere"), scheduler=SchedulerConfig(8, 64))
    return EngineCore(config, FakeRunner(info()))


def call(core, text="null"):
    reply = calls.reply_to(core, PLACE, Call(5, Method.RESET_PREFIX_CACHE, text))
    assert reply.number == 5
    return content_of(reply)


def replace_method(monkeypatch, function):
    monkeypatch.setitem(calls._METHODS, Method.RESET_PREFIX_CACHE, function)


def test_every_method_has_a_function():
    assert calls._METHODS.keys() == set(Method)


def test_a_function_gets_the_front_end_and_the_argument(core, monkeypatch):
    replace_method(monkeypatch, lambda core, place, argument: [place, argument])
    assert call(core, json.dumps({"a": [1, None]})) == [PLACE, {"a": [1, None]}]


def test_a_refusal_is_a_request_error(core, monkeypatch):
    def refuse(core, place, argument):
        raise RequestError("not now")

    replace_method(monkeypatch, refuse)
    with pytest.raises(RequestError, match="not now"):
        call(core)


def test_failures_are_described_for_the_error_log_and_refusals_are_not(core, monkeypatch):
    def raising(error):
        def work():
            raise error

        return calls.reply_with(1, work)

    refusal, failure = RequestError("not now"), ZeroDivisionError("by zero")
    assert calls.failure_of(calls.reply_with(1, lambda: "null"), Method.PAUSE) == ""
    assert calls.failure_of(raising(refusal), Method.PAUSE) == ""
    assert calls.failure_of(raising(refusal)) == ""
    text = "failed: ZeroDivisionError: by zero"
    assert calls.failure_of(raising(failure), Method.PAUSE) == f"PAUSE {text}"
    assert calls.failure_of(raising(failure)) == f"a call of the worker {text}"
    lost = calls.failure_of(raising(refusal), Method.FINISH_WEIGHTS)
    assert lost == "FINISH_WEIGHTS failed: RequestError: not now"


def test_an_exception_is_returned_with_its_type_and_traceback(core, monkeypatch):
    def fail(core, place, argument):
        raise ZeroDivisionError("by zero")

    replace_method(monkeypatch, fail)
    with pytest.raises(CallError, match="ZeroDivisionError: by zero") as caught:
        call(core)
    assert "in fail" in caught.value.remote_traceback


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_an_argument_that_is_not_json_fails_only_the_call(core, text):
    with pytest.raises(CallError):
        call(core, text)


def test_a_result_that_is_not_a_json_value_fails_only_the_call(core, monkeypatch):
    replace_method(monkeypatch, lambda core, place, argument: object())
    with pytest.raises(CallError, match="TypeError"):
        call(core)
