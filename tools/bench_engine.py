#!/usr/bin/env python3
"""What a named engine costs when idle, how fast one attaches, and whether a flood hurts others.

    python tools/bench_engine.py [--json FILE]

Starts an engine of its own with the bundled model and stops it. Figures are for the
machine as it is: run it on a quiet one.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import click

from shmllm import LLM, SamplingParams
from shmllm.cli.bench import describe_machine

CLI = [sys.executable, "-c", "from shmllm.cli.main import main; main()"]
FLOOD = """
import sys
from shmllm import LLM, SamplingParams
params = SamplingParams(max_tokens=64, ignore_eos=True)
LLM.attach(sys.argv[1]).generate(["x"] * int(sys.argv[2]), params, use_tqdm=False)
"""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def named_engine() -> Iterator[str]:
    name = f"bench-{os.getpid()}"
    subprocess.run([*CLI, "engine", "start", name, "--detach"], check=True)
    try:
        yield name
    finally:
        subprocess.run([*CLI, "engine", "stop", name], check=True)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def wake_ups(pid: int) -> int:
    """Voluntary context switches of all threads."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                total += int(line.split()[1])
    return total


def measure_idle(name: str, seconds: float) -> dict[str, float]:
    """Engine and one attached front end, both with nothing to do."""
    with LLM.attach(name) as llm:
        time.sleep(1)
        pids = (llm._client.pid, os.getpid())  # type: ignore[attr-defined]
        before = [(cpu_s(pid), wake_ups(pid)) for pid in pids]
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            llm._client.poll(left)
        after = [(cpu_s(pid), wake_ups(pid)) for pid in pids]
    used = sum(b[0] - a[0] for a, b in zip(before, after, strict=True))
    woken = sum(b[1] - a[1] for a, b in zip(before, after, strict=True))
    return {"cpu_percent": 100 * used / seconds, "wake_ups_per_s": woken / seconds}


def measure_attach(name: str, repeats: int) -> dict[str, float]:
    """A whole `shmllm generate --attach` of one token, against an interpreter that does nothing."""
    times: dict[str, list[float]] = {"generate_s": [], "python_s": []}
    command = [*CLI, "generate", "--attach", name, "--max-tokens", "1", "x"]
    for _ in range(repeats):
        for key, run in (("generate_s", command), ("python_s", [sys.executable, "-c", ""])):
            began = time.monotonic()
            subprocess.run(run, check=True, capture_output=True)
            times[key].append(time.monotonic() - began)
    return {key: statistics.median(values) for key, values in times.items()}


def ttfts_ms(llm: LLM, repeats: int) -> list[float]:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    found = []
    for _ in range(repeats):
        [output] = llm.generate("import os", params, use_tqdm=False)
        metrics = output.metrics
        assert metrics is not None
        assert metrics.first_token_time is not None
        found.append(1000 * (metrics.first_token_time - metrics.arrival_time))
    return found


def measure_fairness(name: str, flood: int, repeats: int) -> dict[str, float]:
    """Time to first token of a front end that sends single requests, alone and beside another
    one with `flood` requests queued."""
    with LLM.attach(name) as llm:
        alone = statistics.median(ttfts_ms(llm, repeats))
        process = subprocess.Popen([sys.executable, "-c", FLOOD, name, str(flood)])
        try:
            while llm.get_metrics()["waiting"] < flood // 2:
                time.sleep(0.05)
            steps = llm.get_metrics()["steps"]
            began = time.monotonic()
            beside = statistics.median(ttfts_ms(llm, repeats))
            still_waiting = llm.get_metrics()["waiting"]
            step_ms = 1000 * (time.monotonic() - began) / (llm.get_metrics()["steps"] - steps)
        finally:
            process.kill()
            process.wait()
    return {
        "ttft_alone_ms": alone,
        "ttft_beside_flood_ms": beside,
        "mean_step_beside_flood_ms": step_ms,
        "flood_still_waiting": still_waiting,
    }


@click.command(context_settings={"show_default": True})
@click.option("--idle-seconds", default=10.0)
@click.option("--repeats", default=20)
@click.option("--flood", default=10_000)
@click.option("--json", "json_file", type=click.File("w"))
def main(idle_seconds: float, repeats: int, flood: int, json_file: TextIO | None) -> None:
    """Idle cost, time to attach, and fairness of a named engine."""
    with named_engine() as name:
        record: dict[str, Any] = {
            "machine": describe_machine(),
            "idle": measure_idle(name, idle_seconds),
            "attach": measure_attach(name, repeats),
            "fairness": measure_fairness(name, flood, repeats),
        }
    click.echo(json.dumps(record, indent=2))
    if json_file is not None:
        json.dump(record, json_file, indent=2)


if __name__ == "__main__":
    main()
