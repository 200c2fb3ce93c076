#!/usr/bin/env python3
"""Whether `LLM.stream` stays as fast, and as small, over a million prompts.

    tools/bench_stream.py [--prompts 1000000] [--short 10000] [--every 10] [--json FILE]
    tools/bench_stream.py --model DIRECTORY --load-format dummy    # a model of one small layer

One long stream from a generator is consumed in segments as long as a short run. After
every few segments a short run of its own goes through the same engine, so that both see the
same machine. A rate is that of the middle of a segment or run: neither counts its first and
last prompts, where the requests under way become more or fewer. Resident memory, of front
end and engine, is compared with that after a first short run.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import click

from shmllm import LLM, SamplingParams
from shmllm.cli.bench import describe_machine
from shmllm.config.engine import LoadFormat
from shmllm.outputs.request import RequestOutput

# Small, so that all of it is resident after the first run: a larger one becomes so bit by bit.
KV_CACHE_BYTES = 2**26
NUMBERS = itertools.count()


def resident_mib(pid: int | str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def prompts(count: int) -> Iterator[str]:
    """Texts, so that tokenizing is part of it. No two are equal, in all runs together, and
    all are about as long."""
    return (f"{next(NUMBERS):09d} is a number that" for _ in range(count))


def rate(outputs: Iterator[RequestOutput], count: int, edge: int) -> float:
    """Prompts a second over `count` outputs, the first and last `edge` left out."""
    consume(outputs, edge)
    began = time.perf_counter()
    consume(outputs, count - 2 * edge)
    seconds = time.perf_counter() - began
    consume(outputs, edge)
    return (count - 2 * edge) / seconds


def consume(outputs: Iterator[RequestOutput], count: int) -> None:
    got = sum(1 for _ in itertools.islice(outputs, count))
    if got != count:
        raise RuntimeError(f"{count} outputs were to come, {got} came")


def measure(llm: LLM, total: int, short: int, every: int, output_len: int) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    edge = min(2 * llm.facts.max_num_seqs, short // 4)
    pids = {"front_end": "self", "engine": llm._client.pid}  # type: ignore[attr-defined]

    def short_run() -> float:
        return rate(llm.stream(prompts(short), params), short, edge)

    short_run()
    first = {name: resident_mib(pid) for name, pid in pids.items()}
    most = dict(first)
    rates: dict[str, list[float]] = {"stream": [], "short": []}
    stream = llm.stream(prompts(total), params)
    began = time.monotonic()
    for segment in range(total // short):
        if segment % every == 0:
            rates["short"].append(short_run())
        rates["stream"].append(rate(stream, short, edge))
        most = {name: max(most[name], resident_mib(pid)) for name, pid in pids.items()}
        click.echo(
            f"\r{(segment + 1) * short:,} prompts, {time.monotonic() - began:,.0f} s, "
            f"{rates['stream'][-1]:,.0f}/s, front end {most['front_end']:,.0f} MiB",
            nl=False,
            err=True,
        )
    click.echo(err=True)
    consume(stream, total % short)
    if next(stream, None) is not None:
        raise RuntimeError("more outputs than prompts")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "prompts_per_s": medians,
        "stream_over_short": medians["stream"] / medians["short"],
        "resident_mib_at_first": first,
        "resident_mib_grown_by": {name: most[name] - first[name] for name in pids},
        "rates": rates,
    }


@click.command()
@click.option("--prompts", "total", default=1_000_000, show_default=True)
@click.option("--short", default=10_000, show_default=True)
@click.option("--every", default=10, show_default=True, help="Segments from one short run on.")
@click.option("--output-len", default=2, show_default=True)
@click.option("--model", default="tiny", show_default=True)
@click.option("--load-format", default="auto", show_default=True)
@click.option("--json", "json_file", type=click.File("w"))
def main(
    total: int,
    short: int,
    every: int,
    output_len: int,
    model: str,
    load_format: LoadFormat,
    json_file: TextIO | None,
) -> int:
    """Rate and memory of a long stream beside short ones."""
    with LLM(model, load_format=load_format, kv_cache_memory_bytes=KV_CACHE_BYTES) as llm:
        result = measure(llm, total, short, every, output_len)
    grown = result["resident_mib_grown_by"]
    click.echo(
        f"{total:,} prompts: {result['prompts_per_s']['stream']:,.0f}/s, "
        f"{result['stream_over_short']:.3f} times the rate of {short:,} prompts; grown by "
        f"{grown['front_end']:.1f} MiB (front end), {grown['engine']:.1f} MiB (engine)"
    )
    if json_file is not None:
        options = {"prompts": total, "short": short, "every": every, "output_len": output_len}
        json.dump({"machine": describe_machine(), **options, **result}, json_file, indent=2)
        json_file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(standalone_mode=True))
