"""Questions to the engine: what they raise comes back as text, and ends nothing."""

from __future__ import annotations

import json

import pytest
from support.fakes import FakeRunner, info

from shmllm.client import channel_client as client
from shmllm.config.engine import EngineConfig, LoadConfig, SchedulerConfig
from shmllm.engine import calls
from shmllm.engine.core import EngineCore
from shmllm.errors import CallError, RequestError
from shmllm.wire.messages import Call, Method

PLACE = 3


@pytest.fixture
def core():
    config = EngineConfig(LoadConfig("nowhere"), scheduler=SchedulerConfig(8, 64))
    return EngineCore(config, FakeRunner(info()))


def ask(core, text="null"):
    reply = calls.reply_to(core, PLACE, Call(5, Method.RESET_PREFIX_CACHE, text))
    assert reply.number == 5
    return client._content(reply)


def answer_with(monkeypatch, function):
    monkeypatch.setitem(calls._METHODS, Method.RESET_PREFIX_CACHE, function)


def test_every_method_has_an_answer():
    assert calls._METHODS.keys() == set(Method)


def test_the_answer_gets_who_asks_and_the_argument(core, monkeypatch):
    answer_with(monkeypatch, lambda core, place, argument: [place, argument])
    assert ask(core, json.dumps({"a": [1, None]})) == [PLACE, {"a": [1, None]}]


def test_a_refusal_is_a_request_error(core, monkeypatch):
    def refuse(core, place, argument):
        raise RequestError("not now")

    answer_with(monkeypatch, refuse)
    with pytest.raises(RequestError, match="not now"):
        ask(core)


def test_an_exception_comes_with_its_type_and_traceback(core, monkeypatch):
    def fail(core, place, argument):
        raise ZeroDivisionError("by zero")

    answer_with(monkeypatch, fail)
    with pytest.raises(CallError, match="ZeroDivisionError: by zero") as caught:
        ask(core)
    assert "in fail" in caught.value.remote_traceback


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_an_argument_that_is_no_json_fails_the_call_alone(core, text):
    with pytest.raises(CallError):
        ask(core, text)


def test_an_answer_that_is_no_json_value_fails_the_call_alone(core, monkeypatch):
    answer_with(monkeypatch, lambda core, place, argument: object())
    with pytest.raises(CallError, match="TypeError"):
        ask(core)
