"""A front end or an engine process that dies: the other reports it soon and leaves nothing behind.

The front ends are processes of their own, so that a hang or a crash does not end the test run.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.programs import is_running, kill, read_line, result_of, run_source, start_source
from support.waiting import PATIENCE_S, holds_within

from shmllm import LLM, EngineStartError
from shmllm.frontend.model_files import resolve_model

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

# The two promises about time, with room for a machine that does other things: an idle one takes
# fractions of a second. Everything else only has to happen.
DEATH_IS_REPORTED_WITHIN_S = 2.0
ORPHAN_IS_GONE_WITHIN_S = 5.0

ENGINE_DIES = """
import itertools, json, os, signal, sys, threading, time
from shmllm import LLM, EngineDeadError, SamplingParams
from shmllm.wire.messages import RecordKind

LONG = SamplingParams(max_tokens=900, ignore_eos=True)
moment = []

def kill(llm, number):
    # Only once the engine computes; the statistics page says so.
    while llm.get_metrics()["generated_tokens"] < 5:
        time.sleep(0.001)
    moment.append(time.monotonic())
    os.kill(llm._client.pid, number)

def death(llm):
    try:
        while True:
            llm.generate("x", LONG, use_tqdm=False)
    except EngineDeadError as error:
        return {
            "at": time.monotonic(), "message": error.args[0], "text": str(error),
            "signal": error.signal, "exit_code": error.exit_code,
            "remote": error.remote_traceback,
        }

def report(llm, number, when="generating"):
    if when == "generating":
        threading.Thread(target=kill, args=(llm, number), daemon=True).start()
    else:
        moment.append(time.monotonic())
        os.kill(llm._client.pid, number)
    deaths = [death(llm) for _ in range(3)]
    try:
        llm.reset_prefix_cache()
    except EngineDeadError:
        deaths.append({})
    llm.close()
    llm.close()
    return {"killed_at": moment[0], "deaths": deaths, "pid": llm._client.pid}
"""


def deaths_of(source: str) -> dict[str, Any]:
    return dict(result_of(run_source(ENGINE_DIES + source)))


@pytest.mark.parametrize("when", ["generating", pytest.param("idle", marks=pytest.mark.slow)])
def test_a_killed_engine_is_reported_to_everyone_who_asks(when: str) -> None:
    found = deaths_of(f"print(json.dumps(report(LLM(), signal.SIGKILL, {when!r})))")
    first, *later = found["deaths"]
    assert first["signal"] == signal.SIGKILL
    assert first["exit_code"] is None
    assert "SIGKILL" in first["message"]
    assert str(found["pid"]) in first["message"]
    assert first["at"] - found["killed_at"] < DEATH_IS_REPORTED_WITHIN_S
    assert len(later) == 3
    for before, after in zip(found["deaths"], later[:2], strict=False):
        assert after["signal"] == signal.SIGKILL
        assert after["at"] - before["at"] < DEATH_IS_REPORTED_WITHIN_S


@pytest.mark.slow
def test_a_killed_engine_is_reported_where_child_signals_are_ignored() -> None:
    found = deaths_of(
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "print(json.dumps(report(LLM(), signal.SIGKILL)))"
    )
    first = found["deaths"][0]
    assert (first["signal"], first["exit_code"]) == (None, None)
    assert "lost" in first["message"]
    assert first["at"] - found["killed_at"] < DEATH_IS_REPORTED_WITHIN_S


def test_an_error_in_the_engine_reaches_the_caller_with_its_traceback() -> None:
    found = deaths_of("""
llm = LLM()
assert llm._client._channel.try_send(RecordKind.ADD, b"garbage")
print(json.dumps({"deaths": [death(llm), death(llm)]}))
""")
    for one in found["deaths"]:
        assert one["exit_code"] == 1
        assert one["remote"].startswith("Traceback (most recent call last):")
        assert "Error" in one["remote"].splitlines()[-1]
        assert one["remote"] in one["text"]
        assert "Traceback" not in one["message"]


INTERRUPTED_AND_CLOSED = """
signal.signal(signal.SIGINT, signal.default_int_handler)
llm = LLM()
params = SamplingParams(temperature=0, max_tokens=4)
def answer():
    return llm.generate("import os", params, use_tqdm=False)[0].outputs[0].token_ids
def has_generated(num_tokens):
    wanted = llm.get_metrics()["generated_tokens"] + num_tokens
    while llm.get_metrics()["generated_tokens"] < wanted:
        time.sleep(0.001)

before = answer()
def interrupt():
    has_generated(20)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
try:
    while True:
        llm.generate(["x"] * 8, LONG, use_tqdm=False)
except KeyboardInterrupt:
    interrupted = {"same": answer() == before, "left": len(llm.front_end.outputs._states)}

def outcome(work):
    try:
        work()
    except Exception as error:
        return [[base.__name__ for base in type(error).__mro__], str(error)]

def generate():
    while True:
        llm.generate("x", LONG, use_tqdm=False)

def stream():
    for _ in llm.stream(itertools.repeat("x"), LONG):
        pass

closed = {}
threads = []
for work in (generate, stream):
    def run(work=work):
        closed[work.__name__] = outcome(work)
    threads.append(threading.Thread(target=run, daemon=True))
    threads[-1].start()
has_generated(5)
llm.close()
for thread in threads:
    thread.join(20)
closed["later"] = outcome(answer)
print(json.dumps({"interrupted": interrupted, "closed": closed}))
"""


@pytest.fixture(scope="module")
def interrupted_and_closed() -> dict[str, Any]:
    """What a front end reports whose generation was interrupted, and that then was closed while
    one of its threads generated and another one read a stream."""
    return dict(result_of(run_source(ENGINE_DIES + INTERRUPTED_AND_CLOSED)))


def test_an_interrupted_generation_leaves_a_working_engine(
    interrupted_and_closed: dict[str, Any],
) -> None:
    assert interrupted_and_closed["interrupted"] == {"same": True, "left": 0}


@pytest.mark.parametrize("use", ["generate", "stream"])
def test_closing_in_one_thread_ends_what_runs_in_others(
    interrupted_and_closed: dict[str, Any], use: str
) -> None:
    names, text = interrupted_and_closed["closed"][use]
    assert "ShmLLMError" in names
    assert "closed" in text


def test_a_closed_llm_says_so(interrupted_and_closed: dict[str, Any]) -> None:
    names, text = interrupted_and_closed["closed"]["later"]
    assert "closed" in text
    assert "EngineDeadError" not in names


FRONT_END_DIES = """
import os, sys, time
from shmllm import LLM, SamplingParams

def tell(pid):
    print(pid, flush=True)

def stopped_reading():
    llm = LLM()
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    for changed in llm.front_end.serve(llm.front_end.prepare(["x"] * 64, params)):
        if changed:
            tell(llm._client.pid)
            time.sleep(600)

def with_a_forked_child():
    llm = LLM()
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(writing)
        os.read(reading, 1)
        time.sleep(2)
        os._exit(0)
    os.close(reading)
    tell(llm._client.pid)
    time.sleep(600)

globals()[sys.argv[1]]()
"""
LOADING = """
import os, sys, time
from shmllm import LLM
from shmllm.client.private import PrivateEngineClient
start = PrivateEngineClient.__init__
def start_and_tell(self, *arguments, **options):
    start(self, *arguments, **options)
    print(self.pid, flush=True)
PrivateEngineClient.__init__ = start_and_tell
LLM()
time.sleep(600)
"""


def kill_and_watch(front_end: subprocess.Popen[bytes], engine: int) -> None:
    assert is_running(engine)
    front_end.kill()
    front_end.wait(PATIENCE_S)
    assert holds_within(lambda: not is_running(engine), ORPHAN_IS_GONE_WITHIN_S)


@pytest.fixture
def front_ends() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        kill(process)


@pytest.mark.parametrize(
    "moment", [pytest.param("stopped_reading", marks=pytest.mark.slow), "with_a_forked_child"]
)
def test_an_engine_ends_after_its_front_end_died(
    moment: str, front_ends: list[subprocess.Popen[bytes]]
) -> None:
    """Stages that test_kill_matrix.py does not have."""
    front_ends.append(start_source(FRONT_END_DIES, moment))
    engine = int(read_line(front_ends[0]))
    kill_and_watch(front_ends[0], engine)


def test_an_engine_ends_after_its_front_end_died_during_the_load(
    front_ends: list[subprocess.Popen[bytes]],
) -> None:
    front_ends.append(start_source(LOADING))
    engine = int(read_line(front_ends[0]))
    maps = Path(f"/proc/{engine}/maps")
    assert holds_within(lambda: "libtorch_cpu" in maps.read_text(), PATIENCE_S)
    kill_and_watch(front_ends[0], engine)


def test_a_garbage_collected_llm_ends_its_engine() -> None:
    llm = LLM(max_model_len=64)
    pid = llm._client.pid
    del llm
    gc.collect()
    assert not is_running(pid)


@pytest.mark.parametrize("ending", [pytest.param("", marks=pytest.mark.slow), "raise ValueError"])
def test_an_llm_left_open_ends_its_engine_at_exit(ending: str) -> None:
    done = run_source(
        f"from shmllm import LLM\nllm = LLM()\nprint(llm._client.pid, flush=True)\n{ending}"
    )
    assert not is_running(int(done.stdout))
    assert done.returncode == bool(ending)


def test_a_failed_start_leaves_nothing(tmp_path: Path) -> None:
    shutil.copytree(resolve_model("tiny"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Perceptron"]}))
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(EngineStartError, match="Perceptron") as caught:
        LLM(str(tmp_path))
    assert caught.value.remote_traceback == ""
    assert set(os.listdir("/proc/self/fd")) == before


def test_an_unexpected_error_while_starting_carries_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "safetensors.py").write_text("raise RuntimeError('a broken installation')")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    with pytest.raises(EngineStartError) as caught:
        LLM()
    assert "Traceback" in caught.value.remote_traceback
    assert "RuntimeError: a broken installation" in caught.value.remote_traceback
    assert "Traceback" not in caught.value.args[0]


def test_an_engine_that_is_not_ready_in_time_is_ended() -> None:
    with pytest.raises(EngineStartError, match=r"not ready after 0\.2 s.*startup_timeout"):
        LLM(startup_timeout=0.2)


@pytest.mark.parametrize("value", [0, -1, float("nan"), "5", True])
def test_an_invalid_startup_timeout_is_refused_before_an_engine_starts(value: Any) -> None:
    with pytest.raises(EngineStartError, match="startup_timeout must be a number of seconds"):
        LLM(startup_timeout=value)


def test_an_engine_killed_while_starting_is_a_failed_start() -> None:
    done = run_source("""
import os, signal
from shmllm import EngineStartError, LLM
from shmllm.client.private import PrivateEngineClient
start = PrivateEngineClient.__init__
def start_and_kill(self, *arguments, **options):
    start(self, *arguments, **options)
    os.kill(self.pid, signal.SIGKILL)
PrivateEngineClient.__init__ = start_and_kill
try:
    LLM()
except EngineStartError as error:
    print(error)
""")
    assert b"SIGKILL" in done.stdout, done.stderr.decode()
