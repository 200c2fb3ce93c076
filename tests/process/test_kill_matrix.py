"""A front end or its engine is killed, by each signal, at each stage of a run.

The front end is a program of its own that says when it has reached the stage; the test
sends the signal from outside. Whatever died, soon nothing of it runs, and a front end that
outlives its engine raises the right exception with the cause.

By default a subset runs that has every signal and both victims in it, at the start, with full
rings, in a step and at rest; all other combinations are marked `slow`.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.programs import is_running, kill, read_line, start_source
from support.waiting import PATIENCE_S, holds_within

from shmllm.frontend.model_files import resolve_model

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

GONE_WITHIN_S = 5.0
"""A death takes a fraction of a second to be noticed and an engine a moment to end; a machine that
does other things is given time. What is not noticed would last for ever."""
STOPPED_FOR_S = 0.2
NUM_LAYERS = 120

PROGRAM = """
import json, os, resource, signal, sys, threading, time

signal.signal(signal.SIGINT, signal.default_int_handler)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

from shmllm import LLM, EngineDeadError, EngineStartError, SamplingParams
from shmllm.client.launch import ChildEngineHandle
from shmllm.client.private import PrivateEngineClient
from shmllm.ipc.stats import Stat
from shmllm.wire import codec
from shmllm.params.request import EngineCoreRequest
from shmllm.wire.messages import RecordKind

stage, model = sys.argv[1:]
LONG = SamplingParams(max_tokens=900, ignore_eos=True)
SHORT = SamplingParams(max_tokens=1)
llm = None

def say(text):
    print(text, flush=True)

def say_when(condition):
    def watch():
        while not condition():
            time.sleep(0.001)
        say("there")
    threading.Thread(target=watch, daemon=True).start()

start = PrivateEngineClient.__init__
def start_and_tell(self, *arguments, **options):
    start(self, *arguments, **options)
    say(self.pid)
    if stage == "handshake":
        say("there")
    if stage == "load":
        say_when(lambda: self._channel.stat(Stat.WEIGHT_BYTES_TOTAL) > 0)
PrivateEngineClient.__init__ = start_and_tell

def stat(name):
    return llm.get_metrics()[name]

def outlive():
    # A front end that asks nothing learns nothing; once it asks, it is told.
    while llm.health() != "dead":
        time.sleep(0.01)
    llm.generate("x", LONG, use_tqdm=False)

def idle():
    say_when(lambda: channel._peer_parked.load())
    outlive()

def parked():
    say_when(lambda: channel.waiter._parked.load() and channel._peer_parked.load())
    while True:
        llm._client.poll(1.0).clear()

def prefill():
    # One prompt at a time, in small chunks, of which only the last one yields a token.
    prompts = [{"prompt_token_ids": [7 + i] + [5] * 1000} for i in range(200)]
    say_when(lambda: stat("steps") >= 2)
    while True:
        llm.generate(prompts, SHORT, use_tqdm=False)

def decode():
    say_when(lambda: stat("generated_tokens") >= 5)
    while True:
        llm.generate(["x"] * 4, LONG, use_tqdm=False)

def requests_full():
    os.kill(llm._client.pid, signal.SIGSTOP)
    prompts = [{"prompt_token_ids": [5] * 900} for _ in range(2000)]
    say_when(lambda: channel.requests.statistics().times_full > 2)
    while True:
        llm.generate(prompts, LONG, use_tqdm=False)

def requests_full_with_news():
    # As before, but outputs came earlier and wait to be handled until the request is sent.
    numbers = iter(range(10**6, 10**7))
    llm._client.add(EngineCoreRequest(next(numbers), [5], SHORT))
    while not channel.outputs.has_data():
        time.sleep(0.001)
    os.kill(llm._client.pid, signal.SIGSTOP)
    say_when(lambda: channel.requests.statistics().times_full > 2)
    while True:
        llm._client.add(EngineCoreRequest(next(numbers), [5] * 900, LONG))

def outputs_full():
    # Refusals fill the ring faster than tokens do.
    request = codec.encode_add(EngineCoreRequest(10**9, [10**6], SHORT))
    deadline = time.monotonic() + 30
    while unread() < 500_000:
        channel.try_send(RecordKind.ADD, *request)
        assert time.monotonic() < deadline
    say("there")
    outlive()

def unread():
    outputs = channel.outputs
    return outputs._load_published() - outputs._position

def shutdown():
    stop = ChildEngineHandle.stop
    def tell_and_stop(self, grace_s):
        ChildEngineHandle.stop = stop
        say("there")
        stop(self, grace_s)
    ChildEngineHandle.stop = tell_and_stop
    llm.close()

found = {"error": None}
try:
    options = {"prefill": {"max_num_batched_tokens": 64, "max_num_seqs": 1}}.get(stage, {})
    if stage == "prefill":
        options["enable_prefix_caching"] = False
    llm = LLM(model, kv_cache_memory_bytes=2**26, num_threads=1, **options)
    channel = llm._client._channel
    if stage not in ("handshake", "load"):
        globals()[stage]()
    else:
        outlive()
except (EngineDeadError, EngineStartError) as error:
    found = {"error": type(error).__name__, "text": str(error), "traceback": error.remote_traceback}
    if isinstance(error, EngineDeadError):
        found |= {"signal": error.signal, "exit_code": error.exit_code}
if llm is not None:
    llm.close()
say(json.dumps(found))
"""

STAGES = (
    "handshake",
    "load",
    "idle",
    "parked",
    "prefill",
    "decode",
    "requests_full",
    "requests_full_with_news",
    "outputs_full",
    "shutdown",
)
STARTING = ("handshake", "load")
STOP_KILL = (signal.SIGSTOP, signal.SIGKILL)
SIGNALS: dict[str, tuple[signal.Signals, ...]] = {
    "KILL": (signal.SIGKILL,),
    "SEGV": (signal.SIGSEGV,),
    "TERM": (signal.SIGTERM,),
    "INT": (signal.SIGINT,),
    "STOP+KILL": STOP_KILL,
}
BY_DEFAULT = {
    ("engine", "TERM", "handshake"),
    ("engine", "STOP+KILL", "parked"),
    ("engine", "KILL", "requests_full_with_news"),
    ("front end", "SEGV", "handshake"),
    ("front end", "INT", "decode"),
}
CELLS = [
    pytest.param(*cell, marks=() if cell in BY_DEFAULT else pytest.mark.slow, id="-".join(cell))
    for cell in itertools.product(("engine", "front end"), SIGNALS, STAGES)
]


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with many more layers, all zeros: loading it takes a while, and the
    file has no blocks on the disk."""
    directory = tmp_path_factory.mktemp("deep")
    shutil.copytree(resolve_model("tiny"), directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    config["num_hidden_layers"] = NUM_LAYERS
    config["layer_types"] = ["full_attention"] * NUM_LAYERS
    (directory / "config.json").write_text(json.dumps(config))
    path = directory / "model.safetensors"
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        stored = json.loads(file.read(size))
    header, end = {}, 0
    for name, entry in stored.items():
        if name == "__metadata__" or (".layers." in name and ".layers.0." not in name):
            continue
        copies = NUM_LAYERS if ".layers.0." in name else 1
        begin, after = entry["data_offsets"]
        for layer in range(copies):
            renamed = name.replace(".layers.0.", f".layers.{layer}.")
            header[renamed] = entry | {"data_offsets": [end, end + after - begin]}
            end += after - begin
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)
    return directory


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts the program, and ends it with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start_program(*arguments: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "stderr").open("wb") as stderr:
            program = start_source(PROGRAM, *arguments, stderr=stderr)
        started.append(program)
        return program

    yield start_program
    for program in started:
        kill(program)


def send_all(pid: int, numbers: tuple[signal.Signals, ...]) -> None:
    for number in numbers:
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(STOPPED_FOR_S)


@pytest.mark.parametrize(("victim", "how", "stage"), CELLS)
def test_a_death_is_reported_and_leaves_nothing(
    victim: str,
    how: str,
    stage: str,
    deep_model: Path,
    start: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
) -> None:
    model = str(deep_model) if stage == "load" else "tiny"
    front_end = start(stage, model)
    engine = int(read_line(front_end))
    said = read_line(front_end)
    assert said == b"there\n", said + (tmp_path / "stderr").read_bytes()

    numbers = SIGNALS[how]
    send_all(engine if victim == "engine" else front_end.pid, numbers)
    if stage.startswith("requests_full") and is_running(engine):
        os.kill(engine, signal.SIGCONT)  # it was stopped so that the ring would fill
    is_gone = holds_within(
        lambda: front_end.poll() is not None and not is_running(engine),
        GONE_WITHIN_S,
    )
    complaints = (tmp_path / "stderr").read_text()
    assert is_gone, f"front end {front_end.poll()}, engine {is_running(engine)}\n{complaints}"
    assert "resource_tracker" not in complaints

    if victim == "front end":
        assert front_end.returncode == -numbers[-1], complaints
    else:
        assert front_end.returncode == 0, complaints
        said, _ = front_end.communicate(timeout=PATIENCE_S)
        check_survivor(json.loads(said), stage, numbers[-1])


def check_survivor(found: dict[str, Any], stage: str, number: signal.Signals) -> None:
    """A front end that its engine left says so, and why."""
    ends_itself = number in (signal.SIGTERM, signal.SIGINT)
    if stage == "shutdown":
        assert found["error"] is None  # it wanted the engine to end
    elif stage in STARTING:
        assert found["error"] == "EngineStartError"
        # Before the engine has taken over these two signals they kill it.
        causes = [f"killed by {number.name})"] + ["exit code 0)"] * ends_itself
        assert any(cause in found["text"] for cause in causes), found
    else:
        assert found["error"] == "EngineDeadError"
        assert found["traceback"] == ""
        assert (found["signal"], found["exit_code"]) == (
            (None, 0) if ends_itself else (number, None)
        )


def test_the_default_cells_have_every_signal_and_victim() -> None:
    victims, ways, stages = zip(*BY_DEFAULT, strict=True)
    assert set(victims) == {"engine", "front end"}
    assert set(ways) == set(SIGNALS)
    assert set(stages) < set(STAGES)
