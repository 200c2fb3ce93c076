"""LocalEngineClient with a fake runner: a signal handler that raises, at any line of the engine."""

from __future__ import annotations

import itertools

import pytest
from support.fakes import FakeRunner, expected_tokens, info
from support.interrupting import Moment, raising_handler

from shmllm.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from shmllm.config.load import LoadConfig
from shmllm.engine.local import LocalEngineClient
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.wire.messages import Method

MODULES = ("shmllm/engine/", "shmllm/core/")
PROMPT = [1, 2, 3]
SLEEP = {"level": 1, "mode": "keep"}


@pytest.fixture
def make_client(monkeypatch):
    def make():
        config = EngineConfig(LoadConfig("nowhere"), CacheConfig(), SchedulerConfig(8, 64))
        client = LocalEngineClient(config)
        client.wait_ready()
        return client

    monkeypatch.setattr(
        "shmllm.worker.make_runner.make_runner", lambda *_: FakeRunner(info(num_blocks=64))
    )
    return make


def run(client):
    """Poll until the request has ended. Returns its tokens."""
    tokens = []
    for _ in range(50):
        events = client.poll(1.0)
        for columns in events:
            tokens += columns.token_ids
        is_finished = any(columns.finishes[-1] for columns in events)
        events.clear()
        if is_finished:
            return tokens
    raise AssertionError("the request never ended")


def test_an_interrupted_step_is_applied(make_client):
    with raising_handler():
        for number in itertools.count(1):
            client = make_client()
            client.add(EngineCoreRequest(5, PROMPT, SamplingParams(max_tokens=4)))
            moment = Moment(number, MODULES)
            moment.call(lambda client=client: client.poll(1.0))
            assert run(client) == expected_tokens(PROMPT, 4), moment.where
            if moment.where is None:
                break
    assert number > 100


def test_an_interrupted_sleep_is_complete_or_has_not_begun(make_client):
    with raising_handler():
        for number in itertools.count(1):
            client = make_client()
            moment = Moment(number, MODULES)
            moment.call(lambda client=client: client.call(Method.SLEEP, SLEEP))
            is_asleep = bool(client.stats()["asleep"])
            assert is_asleep == bool(client._runner.memory.calls), moment.where
            if moment.where is None:
                break
    assert number > 20
