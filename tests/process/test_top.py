"""`shmllm top` and `engine ls` in a pseudo-terminal that the test reads and types into."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.engines import named_engine
from support.programs import CLI, python
from support.terminals import Terminal, opened_terminal
from support.waiting import PATIENCE_S, join_all

from shmllm import LLM, SamplingParams
from shmllm.ipc import registry
from shmllm.ipc.control import ControlPage
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import SegmentKind

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

LEAVES_THE_SCREEN = b"\x1b[?1049l"


@contextmanager
def terminal(*arguments: str, **size: int) -> Iterator[Terminal]:
    """A command of shmllm in a terminal."""
    with opened_terminal(*arguments, **({"columns": 110, "lines": 36} | size)) as seen:
        yield seen


def ends(seen: Terminal) -> int:
    """The exit code of `top`, with the terminal as it was before."""
    code = seen.ends()
    assert LEAVES_THE_SCREEN in seen.output
    return code


@contextmanager
def busy(llm: LLM) -> Iterator[None]:
    """Generate in a thread during the block."""
    done = threading.Event()
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

    def work() -> None:
        while not done.is_set():
            llm.generate(["import os", "import sys"], params, use_tqdm=False)
            time.sleep(0.01)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        join_all([thread])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    with named_engine(tmp_path_factory.mktemp("top")) as found:
        yield found


@pytest.fixture
def at_work(engine: tuple[str, int]) -> Iterator[str]:
    """The name of an engine on which a thread of this process generates."""
    with LLM.attach(engine[0]) as llm, busy(llm):
        yield engine[0]


def once(*arguments: str) -> list[dict[str, Any]]:
    done = python("-c", CLI, "top", "--once", "--json", "--interval", "0.5", *arguments)
    assert done.returncode == 0, done.stderr.decode()
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def check_working(found: dict[str, Any]) -> None:
    """Check the figures of an engine that generates for this process."""
    assert (found["state"], found["model"], found["device"]) == ("ready", "tiny", "cpu")
    assert found["generated_tokens_per_s"] > 0
    assert found["prompt_tokens_per_s"] > 0
    assert 0 <= found["kv_used"] <= 1
    assert found["itl_ms"]["interval"]["count"] > 0 < found["step_ms"]["interval"]["p50"]
    assert min(found["phases_us"].values()) > 0
    whole_ms = sum(found["phases_us"].values()) / 1000
    assert whole_ms == pytest.approx(found["step_ms"]["interval"]["mean"], rel=0.5)
    (client,) = found["clients"]
    assert client["pid"] == os.getpid()
    assert client["command"]


def test_figures_of_a_named_engine(at_work: str) -> None:
    (found,) = once(at_work)
    assert found["name"] == at_work
    check_working(found)


@pytest.mark.slow
def test_figures_of_a_private_engine() -> None:
    with LLM(num_threads=1) as llm, busy(llm):
        pid = llm._client.pid  # type: ignore[attr-defined]
        (found,) = once(str(pid))
        assert (found["name"], found["pid"]) == (None, pid)
        check_working(found)
        assert pid in [each["pid"] for each in once()]


def test_a_paused_or_sleeping_engine_is_shown_as_such(engine: tuple[str, int]) -> None:
    name = engine[0]
    with LLM.attach(name) as llm:
        llm.pause_generation()
        assert once(name)[0]["paused"]
        llm.resume_generation()
        llm.sleep()
        assert once(name)[0]["asleep"]
        done = python("-c", CLI, "top", name, "--interval", "0.1")
        assert b"asleep" in done.stdout
        llm.wake_up()
        found = once(name)[0]
        assert not found["asleep"]
        assert not found["paused"]


def test_an_idle_engine_has_figures_too(engine: tuple[str, int]) -> None:
    (found,) = once(engine[0])
    assert found["generated_tokens_per_s"] == 0
    assert found["phases_us"] is None
    assert found["clients"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], id="no terminal"),
        pytest.param(["--once"], id="asked for", marks=pytest.mark.slow),
    ],
)
def test_text_where_there_is_no_terminal(at_work: str, arguments: list[str]) -> None:
    done = python("-c", CLI, "top", at_work, "--interval", "0.3", *arguments)
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout.decode()
    assert at_work in text
    assert "tokens/s" in text
    assert "\x1b" not in text


def test_an_unknown_name_is_one_line(engine: tuple[str, int]) -> None:
    done = python("-c", CLI, "top", "nobody")
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert "nobody" in line
    assert engine[0] in line


def test_no_engine_is_one_line() -> None:
    nothing = "import shmllm.monitor.find as f; f.find_engines = lambda: []; "
    done = python("-c", nothing + CLI, "top")
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("shmllm: no engine of this user runs")


def test_one_engine_is_shown_live_until_q(at_work: str) -> None:
    with terminal("top", at_work, "--interval", "0.2") as seen:
        assert seen.shows(lambda text: "execute" in text and at_work in text), seen.text()
        assert seen.shows(lambda text: "TTFT" in text and "client" in text)
        before = seen.text()
        assert seen.shows(lambda text: text != before), "it does not live"
        seen.type(b"q")
        assert ends(seen) == 0


def test_the_screen_follows_the_terminals_size(at_work: str) -> None:
    with terminal("top", at_work, "--interval", "0.2", columns=160, lines=40) as seen:
        assert seen.shows(lambda text: "execute" in text)
        assert max(len(line.rstrip()) for line in seen.screen.display) == 160
        seen.resize(70, 20)
        assert seen.shows(
            lambda text: "shmllm top" in text and "╮" in text.splitlines()[1][69:70]
        ), seen.text()
        seen.resize(120, 40)
        assert seen.shows(lambda text: "╮" in text.splitlines()[1][119:120]), seen.text()
        seen.type(b"q")
        assert ends(seen) == 0


def test_an_engine_is_chosen_from_the_list(at_work: str) -> None:
    with terminal("top", "--interval", "0.2", lines=50) as seen:
        assert seen.shows(lambda text: at_work in text and "choose" in text), seen.text()
        # Engines of other tests come and go meanwhile; the mark stays at its engine.
        for _ in range(50):
            marked = seen.marked_line()
            if at_work in marked:
                break
            seen.type(b"j")
            seen.shows(lambda _, before=marked: seen.marked_line() != before, 1)  # type: ignore[misc]
        seen.type(b"\r")
        assert seen.shows(lambda text: "execute" in text and at_work in text), seen.text()
        seen.type(b"b")
        assert seen.shows(lambda text: "choose" in text)
        seen.type(b"\x1b[B\x1b[A+-q")
        assert ends(seen) == 0


def test_the_list_fits_in_80_columns_with_the_name_of_the_model(at_work: str) -> None:
    with terminal("top", "--interval", "0.2", columns=80, lines=24) as seen:
        assert seen.shows(lambda text: at_work in text and "choose" in text), seen.text()
        heading = next(line for line in seen.screen.display if line.startswith("engine"))
        assert heading.split()[:3] == ["engine", "model", "state"]
        assert "ITL" in heading
        line = next(line for line in seen.screen.display if at_work in line)
        assert line.split()[:3] == [at_work, "tiny", "ready"]
        assert "…" not in heading + line
        seen.type(b"q")
        assert ends(seen) == 0


def leave_dead_engine(path: Path) -> None:
    with Segment.create(SegmentKind.CONTROL) as dead:
        page = ControlPage(dead)
        page.set_model("HuggingFaceTB/" + "SmolLM2-135M-Instruct" * 3)
        assert registry.publish(dead, path)
        page.close()


def test_engine_ls_fits_in_80_columns_and_only_names_are_shortened(
    engine: tuple[str, int],
) -> None:
    left = registry.control_path(f"{engine[0]}-that-has-died")
    lines: list[str] = []
    deadline = time.monotonic() + PATIENCE_S
    try:
        # Another test may remove dead names meanwhile.
        while not any(line.startswith(f"{engine[0]}-") for line in lines):
            assert time.monotonic() < deadline, lines
            if not left.exists():
                leave_dead_engine(left)
            with terminal("engine", "ls", columns=80, lines=24) as seen:
                assert seen.shows(lambda text: f"{engine[0]} " in text), seen.text()
                assert seen.ends() == 0
                lines = [line.rstrip() for line in seen.screen.display if line.strip()]
        heading, *others = lines  # other tests may run engines
        (alive,) = (line for line in others if line.startswith(f"{engine[0]} "))
        (died,) = (line for line in others if line.startswith(f"{engine[0]}-"))
        assert len(alive.split()) == len(died.split()) == 9, "continued in another line"
        assert heading.split() == [
            *("name", "model", "state", "device", "clients", "run", "wait", "KV", "tokens")
        ]
        assert alive.split()[1:4] == ["tiny", "ready", "cpu"]
        assert died.split()[2] == "dead"
        assert "…" in died
        whole = python("-c", CLI, "engine", "ls").stdout.decode()
        assert left.name in whole or not left.exists()
        assert "…" not in whole
    finally:
        registry.sweep(left)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 0, id="SIGINT", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, id="SIGTERM"),
    ],
)
def test_a_signal_ends_it_with_the_terminal_as_it_was(
    engine: tuple[str, int], number: signal.Signals, code: int
) -> None:
    with terminal("top", engine[0]) as seen:
        assert seen.shows(lambda text: "running" in text)
        seen.process.send_signal(number)
        assert ends(seen) == code


def test_an_engine_that_ends_while_watched(tmp_path: Path) -> None:
    with named_engine(tmp_path) as (name, pid), terminal("top", name, "--interval", "0.1") as seen:
        assert seen.shows(lambda text: "running" in text)
        os.kill(pid, signal.SIGTERM)
        assert ends(seen) == 0
        assert f"engine {name} has ended".encode() in seen.output
