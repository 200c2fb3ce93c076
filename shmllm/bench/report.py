"""Text tables of benchmark figures, and the speed-up of each variant over the reference.

This module owns the layout of the tables; it must not know how the figures were measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from shmllm.bench.measure import Figures, Sample
from shmllm.bench.variants import REFERENCE_VARIANT

Results = Mapping[str, Mapping[str, Figures]]

TABLES = (
    ("p50_us", "round trip, median, us"),
    ("p99_us", "round trip, 99th percentile, us"),
    ("cpu_us", "CPU time of both processes per round trip, us"),
    ("mib_per_s", "one way, MiB/s"),
)


def table(title: str, cases: Sequence[str], columns: Mapping[str, Callable[[str], str]]) -> str:
    """Formats a table as text.

    Args:
        title: the heading of the first column.
        cases: the names of the rows.
        columns: by heading, a function from a row's name to the text of the cell.

    Returns:
        The table without rows that hold only "-"; "" if all cells are empty.
    """
    cells = [[case, *(cell(case) for cell in columns.values())] for case in cases]
    if all(text in ("", "-") for row in cells for text in row[1:]):
        return ""
    rows = [[title, *columns], *(row for row in cells if set(row[1:]) != {"-"})]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = [
        "  ".join(
            text.ljust(width) if index == 0 else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def number(value: float | None) -> str:
    """Formats a number with about three digits; None becomes "-"."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(share: float | None) -> str:
    """Formats a share of 0 to 1; None becomes "-"."""
    return "-" if share is None else f"{100 * share:.1f} %"


def figure_tables(results: Results, cases: Sequence[str]) -> str:
    """One table per figure, with the cases as rows and the variants as columns."""

    def cell(variant: str, key: str) -> Callable[[str], str]:
        return lambda case: number(results[variant].get(case, {}).get(key))

    tables = (
        table(title, cases, {variant: cell(variant, key) for variant in results})
        for key, title in TABLES
    )
    return "\n".join(filter(None, tables))


def speedup(ours: Sample, theirs: Sample) -> tuple[float, float, float]:
    """The ratio of their median to ours: over all rounds, in the worst round, in the best round."""
    each = [
        other / own
        for own, other in zip(ours.round_medians_ns, theirs.round_medians_ns, strict=True)
    ]
    overall = statistics.median(theirs.durations_ns) / statistics.median(ours.durations_ns)
    return overall, min(each), max(each)


def speedup_table(
    samples: Mapping[tuple[str, str], Sample], cases: Sequence[str], variants: Sequence[str]
) -> str:
    """A table of each variant's speed-up over the reference; "" if the reference did not run."""

    def cell(variant: str) -> Callable[[str], str]:
        def text(case: str) -> str:
            ours, theirs = samples.get((variant, case)), samples.get((REFERENCE_VARIANT, case))
            if ours is None or theirs is None:
                return "-"
            overall, worst, best = speedup(ours, theirs)
            spread = "" if worst == best else f" ({number(worst)}-{number(best)})"
            return number(overall) + spread

        return text

    others = [variant for variant in variants if variant != REFERENCE_VARIANT]
    title = f"{REFERENCE_VARIANT}'s median over this variant's (by round)"
    return table(title, cases, {variant: cell(variant) for variant in others})
