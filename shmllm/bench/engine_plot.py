"""Draws the pictures of `shmllm bench latency`, `throughput` and `startup`.

This module owns the layout; `chart` draws the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from shmllm.bench import chart
from shmllm.bench.chart import MARGIN, PALETTE, WIDTH, Frame, text
from shmllm.bench.generation import Measured
from shmllm.bench.steps import StepTable, is_decode, phases_us, step_us
from shmllm.ipc.stats import PHASES

PHASE_COLOURS = dict(zip(PHASES, PALETTE, strict=True))
TOP = 70
HISTOGRAM_HEIGHT = 230
NEAR_QUANTILE = 0.02


def batches_svg(batches: Mapping[str, Measured], title: str, subtitle: str) -> str:
    """Draws histograms of TTFT, ITL and step time, and the phases of steps.

    Args:
        batches: the measurements by name.
        title: the title of the picture.
        subtitle: the machine and the engine.
    """
    parts = [
        text(MARGIN, 26, title, "title"),
        text(MARGIN, 45, f"{subtitle}; dashed: p50 and p99", "axis"),
    ]
    top = float(TOP)
    for name, measured in batches.items():
        steps = measured.all_steps()
        rows = list(phases_by_kind(steps))
        parts.append(text(MARGIN, top, name, "title"))
        parts += _histograms(measured, steps, top + 14)
        top += 14 + HISTOGRAM_HEIGHT + 24
        parts.append(text(MARGIN, top, "Phases of a step", "head"))
        parts += chart.legend(PHASE_COLOURS, MARGIN + 180, top)
        axis = "share of a step's time, from draining requests to publishing outputs"
        parts += chart.stacked_bars(rows, top + 14, PHASE_COLOURS, axis, as_shares=True)
        top += 14 + chart.bars_height(len(rows)) + 34
    return chart.svg(top - 20, parts, PHASE_COLOURS, title)


def _histograms(measured: Measured, steps: StepTable, top: float) -> Iterator[str]:
    microseconds = 1e6
    charts = (
        ("TTFT, time to first token", "requests", [v * microseconds for v in measured.ttft_s]),
        ("ITL, time between tokens", "tokens", [v * microseconds for v in measured.itl_s]),
        ("Step time", "steps", step_us(steps).tolist()),
    )
    width = (WIDTH - 2 * MARGIN) / len(charts)
    for index, (name, unit, values) in enumerate(charts):
        left = MARGIN + index * width
        if values:
            frame = Frame(left, left + width, top, top + HISTOGRAM_HEIGHT)
            yield from chart.histogram(values, frame, (1, 3, 0)[index], name, unit)


def phases_by_kind(steps: StepTable) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields (kind of steps, mean microseconds of each phase).

    The kinds are all steps, decode steps around quantiles of their duration, and steps with
    prompts.
    """
    decode = is_decode(steps)
    kinds = [("all steps, mean", steps)]
    if decode.any():
        kinds += [
            (f"decode, {name}", _around(steps[decode], share))
            for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("slowest", 1.0))
        ]
    if not decode.all():
        kinds.append(("with prompts, mean", steps[~decode]))
    for name, chosen in kinds:
        yield name, {phase: float(v.mean()) for phase, v in phases_us(chosen).items()}


def _around(steps: StepTable, share: float) -> StepTable:
    """The steps whose time lies around the quantile `share`; for 1.0 only the slowest step."""
    times = step_us(steps)
    order = np.argsort(times)
    middle = min(int(share * len(order)), len(order) - 1)
    reach = 0 if share == 1.0 else int(NEAR_QUANTILE / 2 * len(order))
    return steps[order[max(middle - reach, 0) : middle + reach + 1]]


def startup_svg(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    stages: Sequence[str],
    title: str,
    subtitle: str,
) -> str:
    """Draws process starts as stacked bars.

    Args:
        rows: (label, {stage: microseconds}), one pair per start.
        stages: the names of all stages, in order.
        title: the title of the picture.
        subtitle: the machine and the engine.
    """
    colours = dict(zip(stages, PALETTE, strict=False))
    parts = [
        text(MARGIN, 26, title, "title"),
        text(MARGIN, 45, subtitle, "axis"),
        *chart.legend(colours, MARGIN, TOP),
        *chart.stacked_bars(rows, TOP + 18, colours, "time since the process was started"),
    ]
    return chart.svg(TOP + 18 + chart.bars_height(len(rows)) + 8, parts, colours, title)
