#!/usr/bin/env python3
"""What `shmllm top` costs the engine that it watches.

    python tools/bench_top.py [--json FILE]

One engine decodes, first nobody watches, then a screen that looks once a second, then one that
looks ten times a second, and so on in turns. The screens are processes of their own, in
pseudo-terminals, stopped while it is not their turn. Reported are medians over all rounds of
tokens/s, of the median step, and of the CPU time that the engine's process takes for a step,
against those of the same round without a watcher. The last one alone means something on a
machine that others use as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import click
import numpy as np

from shmllm import LLM, SamplingParams
from shmllm.bench.generation import Measured, run_batch
from shmllm.bench.steps import StepFollower, is_decode, step_us
from shmllm.cli.bench import describe_machine
from shmllm.monitor.find import engine_of_this_process
from shmllm.monitor.sample import Watch

CLI = [sys.executable, "-c", "from shmllm.cli.main import main; main()"]
INTERVALS_S = (1.0, 0.1)
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
WARM_UP_S = 3.0


@contextlib.contextmanager
def watcher(pid: int, interval_s: float) -> Iterator[int]:
    """A stopped `shmllm top` in a terminal; its pid."""
    master, slave = pty.openpty()
    command = [*CLI, "top", str(pid), "--interval", str(interval_s)]
    top = subprocess.Popen(command, stdin=slave, stdout=slave, start_new_session=True)
    reader = subprocess.Popen(["cat"], stdin=master, stdout=subprocess.DEVNULL)
    try:
        time.sleep(WARM_UP_S)
        os.kill(top.pid, signal.SIGSTOP)
        yield top.pid
    finally:
        top.kill()
        top.wait()
        os.close(slave)
        os.close(master)
        reader.kill()
        reader.wait()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def measure(
    llm: LLM, follower: StepFollower, requests: int, seconds: float, top: int | None, engine: int
) -> dict[str, float]:
    """One turn of one arm."""
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    prompts = [[5 + index, 6, 7] for index in range(requests)]
    measured = Measured()
    cpu_before, engine_before = cpu_s(top) if top else 0.0, cpu_s(engine)
    if top:
        os.kill(top, signal.SIGCONT)
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        run_batch(llm, follower, prompts, params, measured)
    elapsed = time.monotonic() - began
    if top:
        os.kill(top, signal.SIGSTOP)
    engine_cpu_s = cpu_s(engine) - engine_before
    steps = measured.all_steps()
    return {
        "tokens_per_s": sum(measured.output_tokens) / sum(measured.seconds),
        "engine_cpu_us_a_step": 1e6 * engine_cpu_s / len(steps),
        "step_us": float(np.median(step_us(steps[is_decode(steps)]))),
        "top_cpu_percent": 100 * (cpu_s(top) - cpu_before) / elapsed if top else 0.0,
    }


@click.command(context_settings={"show_default": True})
@click.option("--seconds", default=3.0, help="Of each turn.")
@click.option("--rounds", default=15)
@click.option("--requests", default=1, help="That decode at once.")
@click.option("--num-threads", default=1)
@click.option("--json", "json_file", type=click.File("w"))
def main(
    seconds: float, rounds: int, requests: int, num_threads: int, json_file: TextIO | None
) -> None:
    """Tokens/s and step time without a watcher and with one, in turns."""
    with contextlib.ExitStack() as stack:
        llm = stack.enter_context(LLM(num_threads=num_threads))
        engine = engine_of_this_process()
        assert engine is not None
        follower = StepFollower(Watch(engine).step_log())
        arms: dict[str, int | None] = {"nobody": None}
        for interval_s in INTERVALS_S:
            name = f"every {interval_s:g} s"
            arms[name] = stack.enter_context(watcher(engine.pid, interval_s))
        measure(llm, follower, requests, seconds, None, engine.pid)
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
        for index in range(rounds):
            names = list(arms) if index % 2 else list(arms)[::-1]
            for name in names:
                turns[name].append(
                    measure(llm, follower, requests, seconds, arms[name], engine.pid)
                )
    record: dict[str, Any] = {"machine": describe_machine(), "requests": requests, "arms": {}}
    for name, found in turns.items():
        ratios = {
            f"{key}_ratio": statistics.median(
                each[key] / alone[key] for each, alone in zip(found, turns["nobody"], strict=True)
            )
            for key in ("tokens_per_s", "step_us", "engine_cpu_us_a_step")
        }
        medians = {key: statistics.median(each[key] for each in found) for key in found[0]}
        record["arms"][name] = medians | ratios
    click.echo(json.dumps(record, indent=2))
    if json_file is not None:
        json.dump(record, json_file, indent=2)


if __name__ == "__main__":
    main()
