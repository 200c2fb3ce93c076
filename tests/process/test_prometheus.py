"""`--metrics-port`: the samples, the addresses that are served, and the engine without sockets."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from support.commands import command
from support.engines import is_ready
from support.programs import CLI, environment, python, sockets_of
from support.waiting import PATIENCE_S, holds_within

from shmllm import LLM, SamplingParams
from shmllm.cli.metrics import COUNTERS, GAUGES, EngineCollector

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def port() -> int:
    """A port that was free a moment ago."""
    pytest.importorskip("prometheus_client", reason="needs the extra metrics")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape(port: int) -> dict[str, float]:
    """Samples by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    samples = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name: float(value) for name, _, value in samples}


def answers(port: int) -> bool:
    with suppress(OSError):
        return bool(scrape(port))
    return False


def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return command(*arguments)


@pytest.mark.parametrize("detach", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_named_engine_is_shown_by_a_process_that_ends_with_it(
    tmp_path: Path, port: int, detach: bool
) -> None:
    name = f"prometheus-{os.getpid()}"
    command = [
        "engine",
        "start",
        name,
        "--metrics-port",
        str(port),
        "--kv-cache-memory-bytes",
        str(2**27),
    ]
    foreground = None
    if detach:
        assert run(*command, "--detach", "--log", str(tmp_path / "log")).returncode == 0
    else:
        foreground = subprocess.Popen(
            [sys.executable, "-c", CLI, *command], stderr=subprocess.DEVNULL, env=environment()
        )
    assert holds_within(lambda: is_ready(name) and answers(port), PATIENCE_S)
    label = f'{{engine="{name}"}}'
    with LLM.attach(name) as llm:
        llm.generate(["import os", "import sys"], PARAMS, use_tqdm=False)
        engine = llm._client.pid  # type: ignore[attr-defined]
        assert holds_within(lambda: llm.get_metrics()["requests_finished"] == 2, PATIENCE_S)
        # A step's durations are counted just after its outputs were published.
        last = f"shmllm_inter_token_latency_seconds_count{label}"
        assert holds_within(lambda: scrape(port)[last] == 8, PATIENCE_S)
        found, metrics = scrape(port), llm.get_metrics()
    for key, (metric, _) in GAUGES.items():
        assert found[f"shmllm_{metric}{label}"] == metrics[key]
    for key, (metric, _) in COUNTERS.items():
        assert found[f"shmllm_{metric}_total{label}"] <= metrics[key]
    assert found[f"shmllm_generated_tokens_total{label}"] == 10
    assert found[f"shmllm_kv_cache_usage_ratio{label}"] == 0
    assert found[f'shmllm_phase_seconds_total{{engine="{name}",phase="execute"}}'] > 0
    counts = {"time_to_first_token_seconds": 2, "inter_token_latency_seconds": 8}
    for metric, count in counts.items():
        assert found[f"shmllm_{metric}_count{label}"] == count
        assert found[f'shmllm_{metric}_bucket{{engine="{name}",le="+Inf"}}'] == count
        assert found[f"shmllm_{metric}_sum{label}"] > 0
    assert found[f"shmllm_step_seconds_count{label}"] <= metrics["steps"]
    assert sockets_of(engine) == []
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=PATIENCE_S)
    os.kill(engine, signal.SIGKILL)
    if foreground is not None:
        foreground.wait(PATIENCE_S)
    assert holds_within(lambda: not answers(port), PATIENCE_S)
    run("ipc", "gc", "--yes")


def test_generate_shows_its_engine_while_it_runs(tmp_path: Path, port: int) -> None:
    source = tmp_path / "in.txt"
    source.write_text("x = \n" * 2000)
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            CLI,
            "generate",
            "-i",
            str(source),
            "-o",
            str(tmp_path / "out.jsonl"),
            "--max-tokens",
            "64",
            "--ignore-eos",
            "--metrics-port",
            str(port),
        ],
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    try:
        name = 'shmllm_generated_tokens_total{engine="private"}'
        assert holds_within(lambda: answers(port) and scrape(port)[name] > 100, PATIENCE_S)
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    assert not answers(port)


def test_a_port_in_use_is_said_before_anything_starts(port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        for command in (["generate", "x"], ["engine", "start", "never"]):
            done = run(*command, "--metrics-port", str(port))
            assert done.returncode == 2
            assert re.search(rb"127\.0\.0\.1:\d+ is in use", done.stderr)


@pytest.mark.parametrize("command", [["generate", "x"], ["engine", "start", "never"]])
def test_without_prometheus_client_the_error_says_what_to_install(command: list[str]) -> None:
    without = f"import sys; sys.modules['prometheus_client'] = None; {CLI}"
    done = python("-c", without, *command, "--metrics-port", "9400")
    assert done.returncode == 2
    assert b"needs prometheus_client: pip install 'prometheus-client>=" in done.stderr
    assert b"Traceback" not in done.stderr


def test_accepted_tokens_are_served_by_their_place_in_the_draft() -> None:
    prometheus = pytest.importorskip("prometheus_client", reason="needs the extra metrics")
    stats = dict.fromkeys((*GAUGES, *COUNTERS), 1) | {
        "num_speculative_tokens": 2,
        "accepted_at_0": 7,
        "accepted_at_1": 5,
    }
    registry = prometheus.CollectorRegistry()
    registry.register(EngineCollector(lambda: (stats, {}), {"engine": "e"}, ()))
    name = "shmllm_spec_decode_num_accepted_tokens_per_pos_total"
    for place, count in (("0", 7), ("1", 5)):
        labels = {"engine": "e", "position": place}
        assert registry.get_sample_value(name, labels) == count
    assert registry.get_sample_value("shmllm_spec_decode_num_drafts_total", {"engine": "e"}) == 1
