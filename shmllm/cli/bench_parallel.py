"""`shmllm bench parallel`: finds out how many processes should compute a model on this machine."""

from __future__ import annotations

import contextlib
import os
import random
from typing import TYPE_CHECKING, Any

import click

from shmllm.cli.bench_output import (
    BenchOutput,
    describe_machine,
    machine_line,
    output_options,
    progress,
)
from shmllm.cli.interrupts import interruptible
from shmllm.cli.options import bench_engine_options, refuse_options, take_engine_options
from shmllm.errors import EngineStartError
from shmllm.version import __version__

if TYPE_CHECKING:
    from shmllm.bench.parallel import Rates
    from shmllm.frontend.llm import LLM

COUNT = click.IntRange(min=1)


@click.command()
@click.option(
    "--processes",
    type=click.IntRange(min=2),
    help="Ranks, stages, and engines, to compare with one process.  [default: the usable cores]",
)
@click.option(
    "--num-prompts",
    type=COUNT,
    multiple=True,
    default=(1, 16),
    show_default=True,
    help="Requests sent at once. May be given several times.",
)
@click.option("--input-len", type=COUNT, default=32, show_default=True, help="Tokens of a prompt.")
@click.option("--output-len", type=COUNT, default=48, show_default=True, help="Output tokens.")
@click.option("--num-iters", type=COUNT, default=3, show_default=True, help="Measured rounds.")
@click.option("--seed", default=0, show_default=True, help="Seed of the random prompts.")
@output_options
@bench_engine_options
def parallel(
    processes: int | None,
    num_prompts: tuple[int, ...],
    input_len: int,
    output_len: int,
    num_iters: int,
    seed: int,
    output: BenchOutput,
    **options: Any,
) -> None:
    """Compare one process with ranks that divide each layer, stages that divide the layers, and
    engines that divide the requests.

    All engines are in memory at once and compute the same prompts in turns. They have the same
    number of threads in all, by default one for each process. The last lines say which is fastest;
    other programs that keep cores busy count, because ranks wait for each other.
    """
    from shmllm.bench.generation import RandomPrompts
    from shmllm.bench.parallel import DIVISIONS, ONE, divisions, measure
    from shmllm.params.sampling import SamplingParams

    refuse_options(DIVISIONS, "is what the command compares; --processes has the number")
    engine = take_engine_options(options)
    count = processes or len(os.sched_getaffinity(0))
    if count < 2:
        raise click.UsageError("this machine has one usable core: one process is fastest")
    engine["num_threads"] = engine["num_threads"] or count
    ways = divisions(count)
    engine = {option: value for option, value in engine.items() if option not in ways[ONE]}
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    prompts = RandomPrompts(random.Random(seed), input_len)
    total = len(ways) * (1 + len(num_prompts) * (num_iters + 1))
    with interruptible(), progress(total) as begin, contextlib.ExitStack() as stack:
        engines: dict[str, LLM] = {}
        refusals: list[str] = []
        for name, own in ways.items():
            begin(f"{name}, start")
            try:
                llm = stack.enter_context(_start(engine | own))
            except EngineStartError as refusal:
                if name == ONE:
                    raise
                refusals.append(f"{name}: {refusal}")
            else:
                engines[name] = llm
        facts = next(iter(engines.values())).facts
        rates = measure(engines, num_prompts, prompts, params, num_iters, begin)
    for line in refusals:
        output.show(line)
    ways = {name: own for name, own in ways.items() if name in engines}
    _report(rates, ways, engine, f"{facts.model_directory}, {facts.dtype}", output)


def _start(options: dict[str, Any]) -> LLM:
    from shmllm.frontend.llm import LLM

    return LLM(**options)


def _report(
    rates: Rates,
    ways: dict[str, dict[str, int]],
    engine: dict[str, Any],
    model: str,
    output: BenchOutput,
) -> None:
    from shmllm.bench.engine_plot import startup_svg
    from shmllm.bench.parallel import ONE, best, flags_of
    from shmllm.bench.report import number, table

    def cell(size: str, name: str) -> str:
        found = rates[int(size)]
        return f"{number(found[name])} ({found[name] / found[ONE]:.2f})"

    columns = {name: (lambda size, name=name: cell(size, name)) for name in ways}
    output.show(table("requests", list(map(str, rates)), columns))
    fastest = {size: best(found) for size, found in rates.items()}
    for size, name in fastest.items():
        output.show(f"{size} requests: {name} {flags_of(ways[name])}".rstrip())
    machine = describe_machine()
    record = {
        "benchmark": "parallel",
        "shmllm": __version__,
        "machine": machine,
        "engine": engine,
        "output_tokens_per_s": rates,
        "fastest": fastest,
    }
    bars = [
        (f"{size} requests, {name}", {"time per token": 1e6 / rate})
        for size, found in rates.items()
        for name, rate in found.items()
    ]
    title = "shmllm bench parallel"
    subtitle = f"{model}; {machine_line(machine)}"
    output.write(record, lambda: startup_svg(bars, ["time per token"], title, subtitle), title)
