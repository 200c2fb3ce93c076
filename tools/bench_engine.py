#!/usr/bin/env python3
"""What an engine costs beside its steps, and what front ends can do to each other.

    python tools/bench_engine.py [--json FILE]

    idle      CPU and wake-ups of an engine and a front end that have nothing to do
    attach    a whole `shmllm generate --attach`
    decode    the transport's share of a core while one request is decoded: the engine's time
              at its rings, and all that the front end's process does
    fairness  time to first token of a front end beside another one's flood
    stopped   the same front end's requests beside one that was stopped with a full output ring
    loaded    round trips of 64 bytes while torch computes on every core

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
from shmllm.cli.bench_output import describe_machine

CLI = [sys.executable, "-c", "from shmllm.cli.main import main; main()"]
FLOOD = """
import sys
from shmllm import LLM, SamplingParams
params = SamplingParams(max_tokens=64, ignore_eos=True)
LLM.attach(sys.argv[1]).generate(["x"] * int(sys.argv[2]), params, use_tqdm=False)
"""
# It fills its output ring with refusals and stops itself.
STOPPED = """
import os, signal, sys
from shmllm import LLM, SamplingParams
from shmllm.ipc.layout import RING_BYTES
from shmllm.wire import codec
from shmllm.params.request import EngineCoreRequest
from shmllm.wire.messages import (Kind)
llm = LLM.attach(sys.argv[1])
channel = llm._client._channel
refused = codec.encode_add(EngineCoreRequest(10**9, [10**6], SamplingParams()))
while channel.outputs._load_published() - channel.outputs._position < RING_BYTES - 1000:
    channel.try_send(Kind.ADD, *refused)
print("full", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
COMPUTE = """
import sys, torch
torch.set_num_threads(int(sys.argv[1]))
a = torch.randn(512, 512)
print("computing", flush=True)
while True:
    a = (a @ a).clamp(-1, 1)
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


def measure_decode(name: str, seconds: float) -> dict[str, float]:
    """One request at a time, from its prompt to the end of the context."""
    with LLM.attach(name) as llm:
        most = llm.facts.max_model_len - 40
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        before, began, front_end_s = llm.get_metrics(), time.perf_counter(), time.process_time()
        while time.perf_counter() - began < seconds:
            llm.generate("import os", params, use_tqdm=False)
        wall_s = time.perf_counter() - began
        front_end_s = time.process_time() - front_end_s
        after = llm.get_metrics()
    grown = {key: after[key] - before[key] for key in after}
    rings_s = (grown["drain_ns"] + grown["publish_ns"]) / 1e9
    return {
        "tokens_per_s": grown["generated_tokens"] / wall_s,
        "engine_at_rings_percent": 100 * rings_s / wall_s,
        "front_end_percent": 100 * front_end_s / wall_s,
        "transport_percent": 100 * (rings_s + front_end_s) / wall_s,
    }


def measure_stopped(name: str, repeats: int) -> dict[str, float]:
    """Requests of one front end, in turns without and with a stopped one beside it."""
    times: dict[str, list[float]] = {"alone_ms": [], "beside_stopped_ms": []}
    with LLM.attach(name) as llm:
        for _ in range(3):
            times["alone_ms"] += ttfts_ms(llm, repeats)
            process = subprocess.Popen([sys.executable, "-c", STOPPED, name], stdout=-1)
            try:
                assert process.stdout is not None
                process.stdout.readline()
                times["beside_stopped_ms"] += ttfts_ms(llm, repeats)
            finally:
                process.kill()
                process.communicate()
    return {key: statistics.median(values) for key, values in times.items()}


def measure_loaded(seconds: float) -> Any:
    """`shmllm bench ipc` while every core computes."""
    threads = str(len(os.sched_getaffinity(0)))
    compute = subprocess.Popen([sys.executable, "-c", COMPUTE, threads], stdout=-1)
    try:
        assert compute.stdout is not None
        compute.stdout.readline()
        options = ["--arms", "shm-balanced,shm-idle,zmq", "--cases", "rtt-64", "--json", "-"]
        command = [*CLI, "bench", "ipc", *options, "--seconds", str(seconds)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
        )
    finally:
        compute.kill()
        compute.communicate()
    return {arm: cases["rtt-64"] for arm, cases in json.loads(done.stdout)["arms"].items()}


@click.command(context_settings={"show_default": True})
@click.option("--seconds", default=10.0, help="Of each measurement that has a length.")
@click.option("--repeats", default=20)
@click.option("--flood", default=10_000)
@click.option("--json", "json_file", type=click.File("w"))
def main(seconds: float, repeats: int, flood: int, json_file: TextIO | None) -> None:
    """Idle cost, time to attach, transport's share, fairness, and round trips under load."""
    with named_engine() as name:
        record: dict[str, Any] = {
            "machine": describe_machine(),
            "idle": measure_idle(name, seconds),
            "attach": measure_attach(name, repeats),
            "decode": measure_decode(name, seconds),
            "fairness": measure_fairness(name, flood, repeats),
            "stopped": measure_stopped(name, repeats),
        }
    record["loaded"] = measure_loaded(seconds)
    click.echo(json.dumps(record, indent=2))
    if json_file is not None:
        json.dump(record, json_file, indent=2)


if __name__ == "__main__":
    main()
