#!/usr/bin/env python3
"""Simulates a pool of engines: which rule chooses the engine of a request best.

    python tools/simulate_pool.py [--quick] [--seed 1] [--json FILE] [--plot FILE.svg]
    python tools/simulate_pool.py --variants [--sizes 8]
    python tools/simulate_pool.py --measure
    python tools/simulate_pool.py --check [--engines 2]

Engines are a model of shmllm's: its scheduler, token budget and prefix cache, and steps that take
a + b * tokens + c * requests + d * context. Every load meets every rule with the same seed:

    systems   system prompts of about 400 tokens, whose shares follow Zipf's law
    chats     chats of four turns, each turn behind all before it
    skewed    prompts that share nothing, a few of them much longer than the others
    groups    GRPO: prompts of eight completions, all at once
    apart     the same with each completion as a request of its own
    batch     the system prompts, all at once

The first three arrive as Poisson processes. The rules are shmllm's (shmllm/client/routing.py),
vLLM's `waiting * 4 + running`, random, and consistent hashing of the first four blocks. A table
goes to stdout: cached prompt tokens, TTFT, makespan and tokens per second.

--measure fits a, b, c and d to steps of the bundled model on this machine, and uses them. --check
compares simulated times with those of real engines, and exits with 1 if one differs by more than
15 %. It needs a machine with nothing else to do and a core for each engine.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import click
from simulated_pool.experiment import COSTS, LIMITS, SHARE, grid, run_all, table
from simulated_pool.loads import LOADS
from simulated_pool.picture import svg
from simulated_pool.rules import RULES, VARIANTS

SIZES = (2, 8, 64, 1024)
QUICK_SIZES = (2, 8)
QUICK_DIVISOR = 4
HELP = (__doc__ or "").replace("\n\n    ", "\n\n\b\n    ")  # click then keeps the lines
TITLE = "Rules that choose an engine, in simulated time"


@click.command(help=HELP, context_settings={"show_default": True})
@click.option("--sizes", multiple=True, type=click.IntRange(1), default=SIZES, help="Engines.")
@click.option("--loads", multiple=True, type=click.Choice(list(LOADS)), default=tuple(LOADS))
@click.option("--cost", type=click.Choice(list(COSTS)), default="tiny", help="Whose steps.")
@click.option("--seed", default=1, help="Seed of the loads.")
@click.option("--share", default=SHARE, help="Rate of Poisson arrivals, of what engines can do.")
@click.option("--quick", is_flag=True, help="2 and 8 engines, a quarter of the requests; seconds.")
@click.option("--variants", is_flag=True, help="Compare variants of shmllm's rule.")
@click.option("--measure", is_flag=True, help="Fit the time of a step on this machine.")
@click.option("--check", "is_check", is_flag=True, help="Compare with real engines.")
@click.option("--engines", default=1, help="Real engines of --check.")
@click.option("--rounds", default=5, help="Rounds of --measure and --check.")
@click.option("--workers", default=os.cpu_count(), help="Processes that simulate.")
@click.option("--json", "json_file", type=click.File("w"), help="Also write the JSON to FILE.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write a picture (.svg, .html).")
def main(
    sizes: tuple[int, ...], loads: tuple[str, ...], cost: str, seed: int, share: float,
    quick: bool, variants: bool, measure: bool, is_check: bool, engines: int, rounds: int,
    workers: int, json_file: TextIO | None, plot: Path | None,
) -> None:  # fmt: skip
    record: dict[str, Any] = {}
    step_cost = COSTS[cost]
    if measure or is_check:
        from simulated_pool.measure import fit_steps

        from shmllm.cli.bench_output import describe_machine

        fitted = fit_steps(rounds)
        step_cost = fitted.cost
        record |= {"machine": describe_machine(), "fit": asdict(fitted)}
        click.echo(json.dumps(record["fit"], indent=2), err=True)
    if is_check:
        from simulated_pool.check import check, is_close

        found = check(step_cost, engines, rounds)
        record |= {"engines": engines, "check": found}
        click.echo(json.dumps(found, indent=2))
        _write(record, json_file)
        sys.exit(0 if is_close(found) else 1)
    chosen = QUICK_SIZES if quick and sizes == SIZES else sizes
    names = list(VARIANTS if variants else RULES)
    divisor = QUICK_DIVISOR if quick else 1
    cases = grid(loads, chosen, names, step_cost, share=share, divisor=divisor, seed=seed)
    results = run_all(cases, workers)
    click.echo(table(cases, results))
    record |= {
        "cost": asdict(step_cost),
        "limits": asdict(LIMITS),
        "share_of_capacity": share,
        "seed": seed,
        "cases": [
            {"load": case.load, "engines": case.size, "rule": case.rule, **figures}
            for case, figures in zip(cases, results, strict=True)
        ],
    }
    _write(record, json_file)
    if plot is not None:
        from shmllm.bench import chart

        chart.write(plot, svg(cases, results, TITLE), TITLE)


def _write(record: dict[str, Any], json_file: TextIO | None) -> None:
    if json_file is not None:
        json.dump(record, json_file, indent=1)
        json_file.write("\n")


if __name__ == "__main__":
    main()
