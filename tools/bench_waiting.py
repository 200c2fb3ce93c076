#!/usr/bin/env python3
"""What waiting costs: an idle engine, decoding one request, and round trips on full cores.

    tools/bench_waiting.py [--seconds 10] [--json FILE]

    idle      CPU and wake-ups of an engine and its front end that have nothing to do
    decode    the transport's share of a core while one request is decoded: the engine's time
              at its rings, and all that the front end's process does
    loaded    round trips of 64 bytes while torch computes on every core, beside zmq's
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shmllm import LLM, SamplingParams

COMPUTE = """
import sys, torch
torch.set_num_threads(int(sys.argv[1]))
a = torch.randn(512, 512)
print("computing", flush=True)
while True:
    a = (a @ a).clamp(-1, 1)
"""
BENCH = "from shmllm.cli.main import main; main()"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def wake_ups(pid: int) -> int:
    """How often the threads of a process went to sleep of their own accord."""
    return sum(
        int(line.split()[1])
        for task in Path(f"/proc/{pid}/task").iterdir()
        for line in (task / "status").read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )


def measure_idle(llm: LLM, seconds: float) -> dict[str, float]:
    pids = (os.getpid(), llm._client.pid)  # type: ignore[attr-defined]
    cpu, wakes = sum(map(cpu_seconds, pids)), sum(map(wake_ups, pids))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        llm._client.poll(end - time.monotonic())
    return {
        "cpu_percent": 100 * (sum(map(cpu_seconds, pids)) - cpu) / seconds,
        "wake_ups_per_s": (sum(map(wake_ups, pids)) - wakes) / seconds,
    }


def measure_decode(llm: LLM, seconds: float) -> dict[str, float]:
    most = llm.facts.max_model_len - 40
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    llm.generate("import os", params, use_tqdm=False)
    before, began, front_end = llm.get_metrics(), time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        llm.generate("import os", params, use_tqdm=False)
    wall, front_end = time.perf_counter() - began, time.process_time() - front_end
    after = llm.get_metrics()
    grown = {name: after[name] - before[name] for name in after}
    rings_s = (grown["drain_ns"] + grown["publish_ns"]) / 1e9
    return {
        "tokens_per_s": grown["generated_tokens"] / wall,
        "engine_at_rings_percent": 100 * rings_s / wall,
        "front_end_percent": 100 * front_end / wall,
        "transport_percent": 100 * (rings_s + front_end) / wall,
    }


def measure_loaded(seconds: float, threads: int) -> dict[str, Any]:
    compute = subprocess.Popen(
        [sys.executable, "-c", COMPUTE, str(threads)], stdout=subprocess.PIPE
    )
    try:
        assert compute.stdout is not None
        compute.stdout.readline()
        arms = "shm-balanced,shm-idle,zmq"
        options = ["--arms", arms, "--cases", "rtt-64", "--seconds", str(seconds)]
        command = [sys.executable, "-c", BENCH, "bench", "ipc", *options, "--json", "-"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    finally:
        compute.kill()
        compute.communicate()
    return {arm: cases["rtt-64"] for arm, cases in read_json(done.stdout)["arms"].items()}


def read_json(output: bytes) -> Any:
    """The JSON line among what a benchmark printed."""
    return json.loads(next(line for line in output.splitlines() if line.startswith(b"{")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    figures: dict[str, Any] = {"cores": cores}
    with LLM() as llm:
        figures["idle"] = measure_idle(llm, arguments.seconds)
        figures["decode"] = measure_decode(llm, arguments.seconds)
    figures["loaded"] = measure_loaded(arguments.seconds, cores)
    text = json.dumps(figures, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
