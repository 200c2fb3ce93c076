"""`shmllm bench latency`, `throughput` and `startup` as commands, with short runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import engine_processes
from support.engines import assert_unused
from support.programs import CLI, environment, python
from support.waiting import PATIENCE_S, holds_within

from shmllm.ipc.stats import PHASES

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

SMALL = ("--num-threads", "1", "--kv-cache-memory-bytes", str(2**26))
QUICK = ("--output-len", "6", "--input-len", "8", "--num-iters-warmup", "1", *SMALL)
NO_STARTS = ("--num-iters-cold", "0", "--num-iters-warmup", "0", "--num-iters-warm", "0")
QUANTILES = ("p10", "p25", "p50", "p75", "p90", "p99", "max")


def bench(*arguments: str) -> tuple[dict[str, Any], str]:
    """Runs a benchmark; returns the JSON record from stdout and the text from stderr."""
    done = python("-c", CLI, "bench", *arguments, "--json", "-", timeout=3 * PATIENCE_S)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout), done.stderr.decode()


def check_figures(found: dict[str, Any], num_requests: int, output_len: int) -> None:
    """Checks that all figures exist and agree with each other."""
    assert found["output_tokens_per_s"] > 0
    low, high = found["output_tokens_per_s_range"]
    assert low <= found["output_tokens_per_s"] <= high
    for key in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "step_ms", "decode_step_ms"):
        values = [found[key][quantile] for quantile in QUANTILES]
        assert values == sorted(values)
        assert values[0] > 0
    assert found["e2e_ms"]["max"] <= 1000 * found["latency_s"]["max"]
    assert found["ttft_ms"]["mean"] + (output_len - 1) * found["tpot_ms"]["mean"] == pytest.approx(
        found["e2e_ms"]["mean"]
    )
    assert list(found["phases_us"]) == list(PHASES)
    step_us = sum(each["mean"] for each in found["phases_us"].values())
    assert step_us == pytest.approx(1000 * found["step_ms"]["mean"])
    assert found["slowest_decode_step_over_median"] >= 1
    assert found["num_steps"] >= output_len


def test_latency(tmp_path: Path) -> None:
    plot = tmp_path / "latency.html"
    record, shown = bench(
        *("latency", "--batch-size", "3", "--num-iters", "4", "--plot", str(plot), *QUICK)
    )
    assert record["benchmark"] == "latency"
    assert record["batch_size"] == 3
    assert len(record["latencies"]) == 4
    assert record["avg_latency"] == pytest.approx(sum(record["latencies"]) / 4)
    assert list(record["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    check_figures(record, 3, 6)
    # A batch arrives in several steps if its sender had to wait for a core.
    assert 4 * 6 <= record["num_steps"] <= 4 * 3 * 6
    assert {"cpu", "cores"} <= record["machine"].keys()
    for words in ("TTFT", "ITL", "TPOT", "E2E", "execute", "publish", "slowest decode step"):
        assert words in shown
    ElementTree.fromstring(plot.read_text())


@pytest.mark.slow
def test_parallel_compares_one_process_with_ranks_stages_and_engines() -> None:
    """The user's sizes count for no division, and the user's threads for all."""
    quick = ("--output-len", "4", "--input-len", "8", "--num-iters", "1", "--num-prompts", "1")
    sizes = ("--processes", "2", "--num-threads", "3", "--tensor-parallel-size", "4")
    record, shown = bench("parallel", *quick, *sizes, "--kv-cache-memory-bytes", str(2**26))
    assert record["engine"]["num_threads"] == 3
    (rates,) = record["output_tokens_per_s"].values()
    assert list(rates) == ["1 process", "2 ranks", "2 stages", "2 engines"]
    assert min(rates.values()) > 0
    fastest = record["fastest"]["1"]
    flags = {
        "2 ranks": " --tensor-parallel-size 2",
        "2 stages": " --pipeline-parallel-size 2",
        "2 engines": " --engines 2",
    }
    assert f"1 requests: {fastest}{flags.get(fastest, '')}\n" in shown


@pytest.fixture
def attached(engine: str) -> Iterator[tuple[str, ...]]:
    """Options for a short run on the engine of the module, which it must leave unused."""
    yield "--attach", engine, *QUICK[: -len(SMALL)]
    assert_unused(engine)


def test_throughput(tmp_path: Path, attached: tuple[str, ...]) -> None:
    plot = tmp_path / "throughput.svg"
    record, shown = bench(
        *("throughput", "--num-prompts", "1", "--num-prompts", "4", "--num-iters", "2", "--n", "2"),
        *("--temperature", "0.5", "--prefix-len", "16", "--disable-detokenize"),
        *("--plot", str(plot), *attached),
    )
    assert [found["num_prompts"] for found in record["results"]] == [1, 4]
    for found in record["results"]:
        check_figures(found, 2 * found["num_prompts"], 6)
    assert "4 requests ITL" in shown
    texts = "".join(ElementTree.fromstring(plot.read_text()).itertext())
    assert "1 request" in texts
    assert "4 requests" in texts


def test_throughput_of_prompts_from_a_file(tmp_path: Path, attached: tuple[str, ...]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "import os"}\n\n{"prompt": "def f"}\n')
    given = ("--dataset-name", "custom", "--dataset-path", str(prompts))
    record, _ = bench("throughput", "--num-prompts", "3", "--num-iters", "1", *given, *attached)
    check_figures(record["results"][0], 3, 6)


def test_a_running_engine_can_be_measured(engine: str, attached: tuple[str, ...]) -> None:
    record, _ = bench("latency", "--num-iters", "1", *attached)
    assert record["engine"] == {"attach": engine}
    check_figures(record, 8, 6)


@pytest.mark.slow
@pytest.mark.parametrize("warm", [0, 1])
def test_startup(tmp_path: Path, warm: int) -> None:
    plot, target = tmp_path / "startup.svg", tmp_path / "startup.json"
    counts = ("--num-iters-cold", "1", "--num-iters-warmup", "0", "--num-iters-warm", str(warm))
    attach = ("--num-iters-attach", "2")
    done = python(
        *("-c", CLI, "bench", "startup", *counts, *attach, *SMALL),
        *("--plot", str(plot), "--output-json", str(target)),
        timeout=5 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr.decode()
    record = json.loads(target.read_text())
    counted = {kind: len(found["iterations"]) for kind, found in record["results"].items()}
    wanted = {"cold": 1, "warm": warm, "attach": 2}
    assert counted == {kind: times for kind, times in wanted.items() if times}
    for kind, found in record["results"].items():
        for stages, total in zip(found["iterations"], record[f"{kind}_startup_times"], strict=True):
            assert min(stages.values()) > 0
            assert sum(stages.values()) == pytest.approx(total)
    assert "import torch" in record["results"]["cold"]["stages_s"]
    assert "import torch" not in record["results"]["attach"]["stages_s"]
    for words in ("engine's interpreter", "first token", "attach"):
        assert words in done.stdout.decode()
        assert words in "".join(ElementTree.fromstring(plot.read_text()).itertext())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["throughput", "--dataset-name", "custom"], "--dataset-path"),
        (["latency", "--plot", "picture.png"], ".svg or .html"),
        (["latency", "--attach", "x", "--num-threads", "1"], "--num-threads"),
        (["startup", "--model", "nowhere/at/all"], "nowhere/at/all"),
        (["startup", "--engines", "2"], "--engines is for engines without a name: add --num-iters"),
        (["parallel", "--tensor-parallel-size", "2"], "is what the command compares; --processes"),
    ],
)
def test_wrong_usage_is_explained(arguments: list[str], message: str) -> None:
    done = python("-c", CLI, "bench", *arguments)
    assert done.returncode == 2
    assert message in done.stderr.decode()


@pytest.mark.parametrize(
    "arguments",
    [
        ["latency", "--num-iters", "100000", "--num-iters-warmup", "0", *SMALL],
        pytest.param(
            ["startup", "--num-iters-cold", "0", "--num-iters-warm", "100000", *SMALL],
            marks=pytest.mark.slow,
        ),
        ["startup", *NO_STARTS, "--num-iters-attach", "100000", *SMALL],
    ],
    ids=["latency", "startup", "attach"],
)
def test_an_interrupt_leaves_nothing(arguments: list[str]) -> None:
    before = engine_processes()
    run = subprocess.Popen(
        [sys.executable, "-c", CLI, "bench", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    try:
        assert holds_within(lambda: bool(engine_processes() - before), PATIENCE_S)
        os.kill(run.pid, signal.SIGINT)
        _, err = run.communicate(timeout=PATIENCE_S)
        assert run.returncode == 130
        assert b"Traceback" not in err
    finally:
        run.kill()
        run.communicate()


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


@pytest.mark.skipif(not BROWSER, reason="no headless browser is installed")
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    plot = tmp_path / "latency.html"
    bench("latency", "--num-iters", "1", "--plot", str(plot), *QUICK)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    shown = subprocess.run(
        [BROWSER, *options, "--dump-dom", plot.as_uri()],
        capture_output=True,
        timeout=PATIENCE_S,
        check=True,
    ).stdout.decode()
    assert "</svg>" in shown
    assert "parsererror" not in shown
    assert "TTFT" in shown
