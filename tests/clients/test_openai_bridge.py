"""examples/openai_bridge.py, asked by OpenAI's client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from support.client_helpers import needs
from support.engines import assert_unused, named_engine, stats_of
from support.programs import ROOT, environment, free_port, kill, python, watched
from support.waiting import PATIENCE_S, wait_until

pytestmark = [
    pytest.mark.clients,
    pytest.mark.process,
    pytest.mark.usefixtures("no_leaks"),
    needs("openai", "starlette", "uvicorn"),
]

BRIDGE = ROOT / "examples" / "openai_bridge.py"
ASK = [{"role": "user", "content": "def fibonacci(n):"}]
GREEDY: dict[str, Any] = {"model": "any", "messages": ASK, "temperature": 0, "max_tokens": 12}
ENDLESS: dict[str, Any] = GREEDY | {"max_tokens": 900, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with named_engine(tmp_path_factory.mktemp("engine")) as (name, _):
        yield name


@pytest.fixture(scope="module")
def client(engine: str) -> Iterator[Any]:
    """A client of a bridge to the engine."""
    import openai

    port = free_port()
    bridge = subprocess.Popen(
        [sys.executable, str(BRIDGE), "--attach", engine, "--port", str(port)],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    try:
        with watched(bridge):
            assert bridge.stderr is not None
            lines = iter(bridge.stderr.readline, "")
            assert any(f"http://127.0.0.1:{port}" in line for line in lines)
        yield openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key="none",
            max_retries=0,
            timeout=PATIENCE_S,
        )
        bridge.terminate()
        assert bridge.wait(PATIENCE_S) in (0, -15)
        assert_unused(engine)
    finally:
        kill(bridge)


def test_a_streamed_answer_has_the_text_of_a_whole_one(client: Any, engine: str) -> None:
    whole = client.chat.completions.create(**GREEDY)
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    assert whole.model == engine
    chunks = list(client.chat.completions.create(**GREEDY, stream=True))
    assert len(chunks) > 1
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_the_model_is_listed(client: Any, engine: str) -> None:
    assert [model.id for model in client.models.list()] == [engine]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": 3}, "temperature must be"),
        ({"messages": []}, "messages"),
        ({"extra_body": {"max_token": 3}}, "'max_token'; the nearest is 'max_tokens'"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_a_bad_request_is_an_error_of_the_client(
    client: Any, changes: dict[str, Any], words: str, stream: bool
) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**GREEDY | changes, stream=stream)
    assert words in caught.value.body["message"]
    assert caught.value.body["type"] == "invalid_request_error"


def test_a_body_that_is_not_json_is_an_error_of_the_same_shape(client: Any) -> None:
    with pytest.raises(HTTPError) as caught:
        urlopen(f"{client.base_url}chat/completions", data=b"{", timeout=PATIENCE_S)
    with caught.value as answer:
        assert answer.code == 400
        assert json.load(answer)["error"]["type"] == "invalid_request_error"


def test_a_request_ends_when_its_client_leaves_a_stream(client: Any, engine: str) -> None:
    stream = client.chat.completions.create(**ENDLESS, stream=True)
    next(iter(stream))
    stream.close()
    wait_until(lambda: stats_of(engine)["running"] == 0, "the request has ended")
    assert client.chat.completions.create(**GREEDY).choices[0].finish_reason == "length"


def test_a_request_ends_when_its_client_does_not_wait(client: Any, engine: str) -> None:
    import openai

    before = stats_of(engine)["generated_tokens"]
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).chat.completions.create(**ENDLESS)
    wait_until(lambda: stats_of(engine)["running"] == 0, "the request has ended")
    assert stats_of(engine)["generated_tokens"] < before + 900


def test_without_its_extra_it_is_one_line_that_names_it(tmp_path: Path) -> None:
    hidden = "import runpy, sys; sys.modules['starlette'] = None; "
    done = python("-c", f"{hidden}runpy.run_path({str(BRIDGE)!r}, run_name='__main__')")
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert "bridge" in line
    assert "pip install starlette uvicorn" in line


def test_an_engine_that_does_not_run_is_one_line() -> None:
    done = python(str(BRIDGE), "--attach", f"nobody-{os.getpid()}")
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert "is not running" in line
