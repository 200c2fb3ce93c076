"""What other processes see of an engine and its front ends: errors, loaned slots, states."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.commands import command
from support.engines import assert_unused
from support.programs import Completed, kill, read_line, start_source
from support.waiting import wait_until

from shmllm import LLM, CallError, EngineDeadError, EngineStartError, SamplingParams
from shmllm.client.attached import AttachedEngineClient
from shmllm.ipc import layout, registry
from shmllm.ipc.client_channel import ClientChannel
from shmllm.ipc.client_state import HUNG_AFTER_S, client_state
from shmllm.ipc.control import ControlPage
from shmllm.ipc.core_channel import CoreChannel
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import EngineState, SegmentKind
from shmllm.ipc.wait import WaitPolicy
from shmllm.ipc.words import Word
from shmllm.monitor.find import open_segment

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
FRONT_END = """
import sys, time
from shmllm.client.attached import AttachedEngineClient
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
client = AttachedEngineClient(sys.argv[1])
client.wait_ready()
client.add(EngineCoreRequest(0, [5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True)))
if sys.argv[2] != "hung":
    while not any(any(getattr(event, "finishes", ())) for event in client.poll(0.05)):
        pass
print(client._place, flush=True)
while sys.argv[2] == "active":
    client.poll(0.05).clear()
time.sleep(600)
"""


def shmllm(*arguments: str) -> Completed:
    return command(*arguments)


def output_of(*arguments: str) -> str:
    done = shmllm(*arguments)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


class OwnEngine:
    """The segments of an engine and of one front end, of which this process is both."""

    def __init__(self, stack: ExitStack) -> None:
        self.name = f"test-observing-{os.getpid()}"
        path = registry.control_path(self.name)
        self.control = stack.enter_context(Segment.create(SegmentKind.CONTROL))
        self.control.take_ownership()
        self.page = ControlPage(self.control)
        stack.callback(self.page.close)
        self.page.set_state(EngineState.READY)
        assert registry.publish(self.control, path)
        stack.callback(path.unlink, missing_ok=True)
        client = stack.enter_context(Segment.create(SegmentKind.CLIENT))
        client.take_ownership()
        place = registry.claim_place(client, self.name)
        stack.callback(registry.withdraw, client, registry.client_path(self.name, place))
        self.front = ClientChannel(self.control, client, WaitPolicy.named("idle"))
        stack.callback(self.front.close)
        self.core = CoreChannel(self.control, client)
        stack.callback(self.core.close)

    def die(self) -> None:
        """Leave the engine's segment as the kernel does after a kill."""
        self.page.close()
        self.front.close()
        self.core.close()
        self.control.close()


@pytest.fixture
def own() -> Iterator[OwnEngine]:
    with ExitStack() as stack:
        yield OwnEngine(stack)


def test_the_errors_of_an_engine_are_a_table_with_the_latest_last(own: OwnEngine) -> None:
    empty = shmllm("engine", "errors", own.name)
    assert (empty.returncode, empty.stdout) == (0, b"")
    assert empty.stderr.decode() == f"engine '{own.name}' has recorded no error\n"
    for text in ("front end 12 was slow", "no room", "front end 3 was slow", "\x1b[2Jé"):
        own.page.errors.record(text)
    header, *rows = output_of("engine", "errors", own.name).splitlines()
    assert header.split() == ["last", "first", "count", "text"]
    found = [re.fullmatch(rf"{TIME}  {TIME}  (\d) +(.*)", row) for row in rows]
    assert [match and match.groups() for match in found] == [
        ("1", "no room"),
        ("2", "front end 3 was slow"),
        ("1", "?[2Jé"),
    ]
    records = json.loads(output_of("engine", "errors", own.name, "--json"))
    assert [list(record) for record in records] == [["text", "count", "first_ns", "last_ns"]] * 3
    assert records[1]["first_ns"] < records[0]["last_ns"] < records[1]["last_ns"]
    assert "  " + rows[1][:19] in output_of("ipc", "inspect", own.name)


def test_the_errors_of_a_dead_engine_are_shown_while_its_segment_exists(own: OwnEngine) -> None:
    own.page.errors.record("the last one")
    own.die()
    assert "the last one" in output_of("engine", "errors", own.name)
    registry.control_path(own.name).unlink()
    gone = shmllm("engine", "errors", own.name)
    assert gone.returncode == 2
    assert gone.stderr.decode().startswith(f"shmllm: no engine '{own.name}' runs or has died here")


def test_loaned_slots_are_shown_with_their_holder_and_age(own: OwnEngine) -> None:
    name = f"{own.name}.0"
    assert "loaned slots: none" in output_of("ipc", "inspect", name)
    request, output = own.front.slots.claim(1000), own.core.output_slots.claim(300_000)
    assert request is not None
    assert output is not None
    me = os.getpid()

    def inspected() -> list[str]:
        lines = output_of("ipc", "inspect", name).splitlines()
        begin = lines.index("loaned slots:") + 1
        return [re.sub(r"\d+\.\d s", "N s", line.strip()) for line in lines[begin : begin + 2]]

    assert inspected() == [
        f"request slot 0: claimed, up to 262144 bytes, held by front end {me} for N s",
        f"output slot 16: claimed, up to 4194304 bytes, held by engine {me} for N s",
    ]
    ref = request.publish()
    output.publish()
    assert inspected() == [
        f"request slot 0: published, not released, 1000 bytes, held by engine {me} for N s",
        f"output slot 16: published, not released, 300000 bytes, held by front end {me} for N s",
    ]
    own.core.slots.release(ref)
    assert row_of("ipc", "ls", name)["slots"] == 1


def row_of(group: str, command: str, name: str) -> dict[str, Any]:
    records = json.loads(output_of(group, command, "--json"))
    return dict(next(record for record in records if record["name"] == name))


@pytest.fixture
def name(engine: str) -> Iterator[str]:
    """A running engine, which the test must leave unused."""
    yield engine
    assert_unused(engine)


def test_a_front_end_that_is_cut_off_learns_the_reason_and_the_others_too(name: str) -> None:
    with LLM.attach(name) as bad, LLM.attach(name) as other:
        place = bad._client._place  # type: ignore[attr-defined]
        bad._client._channel.try_send(4711, b"nonsense")  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError, match=r"sent invalid messages: .*4711"):
            bad.generate("x", SamplingParams(max_tokens=900, ignore_eos=True), use_tqdm=False)
        with pytest.raises(CallError):
            other.collective_rpc("check_health", args=(1, 2, 3))
        error, failure = other.engine_errors()
        prefix = f"front end {os.getpid()} in place {place} was cut off: it sent invalid messages"
        assert error.text.startswith(prefix)
        assert "a call of the worker failed: " in failure.text
        assert other.health() == "ready"
        (record,) = json.loads(output_of("top", name, "--once", "--json", "--interval", "0.1"))
        assert record["errors"] == 2
        assert record["last_error"]["text"] == failure.text
        assert "last error" in output_of("top", name, "--once", "--interval", "0.1")


def test_a_front_end_that_is_refused_learns_the_reason(name: str) -> None:
    client = AttachedEngineClient(name)
    kind = Word(client._channel._client.buffer, layout.CLIENT_DOORBELL_OFFSET)
    kind.store(77)
    kind.close()
    with pytest.raises(EngineStartError, match=r"could not open .*: .*doorbell of kind 77"):
        client.wait_ready()


def test_an_engine_in_this_process_has_no_log() -> None:
    with LLM(multiprocess=False, kv_cache_memory_bytes=2**26) as llm:
        assert llm.engine_errors() == []


def test_idle_active_hung_and_stopped_front_ends_are_told_apart(name: str) -> None:
    clients: list[subprocess.Popen[bytes]] = []
    try:
        places = {}
        for mode in ("hung", "stopped", "idle", "active"):
            clients.append(start_source(FRONT_END, name, mode))
            places[mode] = int(read_line(clients[-1]))
        clients[1].send_signal(signal.SIGSTOP)
        paths = {mode: registry.client_path(name, place) for mode, place in places.items()}
        for mode in ("stopped", "idle", "hung"):
            wait_until(lambda mode=mode: state_at(paths[mode]).startswith(mode), mode)  # type: ignore[misc]
        shown = {mode: row_of("ipc", "ls", path.name)["state"] for mode, path in paths.items()}
        seconds = float(shown.pop("hung").removeprefix("hung ").removesuffix(" s"))
        assert seconds >= HUNG_AFTER_S
        assert shown == {mode: mode for mode in ("stopped", "idle", "active")}
        record = row_of("engine", "ls", name)
        (figures,) = json.loads(output_of("top", name, "--once", "--json", "--interval", "0.1"))
        assert record.keys() == figures.keys()
        kinds = [client["state"].split()[0] for client in record["clients"]]
        assert sorted(kinds) == ["active", "hung", "idle", "stopped"]
        assert "  4 (1 hung, 1 stopped)  " in output_of("engine", "ls")
        by_pid = {client["pid"]: client["state"].split()[0] for client in figures["clients"]}
        assert [by_pid[client.pid] for client in clients] == ["hung", "stopped", "idle", "active"]
        assert "state: idle" in output_of("ipc", "inspect", f"{name}.{places['idle']}")
    finally:
        for client in clients:
            kill(client)


def state_at(path: Path) -> str:
    with open_segment(path, SegmentKind.CLIENT) as segment:
        return client_state(segment)
