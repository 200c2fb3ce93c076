"""Cases: a load, a number of engines and a rule; and their figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from shmllm.bench.summary import percentiles
from simulated_pool.engine import Engine, Limits, StepCost
from simulated_pool.loads import LOADS, Draw, arrive
from simulated_pool.rules import RULES, VARIANTS
from simulated_pool.run import Outcome, Simulation

COSTS = {
    "tiny": StepCost(405e-6, 93.7e-6, 25.2e-6, 0.0996e-6),
    "8b": StepCost(5.0e-3, 27e-6, 10e-6, 0.04e-6),
}
"""`tiny` was measured with --measure: the bundled model, one thread. `8b` is computed: 8 billion
weights in bfloat16 at 3.2 TB/s, 600 TFLOP/s, keys and values of 128 KiB a token."""

LIMITS = Limits()
SHARE = 0.75
"""The rate of Poisson arrivals: a share of what the engines complete when they are never idle and
each has all prefixes of its own."""

Figures = dict[str, float]


@dataclass(frozen=True)
class Case:
    """One simulation.

    Attributes:
        load: a name of LOADS.
        size: the number of engines.
        rule: a name of RULES or VARIANTS.
        cost: the duration of a step.
        share: see SHARE.
        divisor: divides the number of requests.
        seed: the seed of the load.
    """

    load: str
    size: int
    rule: str
    cost: StepCost
    share: float = SHARE
    divisor: int = 1
    seed: int = 1

    @property
    def num_requests(self) -> int:
        """Fewer an engine if there are many engines: 353, 176, 62 and 16 for 2, 8, 64 and 1,024."""
        return self.size * max(int(500 / self.size**0.5), 16) // self.divisor


@cache
def capacity(load: str, cost: StepCost) -> float:
    """The requests, or chats, that one engine completes in a second of work."""
    requests = LOADS[load].make(Draw(0, LIMITS.block_size), 1, 400)
    engines = [Engine(cost, LIMITS)]
    outcome = Simulation(engines, RULES["random"](engines, LIMITS)).run(requests)
    return len(requests) / outcome.busy_s


def run(case: Case) -> Outcome:
    """Runs a case."""
    load = LOADS[case.load]
    requests = load.make(Draw(case.seed, LIMITS.block_size), case.size, case.num_requests)
    if not load.is_batch:
        arrive(requests, case.share * case.size * capacity(case.load, case.cost), case.seed)
    engines = [Engine(case.cost, LIMITS) for _ in range(case.size)]
    rule = {**RULES, **VARIANTS}[case.rule](engines, LIMITS)
    return Simulation(engines, rule).run(requests)


def figures(case: Case) -> Figures:
    """Runs a case. Returns its figures: the share of prompt tokens that were cached, TTFT in ms,
    seconds until the last request ended, generated tokens per second, and the requests of the
    engine with the most over the mean."""
    outcome = run(case)
    ttft_ms = percentiles([1e3 * each for each in outcome.ttft_s])
    return {
        "hit_rate": outcome.num_cached / outcome.num_prompt,
        "ttft_p50_ms": ttft_ms["p50"],
        "ttft_p99_ms": ttft_ms["p99"],
        "makespan_s": outcome.end_s,
        "tokens_per_s": outcome.num_outputs / outcome.end_s,
        "most_over_mean": max(outcome.num_sent) * case.size / sum(outcome.num_sent),
    }


def run_all(cases: Sequence[Case], workers: int) -> list[Figures]:
    """Runs cases in several processes, the largest first, or one after the other in this one."""
    if workers == 1:
        return [*map(figures, cases)]
    order = sorted(range(len(cases)), key=lambda index: -cases[index].size)
    with ProcessPoolExecutor(workers) as pool:
        found = pool.map(figures, [cases[index] for index in order])
        by_index = dict(zip(order, found, strict=True))
    return [by_index[index] for index in range(len(cases))]


def grid(
    loads: Sequence[str], sizes: Sequence[int], rules: Sequence[str], cost: StepCost, **options: Any
) -> list[Case]:
    """A case for each load, size and rule, with the same further fields."""
    return [
        Case(load, size, rule, cost, **options) for load, size, rule in product(loads, sizes, rules)
    ]


def table(cases: Sequence[Case], results: Sequence[Mapping[str, float]]) -> str:
    """The figures as a Markdown table."""
    lines = [
        "| load | engines | rule | hits | TTFT p50 ms | TTFT p99 ms | makespan s | tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, each in zip(cases, results, strict=True):
        lines.append(
            f"| {case.load} | {case.size:,} | {case.rule} | {100 * each['hit_rate']:.1f} % "
            f"| {each['ttft_p50_ms']:,.1f} | {each['ttft_p99_ms']:,.1f} "
            f"| {each['makespan_s']:.2f} | {each['tokens_per_s']:,.0f} |"
        )
    return "\n".join(lines)
