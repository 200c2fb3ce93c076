"""Compares the simulated times of loads with those of real engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean

from simulated_pool.engine import Engine, Limits, StepCost
from simulated_pool.experiment import capacity
from simulated_pool.loads import LOADS, Draw, Request, arrive
from simulated_pool.measure import Times, best, run_real
from simulated_pool.rules import RULES
from simulated_pool.run import Simulation

BOUND = 0.15
NUM_REQUESTS = 200
SHARE = 0.5
LIMITS = Limits(max_num_seqs=64)

Comparison = dict[str, dict[str, float]]


def check(cost: StepCost, num_engines: int, rounds: int) -> dict[str, Comparison]:
    """Runs system prompts in simulated time and really: at once, and as a Poisson process with half
    the rate that the engines could do.

    Returns:
        By kind of arrival and by figure: the simulated and the real seconds, and their ratio.
    """
    found = {}
    for kind in ("batch", "poisson"):
        requests = LOADS["systems"].make(Draw(3, LIMITS.block_size), num_engines, NUM_REQUESTS)
        if kind == "poisson":
            arrive(requests, SHARE * num_engines * capacity("systems", cost), 3)
        real = best(run_real(requests, LIMITS, num_engines, rounds))
        found[kind] = compare(simulate(requests, cost, num_engines), real)
    return found


def simulate(requests: Sequence[Request], cost: StepCost, num_engines: int) -> Times:
    """The times of the requests in simulated time."""
    engines = [Engine(cost, LIMITS) for _ in range(num_engines)]
    outcome = Simulation(engines, RULES["shmllm"](engines, LIMITS)).run(requests)
    return Times(outcome.end_s, fmean(outcome.ttft_s), fmean(outcome.e2e_s), outcome.busy_s)


def compare(simulated: Times, real: Times) -> Comparison:
    """Both times, and the simulated over the real one, for each figure."""
    others = asdict(real)
    return {
        name: {"simulated_s": value, "real_s": others[name], "ratio": value / others[name]}
        for name, value in asdict(simulated).items()
    }


def is_close(found: dict[str, Comparison]) -> bool:
    """Whether all simulated times are within BOUND of the real ones."""
    ratios = [each["ratio"] for kind in found.values() for each in kind.values()]
    return all(abs(ratio - 1) <= BOUND for ratio in ratios)
