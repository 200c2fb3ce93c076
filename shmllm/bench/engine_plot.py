"""Pictures of what an engine's benchmarks measured.

Owns what is drawn where; `chart` draws.
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
    """Histograms of TTFT, ITL and step time, and the anatomy of steps.

    Args:
        batches: what was measured, by name.
        title: of the picture.
        subtitle: where and of what.
    """
    parts = [
        text(MARGIN, 26, title, "title"),
        text(MARGIN, 45, f"{subtitle}; dashed: p50 and p99", "axis"),
    ]
    top = float(TOP)
    for name, measured in batches.items():
        steps = measured.all_steps()
        rows = list(anatomy(steps))
        parts.append(text(MARGIN, top, name, "title"))
        parts += _histograms(measured, steps, top + 14)
        top += 14 + HISTOGRAM_HEIGHT + 24
        parts.append(text(MARGIN, top, "What a step is made of", "head"))
        parts += chart.legend(PHASE_COLOURS, MARGIN + 180, top)
        axis = "share of a step's time, from taking requests to published outputs"
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


def anatomy(steps: StepTable) -> Iterator[tuple[str, dict[str, float]]]:
    """(which steps, mean microseconds of each phase): all, those that only decode, by how
    long they took, and those with prompts in them."""
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
    """The steps whose time lies around a quantile; of the largest, only that one."""
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
    """Starts as stacked bars.

    Args:
        rows: (label, {stage: microseconds}).
        stages: all of them, in order.
        title: of the picture.
        subtitle: where and of what.
    """
    colours = dict(zip(stages, PALETTE, strict=False))
    parts = [
        text(MARGIN, 26, title, "title"),
        text(MARGIN, 45, subtitle, "axis"),
        *chart.legend(colours, MARGIN, TOP),
        *chart.stacked_bars(rows, TOP + 18, colours, "time since the process was started"),
    ]
    return chart.svg(TOP + 18 + chart.bars_height(len(rows)) + 8, parts, colours, title)
