"""Runs the comparison of all variants in all cases, in interleaved rounds.

This module owns the order of the runs, the number of messages in each run, and the figures computed
from them. A round runs each case on all variants before it starts the next case, so that other load
on the machine affects all variants alike. Only one pair of processes runs at a time; the others
sleep.

The JSON record of `shmllm bench ipc` ("arms" are the variants):

    {"machine": {...}, "skipped": [...], "arms": {VARIANT: {CASE: {
        "p50_us", "p99_us", "p999_us", "max_us",    round trip, microseconds
        "cpu_us",                                   CPU time of both processes per round trip
        "messages",                                 number of timed round trips
        "messages_per_s", "mib_per_s"               one way, rtt-* only
    }}}}
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from shmllm.bench.cases import CASES, Case, Payload
from shmllm.bench.pair import Pair
from shmllm.bench.variants import Variant
from shmllm.bench.worker import Command

PROBE_MESSAGES = 5
FEWEST_MESSAGES = 5
MOST_MESSAGES = 20_000
FEWEST_WINDOWS = 3
STREAM_SHARE = 0.25
PIPELINING = 4

Figures = dict[str, float]
Report = Callable[[str], None]


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        rounds: number of rounds through all cases and variants.
        seconds: measuring time of each variant in each case over all rounds; streams add a quarter.
        messages: number of messages of each variant in each case and round, instead of `seconds`.
        is_pinned: whether each process of a pair stays on one CPU.
    """

    rounds: int
    seconds: float
    messages: int | None = None
    is_pinned: bool = False


@dataclass
class Sample:
    """The measurements of one variant in one case.

    Attributes:
        durations_ns: duration of each timed round trip, in nanoseconds.
        cpu_ns: CPU time of both processes for these round trips, in nanoseconds.
        round_medians_ns: median duration of each round, in nanoseconds.
        stream_messages: number of messages sent one way for throughput.
        stream_ns: time that these messages took, in nanoseconds.
    """

    durations_ns: array[int] = field(default_factory=lambda: array("q"))
    cpu_ns: int = 0
    round_medians_ns: list[float] = field(default_factory=list)
    stream_messages: int = 0
    stream_ns: int = 0

    def add(self, durations: array[int], cpu_ns: int) -> None:
        """Adds the round trips of one round."""
        self.durations_ns.extend(durations)
        self.cpu_ns += cpu_ns
        self.round_medians_ns.append(statistics.median(durations))

    def figures(self, case: Case) -> Figures:
        """The figures of this sample; see the record at the top of the module."""
        ordered = sorted(self.durations_ns)
        figures = {
            "p50_us": percentile(ordered, 0.5) / 1e3,
            "p99_us": percentile(ordered, 0.99) / 1e3,
            "p999_us": percentile(ordered, 0.999) / 1e3,
            "max_us": ordered[-1] / 1e3,
            "cpu_us": self.cpu_ns / len(ordered) / 1e3,
            "messages": len(ordered),
        }
        if self.stream_ns:
            rate = self.stream_messages / self.stream_ns * 1e9
            figures["messages_per_s"] = rate
            figures["mib_per_s"] = rate * case.size / 2**20
        return figures


def percentile(ordered: Sequence[int], share: float) -> int:
    """The nearest-rank percentile of sorted values; `share` is between 0 and 1."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Comparison:
    """Runs all pairs and keeps their measurements.

    Args:
        variants: the variants, in the order in which they run.
        cases: the names of the cases, in the order in which they run.
        effort: how long to measure.

    Attributes:
        samples: the measurements by (variant name, case name).
    """

    def __init__(self, variants: Sequence[Variant], cases: Sequence[str], effort: Effort) -> None:
        self._effort = effort
        self._runs = [
            (CASES[name], variant)
            for name in cases
            for variant in variants
            if not variant.skip_reason(CASES[name])
        ]
        self._variants = [
            variant for variant in variants if any(variant is other for _, other in self._runs)
        ]
        self.samples = {(variant.name, case.name): Sample() for case, variant in self._runs}

    @property
    def num_runs(self) -> int:
        """The number of runs over all rounds."""
        return len(self._runs) * self._effort.rounds

    def run(self, report: Report) -> None:
        """Starts all pairs, measures, and ends the pairs.

        Args:
            report: is called with the name of each run before the run starts.

        Raises:
            IpcError: a pair died.
        """
        with ExitStack() as stack:
            pairs = {
                variant.name: stack.enter_context(closing(Pair(variant, self._effort.is_pinned)))
                for variant in self._variants
            }
            for pair in pairs.values():
                pair.wait_ready()
            for number in range(self._effort.rounds):
                for case, variant in self._runs:
                    report(f"round {number + 1} {case.name} {variant.name}")
                    self._run_one(pairs[variant.name], case)

    def results(self) -> dict[str, dict[str, Figures]]:
        """The figures by variant and case."""
        found: dict[str, dict[str, Figures]] = {variant.name: {} for variant in self._variants}
        for (variant, case), sample in self.samples.items():
            found[variant][case] = sample.figures(CASES[case])
        return found

    def _run_one(self, pair: Pair, case: Case) -> None:
        sample = self.samples[pair.variant.name, case.name]
        probe, _ = pair.run(Command(case.name, False, PROBE_MESSAGES, PROBE_MESSAGES))
        one_s = statistics.median(probe) / 1e9
        seconds = self._effort.seconds / self._effort.rounds
        count = self._effort.messages or round(seconds / one_s)
        count = max(FEWEST_MESSAGES, min(count, MOST_MESSAGES))
        sample.add(*pair.run(Command(case.name, False, count, count // 10)))
        if case.payload is Payload.BYTES:
            budget = STREAM_SHARE * PIPELINING * seconds / one_s
            windows = round((self._effort.messages or budget) / case.window)
            num_messages = case.window * max(FEWEST_WINDOWS, windows)
            durations, _ = pair.run(Command(case.name, True, num_messages, 0))
            sample.stream_messages += num_messages
            sample.stream_ns += durations[0]
