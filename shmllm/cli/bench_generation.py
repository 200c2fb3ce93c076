"""`shmllm bench latency` and `throughput`: measure batches of requests on an engine."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shmllm.cli.bench_output import (
    BenchOutput,
    describe_machine,
    machine_line,
    output_options,
    progress,
)
from shmllm.cli.interrupts import interruptible
from shmllm.cli.options import bench_engine_options, take_engine_options
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
        help="Sampling temperature; 0 is greedy.",
    ),
    click.option("--disable-detokenize", is_flag=True, help="Do not convert tokens to text."),
    click.option("--seed", default=0, show_default=True, help="Seed of the random prompts."),
    click.option("--attach", metavar="NAME", help="Measure a running engine."),
    output_options,
    bench_engine_options,
)


def _shared_options(command: Command) -> Command:
    for option in reversed(_SHARED_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True)
class BenchPlan:
    """The batches that a benchmark measures.

    Attributes:
        kind: the name of the benchmark.
        prompts: the source of the prompts.
        sizes: the batch sizes; each size is measured separately.
        output_len: number of tokens in each completion.
        num_iters: number of measured batches of each size.
        num_iters_warmup: number of batches before them that are not measured.
    """

    kind: str
    prompts: RandomPrompts | GivenPrompts
    sizes: Sequence[int]
    output_len: int
    num_iters: int
    num_iters_warmup: int


def _length_options(
    input_len: int, num_iters_warmup: int, num_iters: int
) -> Callable[[Command], Command]:
    """The options of both benchmarks whose defaults differ between them."""

    def add(command: Command) -> Command:
        for option in (
            _count_option("--num-iters", num_iters, "Measured batches of each size."),
            _count_option("--num-iters-warmup", num_iters_warmup, "Unmeasured batches first.", 0),
            _count_option("--output-len", 128, "Tokens of each completion."),
            _count_option("--input-len", input_len, "Tokens of each random prompt."),
        ):
            command = option(command)
        return command

    return add


def _count_option(
    name: str, default: int, text: str, least: int = 1
) -> Callable[[Command], Command]:
    return click.option(
        name, type=click.IntRange(min=least), default=default, show_default=True, help=text
    )


@click.command()
@_count_option("--batch-size", 8, "Requests in the batch.")
@_length_options(input_len=32, num_iters_warmup=10, num_iters=30)
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
    """Measure the latency of one batch of random prompts, repeatedly.

    Prints the latency of the batch; over all requests the time to first token (TTFT, from
    submission), the time between tokens (ITL), the mean time per token after the first (TPOT) and
    the time to the last token (E2E); and the time of the engine's steps by phase. Every prompt is
    different.
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
    help="Requests sent at once. May be given several times.",
)
@click.option(
    "--dataset-name",
    type=click.Choice(["random", "custom"]),
    default="random",
    show_default=True,
    help="random: random tokens; custom: the prompts in --dataset-path.",
)
@click.option(
    "--dataset-path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='JSON lines, each with a "prompt".',
)
@_count_option("--prefix-len", 0, "Leading tokens that the random prompts of a batch share.", 0)
@_length_options(input_len=128, num_iters_warmup=1, num_iters=3)
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
    """Measure tokens/s of batches of prompts, with completions of a fixed length.

    The rate of each size is that of the iteration with the median rate. The latencies are those of
    all iterations, in the form of `shmllm bench latency`. Every random prompt is different, so the
    prefix cache has no hits unless --prefix-len is given.
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
    """Runs the plan on an engine and writes the figures."""
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
        session.describe_engine(llm)
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
    _report(plan.kind, batches, setting, subtitle, options["output"])


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
        click.echo(f"{follower.num_missed} steps were overwritten before they were read", err=True)


def _report(
    kind: str,
    batches: dict[int, Measured],
    setting: dict[str, Any],
    subtitle: str,
    output: BenchOutput,
) -> None:
    from shmllm.bench.engine_plot import batches_svg
    from shmllm.bench.summary import latency_table, phase_table, summary

    results = {size: summary(measured) for size, measured in batches.items()}
    named = {_requests(size): result for size, result in results.items()}
    for table in (_headline(kind, named), latency_table(named), phase_table(named)):
        output.show(table)
    record: dict[str, Any] = {"benchmark": kind, **setting}
    if kind == "latency":
        [(size, measured)] = batches.items()
        result = results[size]
        # vLLM's benchmark uses these names.
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
    title = f"shmllm bench {kind}"
    named_batches = {_requests(size): measured for size, measured in batches.items()}
    output.write(record, lambda: batches_svg(named_batches, title, subtitle), title)


def _requests(size: int) -> str:
    return f"{size} request" if size == 1 else f"{size} requests"


def _headline(kind: str, named: dict[str, dict[str, Any]]) -> str:
    """The table of the benchmark's main figures."""
    from shmllm.bench.report import number, percent, table

    def column(find: Callable[[dict[str, Any]], float | None]) -> Callable[[str], str]:
        return lambda name: number(find(named[name]))

    columns = {
        "tokens/s": column(lambda r: r["output_tokens_per_s"]),
        "with prompts": column(lambda r: r["total_tokens_per_s"]),
    }
    if kind == "latency":
        columns |= {f"{p}, s": column(_latency(p)) for p in ("mean", "p50", "p90", "p99")}
    if any(result["draft_tokens"] for result in named.values()):
        columns |= {
            "steps": column(lambda r: r["num_steps"]),
            "drafts accepted": lambda name: percent(named[name]["draft_acceptance_rate"]),
            "tokens/request and step": column(lambda r: r["tokens_per_request_and_decode_step"]),
        }
    columns["slowest decode step / median"] = column(lambda r: r["slowest_decode_step_over_median"])
    return table("", list(named), columns)


def _latency(which: str) -> Callable[[dict[str, Any]], float]:
    return lambda result: float(result["latency_s"][which])
