"""`shmllm bench latency` and `throughput`: batches of requests on an engine."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shmllm.cli.bench_output import (
    describe_machine,
    json_option,
    machine_line,
    plot_option,
    progress,
    say,
    write_json,
    write_plot,
)
from shmllm.cli.interrupts import interruptible
from shmllm.cli.options import engine_options, take_engine_options
from shmllm.version import __version__

if TYPE_CHECKING:
    from shmllm.bench.generation import GivenPrompts, Measured, RandomPrompts
    from shmllm.frontend.llm import LLM
    from shmllm.params.sampling import SamplingParams

Command = TypeVar("Command", bound=Callable[..., Any])
COUNT = click.IntRange(min=1)

_SHARED_OPTIONS = (
    click.option("--n", type=COUNT, default=1, show_default=True, help="Completions per prompt."),
    click.option(
        "--temperature",
        type=click.FloatRange(min=0),
        default=0.0,
        show_default=True,
        help="0 is greedy.",
    ),
    click.option("--disable-detokenize", is_flag=True, help="Make no text of the tokens."),
    click.option("--seed", default=0, show_default=True, help="Of the random prompts."),
    click.option("--attach", metavar="NAME", help="Measure a running engine."),
    json_option,
    plot_option,
    engine_options,
)


def _shared_options(command: Command) -> Command:
    for option in reversed(_SHARED_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True)
class BenchPlan:
    """What to measure.

    Attributes:
        kind: name of the benchmark.
        prompts: makes the batches.
        sizes: of the batches, each measured on its own.
        output_len: tokens of each completion.
        num_iters: batches of each size.
        num_iters_warmup: batches before them that are not measured.
    """

    kind: str
    prompts: RandomPrompts | GivenPrompts
    sizes: Sequence[int]
    output_len: int
    num_iters: int
    num_iters_warmup: int


@click.command()
@click.option("--input-len", type=COUNT, default=32, show_default=True)
@click.option("--output-len", type=COUNT, default=128, show_default=True)
@click.option("--batch-size", type=COUNT, default=8, show_default=True)
@click.option("--num-iters-warmup", type=click.IntRange(min=0), default=10, show_default=True)
@click.option("--num-iters", type=COUNT, default=30, show_default=True)
@_shared_options
def latency(
    input_len: int,
    output_len: int,
    batch_size: int,
    num_iters: int,
    num_iters_warmup: int,
    seed: int,
    **options: Any,
) -> None:
    """One batch of random prompts, again and again: how long it takes.

    Prints the batch's latency, and over all requests time to first token (TTFT, from
    submission), time between tokens (ITL), mean time per token after the first (TPOT), time to
    the last (E2E), and the time of the engine's steps, by phase. No prompt is sent twice.
    """
    from shmllm.bench.generation import RandomPrompts

    prompts = RandomPrompts(random.Random(seed), input_len)
    _measure(
        BenchPlan("latency", prompts, (batch_size,), output_len, num_iters, num_iters_warmup),
        options,
    )


@click.command()
@click.option(
    "--num-prompts",
    type=COUNT,
    multiple=True,
    default=(1, 16, 64),
    show_default=True,
    help="Requests sent at once. Can be given several times.",
)
@click.option(
    "--dataset-name",
    type=click.Choice(["random", "custom"]),
    default="random",
    show_default=True,
    help='custom: lines of JSON with a "prompt" in --dataset-path.',
)
@click.option("--dataset-path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--input-len", type=COUNT, default=128, show_default=True, help="Of random prompts.")
@click.option(
    "--prefix-len",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Tokens that all random prompts of a batch begin with, before --input-len others.",
)
@click.option("--output-len", type=COUNT, default=128, show_default=True)
@click.option("--num-iters", type=COUNT, default=3, show_default=True)
@click.option("--num-iters-warmup", type=click.IntRange(min=0), default=1, show_default=True)
@_shared_options
def throughput(
    num_prompts: Sequence[int],
    dataset_name: str,
    dataset_path: Path | None,
    input_len: int,
    prefix_len: int,
    output_len: int,
    num_iters: int,
    num_iters_warmup: int,
    seed: int,
    **options: Any,
) -> None:
    """Batches of prompts without stopping early: tokens a second.

    The rate of each size is that of the iteration with the median rate; latencies are of all
    iterations, as `shmllm bench latency` has them. No random prompt is sent twice, so the
    prefix cache helps nobody unless there is a --prefix-len.
    """
    from shmllm.bench.generation import GivenPrompts, RandomPrompts

    if (dataset_name == "custom") != (dataset_path is not None):
        raise click.UsageError("--dataset-path is for --dataset-name custom, and needed there")
    prompts: RandomPrompts | GivenPrompts = RandomPrompts(
        random.Random(seed), input_len, prefix_len
    )
    if dataset_path is not None:
        prompts = GivenPrompts(_read_prompts(dataset_path))
    _measure(
        BenchPlan("throughput", prompts, num_prompts, output_len, num_iters, num_iters_warmup),
        options,
    )


def _read_prompts(path: Path) -> list[str]:
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompts.append(str(json.loads(line)["prompt"]))
        except (ValueError, KeyError, TypeError):
            raise click.UsageError(
                f'{path}, line {number}: no JSON object with a "prompt"'
            ) from None
    if not prompts:
        raise click.UsageError(f"{path} has no prompts")
    return prompts


def _measure(plan: BenchPlan, options: dict[str, Any]) -> None:
    from shmllm.bench.generation import Measured
    from shmllm.cli.session import CommandSession
    from shmllm.params.sampling import SamplingParams

    engine = take_engine_options(options)
    params = SamplingParams(
        n=options["n"],
        temperature=options["temperature"],
        max_tokens=plan.output_len,
        ignore_eos=True,
        detokenize=not options["disable_detokenize"],
    )
    session = CommandSession(options["attach"], engine)
    batches = {size: Measured() for size in plan.sizes}
    with interruptible(), session.open() as llm:
        session.say_what_answers(llm)
        processor = llm.facts.processor
        facts = {k: v for k, v in asdict(llm.facts).items() if k != "model_directory"}
        _run(plan, llm, params, batches)
    machine = describe_machine()
    setting = {
        "shmllm": __version__,
        "machine": machine,
        "engine": engine if options["attach"] is None else {"attach": options["attach"]},
        "facts": facts,
        **{key: options[key] for key in ("n", "temperature", "disable_detokenize")},
        "output_len": plan.output_len,
        "num_iters": plan.num_iters,
    }
    model = options["attach"] or engine["model"]
    subtitle = (
        f"{model}, {facts['dtype']}, {processor}; {machine_line(machine)}; "
        f"{plan.num_iters} times {plan.output_len} output tokens"
    )
    _report(plan.kind, batches, setting, subtitle, options)


def _run(plan: BenchPlan, llm: LLM, params: SamplingParams, batches: dict[int, Measured]) -> None:
    from shmllm.bench.generation import Measured, run_batch
    from shmllm.bench.steps import StepFollower
    from shmllm.monitor.find import engine_of_this_process
    from shmllm.monitor.sample import Watch

    engine = engine_of_this_process()
    assert engine is not None
    watch = Watch(engine)
    follower = StepFollower(watch.step_log())
    try:
        with progress(len(plan.sizes) * (plan.num_iters_warmup + plan.num_iters)) as begin:
            for size, measured in batches.items():
                for iteration in range(-plan.num_iters_warmup, plan.num_iters):
                    begin(f"{size} requests")
                    prompts = plan.prompts.batch(llm, size)
                    target = measured if iteration >= 0 else Measured()
                    run_batch(llm, follower, prompts, params, target)
    finally:
        watch.close()
    if follower.num_missed:
        click.echo(f"{follower.num_missed} steps were overwritten before they were seen", err=True)


def _report(
    kind: str,
    batches: dict[int, Measured],
    setting: dict[str, Any],
    subtitle: str,
    options: dict[str, Any],
) -> None:
    from shmllm.bench.engine_plot import batches_svg
    from shmllm.bench.summary import latency_table, phase_table, summary

    results = {size: summary(measured) for size, measured in batches.items()}
    named = {_requests(size): result for size, result in results.items()}
    json_file = options["json_file"]
    for text in (_headline(kind, named), latency_table(named), phase_table(named)):
        say(text, json_file)
    record: dict[str, Any] = {"benchmark": kind, **setting}
    if kind == "latency":
        [(size, measured)] = batches.items()
        result = results[size]
        # The names that vLLM's benchmark has for these.
        record |= {
            "batch_size": size,
            "avg_latency": result["latency_s"]["mean"],
            "latencies": measured.seconds,
            "percentiles": {
                key[1:]: value for key, value in result["latency_s"].items() if key[0] == "p"
            },
            **result,
        }
    else:
        record["results"] = [{"num_prompts": size, **found} for size, found in results.items()]
    write_json(record, json_file)
    title = f"shmllm bench {kind}"
    pictured = {_requests(size): measured for size, measured in batches.items()}
    write_plot(options["plot_path"], lambda: batches_svg(pictured, title, subtitle), title)


def _requests(size: int) -> str:
    return f"{size} request" if size == 1 else f"{size} requests"


def _headline(kind: str, named: dict[str, dict[str, Any]]) -> str:
    """The figures that a benchmark is run for."""
    from shmllm.bench.report import number, table

    def column(find: Callable[[dict[str, Any]], float | None]) -> Callable[[str], str]:
        return lambda name: number(find(named[name]))

    columns = {
        "tokens/s": column(lambda r: r["output_tokens_per_s"]),
        "with prompts": column(lambda r: r["total_tokens_per_s"]),
    }
    if kind == "latency":
        columns |= {f"{p}, s": column(_latency(p)) for p in ("mean", "p50", "p90", "p99")}
    columns["slowest decode step / median"] = column(lambda r: r["slowest_decode_step_over_median"])
    return table("", list(named), columns)


def _latency(which: str) -> Callable[[dict[str, Any]], float]:
    return lambda result: float(result["latency_s"][which])
