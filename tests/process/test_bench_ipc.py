"""`shmllm bench ipc`, with short runs: its files, skipped variants, and leftover processes."""

from __future__ import annotations

import json
import os
import signal
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.programs import CLI, children, python, start_source
from support.waiting import holds_within

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

FIGURES = {"p50_us", "p99_us", "p999_us", "max_us", "cpu_us"}
WORKER = b"shmllm.bench.worker"
LEAK_GRACE_S = 5.0
HIDE = "import sys; sys.modules[{name!r}] = None\n"


def workers() -> set[int]:
    """Pids of benchmark processes, their children, and the resource trackers of these."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if WORKER in command:
            found |= {int(entry.name), *children(int(entry.name))}
    return found


@pytest.fixture
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for temporary files; afterwards it must be empty and no worker may be left.

    Its name is short, because ZeroMQ binds to paths of at most 107 characters.
    """
    directory = tmp_path_factory.mktemp("b")
    before = workers()
    yield directory
    assert holds_within(lambda: not workers() - before, LEAK_GRACE_S)
    assert list(directory.iterdir()) == []


def bench(scratch: Path, *arguments: str, hidden: tuple[str, ...] = ()) -> tuple[str, str]:
    """Runs a quick benchmark, without the hidden packages; returns stdout and stderr."""
    source = "".join(HIDE.format(name=name) for name in hidden) + CLI
    command = ("bench", "ipc", "--quick", "--messages", "6", *arguments)
    done = python("-c", source, *command, env={"TMPDIR": str(scratch)})
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode(), done.stderr.decode()


def test_the_json_has_the_documented_schema_and_the_svg_the_same_cases(
    scratch: Path, tmp_path: Path
) -> None:
    target, plot = tmp_path / "result.json", tmp_path / "plot.svg"
    cases = ["rtt-64", "rtt-16777216", "add-512", "outputs-32", "outputs-32-logprobs"]
    out, _ = bench(
        scratch,
        *("--arms", "shm-latency,shm-idle", "--cases", ",".join(cases)),
        *("--json", str(target), "--plot", str(plot)),
    )
    record = json.loads(target.read_text())
    assert {"cpu", "cores", "python"} <= record["machine"].keys()
    assert record["arms"].keys() == {"shm-latency", "shm-idle"}
    for figures in record["arms"].values():
        assert list(figures) == cases
        for name, each in figures.items():
            assert each.keys() >= FIGURES
            assert 0 < each["p50_us"] <= each["p99_us"] <= each["p999_us"] <= each["max_us"]
            assert each["cpu_us"] > 0
            assert each["messages"] == 6
            assert ("mib_per_s" in each) == name.startswith("rtt-")
    assert all(name in out for name in cases)
    text = plot.read_text()
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    shown = "".join(root.itertext())
    assert all(name in shown for name in ("shm-latency", "shm-idle", *cases))
    assert "href" not in text
    assert "url(" not in text


PACKAGES = {
    "zmq": "zmq",
    "zmq-nocopy": "zmq",
    "faster-fifo": "faster_fifo",
    "iceoryx2": "iceoryx2",
}


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The figures of every variant that can run here."""
    directory = tmp_path_factory.mktemp("b")
    scratch, target = directory / "t", directory / "result.json"
    scratch.mkdir()
    before = workers()
    cases = "rtt-1048576,add-512,outputs-32-logprobs"
    others = [name for name, package in PACKAGES.items() if find_spec(package)]
    arms = ",".join(["shm-idle", "pipe", "queue", *others])
    bench(scratch, "--arms", arms, "--cases", cases, "--json", str(target))
    assert holds_within(lambda: not workers() - before, LEAK_GRACE_S)
    assert list(scratch.iterdir()) == []
    return dict(json.loads(target.read_text())["arms"])


@pytest.mark.parametrize("variant", ["shm-idle", "pipe", "queue", *PACKAGES])
def test_every_variant_has_figures(variants: dict[str, dict[str, Any]], variant: str) -> None:
    if variant in PACKAGES:
        pytest.importorskip(PACKAGES[variant])
    if variant != "shm-idle":
        pytest.importorskip("msgspec")
    assert len(variants[variant]) == (1 if variant == "zmq-nocopy" else 3)


def test_missing_packages_are_reported_and_the_html_is_well_formed(
    scratch: Path, tmp_path: Path
) -> None:
    target = tmp_path / "plot.html"
    out, err = bench(
        scratch,
        *("--arms", "shm-idle,pipe,iceoryx2", "--cases", "rtt-64,add-512", "--plot", str(target)),
        hidden=("iceoryx2", "msgspec"),
    )
    assert "iceoryx2: skipped, iceoryx2 is not installed" in err
    assert "iceoryx2" not in out
    assert "pipe: only plain bytes, msgspec is not installed" in err
    assert "add-512" in out
    open_tags: list[str] = []

    class Balance(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            open_tags.append(tag)

        def handle_startendtag(self, tag: str, attrs: object) -> None:
            pass

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    Balance().feed(target.read_text())
    assert open_tags == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "carrier-pigeon"], "nothing is called 'carrier-pigeon'"),
        pytest.param(["--cases", "rtt-65"], "nothing is called 'rtt-65'", marks=pytest.mark.slow),
        (["--plot", "plot.jpeg"], "has to end in .svg or .html"),
    ],
)
def test_wrong_usage_is_explained(arguments: list[str], message: str) -> None:
    done = python("-c", CLI, "bench", "ipc", "--quick", *arguments)
    assert done.returncode == 2
    assert message in done.stderr.decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_an_interrupted_run(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = workers()
    source = "import sys; sys.argv[1:] = ['bench', 'ipc', '--arms', 'shm-idle,pipe']; " + CLI
    run = start_source(source)
    try:
        assert holds_within(lambda: len(workers() - before) >= 4, 30)
        os.kill(run.pid, number)
        assert run.wait(30) != 0
    finally:
        run.kill()
        run.wait()
        assert run.stdout is not None
        run.stdout.close()
    assert holds_within(lambda: not workers() - before, LEAK_GRACE_S)
    if number is signal.SIGINT:
        assert list(tmp_path.iterdir()) == []
