"""A front end that does not read its outputs delays no other, and is cut off in the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engines import named_engine
from support.programs import kill, read_line, result_of, run_source, start_source
from support.waiting import PATIENCE_S, wait_until

from shmllm import LLM, SamplingParams
from shmllm.errors import CallOrderError
from shmllm.ipc import registry
from shmllm.wire.messages import Method

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

ENGINE_PATIENCE_S = 4.0
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = ("import os\n", "def main():\n", "x = ")

# It asks for much, reads nothing until its output ring is full, and then stops.
SLOW = """
import json, os, signal, sys, time
from shmllm import LLM, EngineDeadError, SamplingParams
from shmllm.frontend.request_group import RequestGroup
from shmllm.wire import codec
from shmllm.params.request import EngineCoreRequest
from shmllm.wire.messages import RecordKind
llm = LLM.attach(sys.argv[1])
channel = llm._client._channel
long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
group, dispatcher = RequestGroup(), llm._dispatcher
refused = codec.encode_add(EngineCoreRequest(10**9, [10**6], long))
deadline = time.monotonic() + 60
def fill_to(limit):
    outputs, requests = channel.outputs, channel.requests
    while outputs._load_published() - outputs._position < limit:
        # Few at a time: answers to those under way must not fill more than the limit.
        if requests.position - requests.consumed_position < 4096:
            channel.try_send(RecordKind.ADD, *refused)
        assert time.monotonic() < deadline, "the ring does not fill"
# Refusals fill the ring almost: the outputs of requests are more than the rest, so that none ends.
fill_to(480_000)
states = [dispatcher.submit(group, request, i)[0]
          for i, request in enumerate(llm.front_end.prepare(["import os"] * 4, long))]
fill_to(523_000)
print("full", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
found = {"tokens": {}, "error": None}
try:
    while len(found["tokens"]) < len(states):
        dispatcher.collect(group, 1.0)
        for state in states:
            if state.finish_reason:
                found["tokens"][state.index] = list(state.token_ids)
except EngineDeadError as error:
    found["error"] = str(error)
llm.close()
print(json.dumps(found))
"""
WHOLE = """
import json, sys
from shmllm import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
with LLM.attach(sys.argv[1]) as llm:
    print(json.dumps(llm.generate("import os", params, use_tqdm=False)[0].outputs[0].token_ids))
"""


@pytest.fixture
def slow() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts the slow front end and returns when it has stopped itself."""
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str) -> subprocess.Popen[bytes]:
        client = start_source(SLOW, name)
        started.append(client)
        assert read_line(client) == b"full\n"
        stat = Path(f"/proc/{client.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it stops")
        return client

    yield start
    for client in started:
        kill(client)


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(list(PROMPTS), GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def go_on(client: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Continue the stopped front end; return what it reports at its end."""
    os.kill(client.pid, signal.SIGCONT)
    found, _ = client.communicate(timeout=PATIENCE_S)
    assert client.returncode == 0
    return dict(json.loads(found))


def test_a_stopped_front_end_is_cut_off_and_the_others_go_on(
    tmp_path: Path, slow: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    with (
        named_engine(tmp_path, client_timeout=ENGINE_PATIENCE_S) as (name, _),
        LLM.attach(name) as other,
    ):
        expected = tokens(other)
        client = slow(name)
        segment = registry.client_path(name, 1)
        assert segment.exists()
        assert other.get_metrics()["running"] + other.get_metrics()["waiting"] > 0
        turns = 0
        deadline = time.monotonic() + PATIENCE_S
        while other.get_metrics()["running"] + other.get_metrics()["waiting"] > 0:
            assert tokens(other) == expected
            turns += 1
            time.sleep(0.1)
            assert time.monotonic() < deadline, "it was never cut off"
        assert turns > 1, "the others waited for the stopped one"
        found = go_on(client)
        assert "did not read its outputs in time" in found["error"]
        assert tokens(other) == expected
        assert not segment.exists(), "it leaves its segment when it learns of its end"
        with LLM.attach(name) as another:
            assert tokens(another) == expected


@pytest.mark.slow
def test_a_front_end_that_wakes_up_in_time_has_lost_nothing(
    tmp_path: Path, slow: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    with (
        named_engine(tmp_path, client_timeout=PATIENCE_S) as (name, _),
        LLM.attach(name) as other,
    ):
        whole = result_of(run_source(WHOLE, name))
        expected = tokens(other)
        client = slow(name)
        for _ in range(3):
            assert tokens(other) == expected
        found = go_on(client)
        assert found == {"error": None, "tokens": {str(i): whole for i in range(4)}}
        assert tokens(other) == expected


# It stops while the engine does what others do not want to last.
HOLDS = """
import os, signal, sys
from shmllm import LLM
from shmllm.wire.messages import Method
llm = LLM.attach(sys.argv[1])
match sys.argv[2]:
    case "pause":
        llm.pause_generation("keep")
    case "weights":
        llm._client.call(Method.START_WEIGHTS)
    case "sleep":
        llm.sleep(1)
print("holds", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with named_engine(tmp_path_factory.mktemp("impatient"), client_timeout=0.5) as (name, _):
        yield name


@pytest.fixture
def holder(impatient: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The engine, for which a front end does something and then stops."""
    client = start_source(HOLDS, impatient, request.param)
    try:
        assert read_line(client) == b"holds\n"
        stat = Path(f"/proc/{client.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it stops")
        yield impatient
    finally:
        kill(client)
    # The engine removes only names of the dead, and this one was dismissed alive.
    wait_until(lambda: registry.sweep(registry.client_path(impatient, 0)), "its place is free")


@pytest.mark.parametrize("holder", ["pause"], indirect=True)
def test_a_stopped_front_end_does_not_pause_the_others_for_ever(holder: str) -> None:
    with LLM.attach(holder) as other:
        assert len(tokens(other)) == len(PROMPTS)


@pytest.mark.parametrize("holder", ["weights"], indirect=True)
def test_a_stopped_front_end_does_not_keep_the_others_from_new_weights(holder: str) -> None:
    with LLM.attach(holder) as other:

        def starts() -> bool:
            try:
                other._client.call(Method.START_WEIGHTS)
            except CallOrderError:
                return False
            return True

        wait_until(starts, "the update of the stopped front end ends")
        other._client.call(Method.ABANDON_WEIGHTS)


@pytest.mark.parametrize("holder", ["sleep"], indirect=True)
def test_another_front_end_wakes_what_a_stopped_one_put_to_sleep(holder: str) -> None:
    with LLM.attach(holder) as other:
        other.wake_up()
        assert len(tokens(other)) == len(PROMPTS)
