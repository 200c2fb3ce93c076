"""Draws TTFT by load, number of engines and rule.

A panel is a load, a group of lines a number of engines. The line of a rule goes from a dot at the
median to the 99th percentile, on a logarithmic axis. `bench.chart` draws the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shmllm.bench import chart
from shmllm.bench.axes import LogAxis
from shmllm.bench.chart import MARGIN, PALETTE, WIDTH, Frame, text
from simulated_pool.experiment import Case

COLUMNS = 3
LEFT, TOP, BOTTOM, GAP = 62, 100, 30, 24
LINE_HEIGHT, GROUP_GAP = 9, 10
COLOURS = [PALETTE[index] for index in (1, 4, 5, 3, 0, 2, 6)]

Results = Sequence[Mapping[str, float]]


def svg(cases: Sequence[Case], results: Results, title: str) -> str:
    """The picture as SVG.

    Args:
        cases: the cases.
        results: the `experiment.figures` of each.
        title: the title of the picture.
    """
    rules, loads, sizes = (
        list(dict.fromkeys(getattr(case, name) for case in cases))
        for name in ("rule", "load", "size")
    )
    found = {(c.load, c.size, c.rule): each for c, each in zip(cases, results, strict=True)}
    colours = dict(zip(rules, COLOURS, strict=False))
    group_height = LINE_HEIGHT * len(rules) + GROUP_GAP
    height = group_height * len(sizes)
    width = (WIDTH - MARGIN) / COLUMNS
    parts = [
        text(MARGIN, 26, title, "title"),
        text(MARGIN, 45, "TTFT; dot: median, tail: 99th percentile", "axis"),
        *chart.legend(colours, MARGIN, 68),
    ]
    for number, load in enumerate(loads):
        left = number % COLUMNS * width + LEFT
        top = TOP + number // COLUMNS * (height + BOTTOM + GAP)
        frame = Frame(left, left + width - LEFT - 12, top, top + height)
        every = [found[load, size, rule] for size in sizes for rule in rules]
        axis = LogAxis(
            min(1e3 * each["ttft_p50_ms"] for each in every),
            max(1e3 * each["ttft_p99_ms"] for each in every),
            frame.left + 4,
            frame.right - 8,
        )
        parts += [text(frame.left, top - 6, load, "head"), *chart.log_grid(axis, frame)]
        for row, size in enumerate(sizes):
            y = top + row * group_height + GROUP_GAP / 2
            parts.append(text(frame.left - 6, y + group_height / 2, f"{size:,}", "axis end"))
            lines = [found[load, size, rule] for rule in rules]
            parts += _lines(lines, axis, y)
    rows = -(-len(loads) // COLUMNS)
    return chart.svg(TOP + rows * (height + BOTTOM + GAP), parts, colours, title)


def _lines(lines: Results, axis: LogAxis, top: float) -> Iterator[str]:
    """The lines of a group, one for each rule."""
    for index, each in enumerate(lines):
        y = top + (index + 0.5) * LINE_HEIGHT
        begin, end = (axis.place(1e3 * each[name]) for name in ("ttft_p50_ms", "ttft_p99_ms"))
        yield (
            f'<path class="s{index}" stroke-width="2" d="M{begin:.1f} {y:.1f}H{end:.1f}"/>'
            f'<circle class="f{index}" cx="{begin:.1f}" cy="{y:.1f}" r="3.2"/>'
        )
