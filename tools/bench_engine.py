#!/usr/bin/env python3
"""Measures the overhead of an engine outside its steps, and the fairness between front ends.

    python tools/bench_engine.py [--json FILE]

    idle      CPU time and wake-ups of an idle engine with an idle front end
    attach    the time of a whole `shmllm generate --attach` process
    decode    the transport's share of a core while one request decodes: the engine's time at its
              rings, and the CPU time of the front end's process
    fairness  TTFT of one front end while another one has many queued requests
    stopped   TTFT of one front end while another one is stopped with a full output ring
    loaded    round trips of 64 bytes while torch computes on every core

The tool starts a named engine with the bundled model and stops it at the end. Run it on a quiet
machine.
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
# This front end fills its output ring with refusals and then stops itself with SIGSTOP.
STOPPED = """
import os, signal, sys
from shmllm import LLM, SamplingParams
from shmllm.ipc.layout import RING_BYTES
from shmllm.params.request import EngineCoreRequest
from shmllm.wire import codec
from shmllm.wire.messages import RecordKind
llm = LLM.attach(sys.argv[1])
channel = llm._client._channel
refused = codec.encode_add(EngineCoreRequest(10**9, [10**6], SamplingParams()))
while channel.outputs._load_published() - channel.outputs._position < RING_BYTES - 1000:
    channel.try_send(RecordKind.ADD, *refused)
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
    """Runs a named engine inside the `with` block and yields its name."""
    name = f"bench-{os.getpid()}"
    subprocess.run([*CLI, "engine", "start", name, "--detach"], check=True)
    try:
        yield name
    finally:
        subprocess.run([*CLI, "engine", "stop", name], check=True)


def cpu_s(pid: int) -> float:
    """The CPU time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def wake_ups(pid: int) -> int:
    """The number of voluntary context switches of all threads of a process."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                total += int(line.split()[1])
    return total


def measure_idle(name: str, seconds: float) -> dict[str, float]:
    """Measures an idle engine and one idle front end, which is this process."""
    with LLM.attach(name) as llm:
        time.sleep(1)
        pids = (llm.engine_pid, os.getpid())
        before = [(cpu_s(pid), wake_ups(pid)) for pid in pids]
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            llm._client.poll(left)
        after = [(cpu_s(pid), wake_ups(pid)) for pid in pids]
    used = sum(b[0] - a[0] for a, b in zip(before, after, strict=True))
    woken = sum(b[1] - a[1] for a, b in zip(before, after, strict=True))
    return {"cpu_percent": 100 * used / seconds, "wake_ups_per_s": woken / seconds}


def measure_attach(name: str, repeats: int) -> dict[str, float]:
    """Times a `shmllm generate --attach` process of one token, and an empty Python process."""
    times: dict[str, list[float]] = {"generate_s": [], "python_s": []}
    command = [*CLI, "generate", "--attach", name, "--max-tokens", "1", "x"]
    for _ in range(repeats):
        for key, run in (("generate_s", command), ("python_s", [sys.executable, "-c", ""])):
            began = time.monotonic()
            subprocess.run(run, check=True, capture_output=True)
            times[key].append(time.monotonic() - began)
    return {key: statistics.median(values) for key, values in times.items()}


def ttfts_ms(llm: LLM, repeats: int) -> list[float]:
    """The time to first token of single requests, in milliseconds."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    found = []
    for _ in range(repeats):
        [output] = llm.generate("import os", params, use_tqdm=False)
        metrics = output.metrics
        assert metrics is not None
        assert metrics.first_token_latency is not None
        found.append(1000 * metrics.first_token_latency)
    return found


def measure_fairness(name: str, flood: int, repeats: int) -> dict[str, float]:
    """Measures TTFT of single requests, alone and beside a front end with `flood` requests."""
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
    """Measures the transport while one request at a time decodes to the end of the context."""
    with LLM.attach(name) as llm:
        output_len = llm.facts.max_model_len - 40
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
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
    """Measures TTFT of one front end, in turns without and with a stopped front end beside it."""
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
    """Runs `shmllm bench ipc` while torch computes on every core."""
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
    variants = json.loads(done.stdout)["arms"]
    return {name: cases["rtt-64"] for name, cases in variants.items()}


@click.command(context_settings={"show_default": True})
@click.option("--seconds", default=10.0, help="Duration of the idle, decode and loaded parts.")
@click.option("--repeats", default=20, help="Repetitions of the other parts.")
@click.option(
    "--flood",
    type=click.IntRange(min=1_000),
    default=10_000,
    help="Queued requests of the other front end.",
)
@click.option("--json", "json_file", type=click.File("w"), help="Also write the JSON to FILE.")
def main(seconds: float, repeats: int, flood: int, json_file: TextIO | None) -> None:
    """Measure idle cost, attaching, the transport, fairness, and round trips under load."""
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
