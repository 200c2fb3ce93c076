"""The comparison: all arms, all cases, in interleaved rounds.

Owns the order of the runs, how many messages each gets, and what is computed from them.
In a round every case goes through all arms before the next case begins, so that whatever
else the machine does meets all of them; while one pair runs the others sleep.

    {"machine": {...}, "skipped": [...], "arms": {ARM: {CASE: {
        "p50_us", "p99_us", "p999_us", "max_us",    round trip, microseconds
        "cpu_us",                                   per round trip, both processes together
        "messages",                                 round trips that were timed
        "messages_per_s", "mib_per_s"               one way, rtt-* only
    }}}}
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
        rounds: turns through all cases and arms.
        seconds: of each arm in each case, all rounds together; a quarter more for streams.
        messages: of each arm in each case and round, instead of `seconds`.
        is_pinned: whether the processes of a pair stay on one CPU each.
    """

    rounds: int
    seconds: float
    messages: int | None = None
    is_pinned: bool = False


@dataclass
class Sample:
    """What one arm did in one case."""

    durations_ns: array[int] = field(default_factory=lambda: array("q"))
    cpu_ns: int = 0
    round_medians_ns: list[float] = field(default_factory=list)
    stream_messages: int = 0
    stream_ns: int = 0

    def add(self, durations: array[int], cpu_ns: int) -> None:
        self.durations_ns.extend(durations)
        self.cpu_ns += cpu_ns
        self.round_medians_ns.append(statistics.median(durations))

    def figures(self, case: Case) -> Figures:
        """In microseconds; throughput for plain bytes."""
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
    """The nearest-rank percentile of sorted values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Comparison:
    """Runs pairs and keeps what they measured.

    Args:
        arms: in the order of their turns.
        cases: names, likewise.
        effort: how long.
    """

    def __init__(self, variants: Sequence[Variant], cases: Sequence[str], effort: Effort) -> None:
        self._effort = effort
        self._runs = [
            (CASES[name], variant)
            for name in cases
            for variant in variants
            if not variant.why_not(CASES[name])
        ]
        self._variants = [
            variant for variant in variants if any(variant is other for _, other in self._runs)
        ]
        self.samples = {(variant.name, case.name): Sample() for case, variant in self._runs}

    @property
    def num_runs(self) -> int:
        """How many runs there are."""
        return len(self._runs) * self._effort.rounds

    def run(self, report: Report) -> None:
        """Start all pairs, measure, end them.

        Args:
            report: called with the name of each run before it starts.

        Raises:
            IpcError: a pair died.
        """
        with ExitStack() as stack:
            pairs = {
                variant.name: stack.enter_context(Pair(variant, self._effort.is_pinned))
                for variant in self._variants
            }
            for pair in pairs.values():
                pair.wait_ready()
            for number in range(self._effort.rounds):
                for case, variant in self._runs:
                    report(f"round {number + 1} {case.name} {variant.name}")
                    self._run_one(pairs[variant.name], case)

    def results(self) -> dict[str, dict[str, Figures]]:
        """Figures by arm and case."""
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
