"""Draws the picture of `shmllm bench ipc`.

This module owns the layout; `chart` draws the parts. A row is a case, and the logarithmic axis is
the time of a round trip. Each variant has a line in a row, with a dot at the median and a tail to
the 99th percentile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from shmllm.bench import chart
from shmllm.bench.axes import LogAxis
from shmllm.bench.chart import WIDTH, Frame, text
from shmllm.bench.measure import Figures

Results = Mapping[str, Mapping[str, Figures]]

LEFT, RIGHT, TOP, BOTTOM = 170, 30, 84, 44
LINE_HEIGHT, ROW_GAP = 9, 8
DOT_RADIUS = 3.4
COLOURS = {
    "shm-latency": ("#08519c", "#4a9eea"),
    "shm-balanced": ("#3182bd", "#85c0f0"),
    "shm-idle": ("#9ecae1", "#c6dff2"),
    "zmq": ("#d94801", "#ff7f3f"),
    "zmq-nocopy": ("#fdae6b", "#ffcc99"),
    "pipe": ("#6a51a3", "#a78fe0"),
    "queue": ("#969696", "#b5b5b5"),
    "faster-fifo": ("#238b45", "#5fc97e"),
    "iceoryx2": ("#dd1c77", "#ff6fb0"),
}
OTHER_COLOUR = ("#000000", "#ffffff")
TITLE = "Round trip between two Python processes"


def svg(results: Results, cases: Sequence[str], subtitle: str) -> str:
    """Draws the whole picture as SVG.

    Args:
        results: the figures by variant and case.
        cases: the names of the cases, from top to bottom.
        subtitle: the line under the title.
    """
    colours = {variant: COLOURS.get(variant, OTHER_COLOUR) for variant in results}
    shown = [case for case in cases if any(case in figures for figures in results.values())]
    every = [figures[case] for figures in results.values() for case in shown if case in figures]
    lowest = min(figures["p50_us"] for figures in every)
    highest = max(figures["p99_us"] for figures in every)
    row_height = LINE_HEIGHT * len(colours) + ROW_GAP
    height = TOP + row_height * len(shown) + BOTTOM
    frame = Frame(LEFT, WIDTH - RIGHT, TOP, height - BOTTOM)
    axis = LogAxis(lowest, highest, frame.left, frame.right, whole_decades=True)
    axis_name = "one message with encoding and decoding, and its acknowledgement (logarithmic)"
    parts = [
        text(16, 26, TITLE, "title"),
        text(16, 45, f"{subtitle}; dot: median, tail: 99th percentile", "axis"),
        *chart.legend(colours, 16, 68),
        *_rows(shown, row_height),
        *chart.log_grid(axis, frame),
        *_marks(results, shown, axis, row_height),
        text((frame.left + frame.right) / 2, height - 8, axis_name, "axis middle"),
    ]
    return chart.svg(height, parts, colours, TITLE)


def _rows(cases: Sequence[str], row_height: int) -> Iterator[str]:
    for index, case in enumerate(cases):
        top = TOP + index * row_height
        if index % 2 == 0:
            yield f'<rect class="stripe" x="0" y="{top}" width="{WIDTH}" height="{row_height}"/>'
        yield text(LEFT - 10, top + row_height / 2 + 4, case, "end")


def _marks(results: Results, cases: Sequence[str], axis: LogAxis, row_height: int) -> Iterator[str]:
    for row, case in enumerate(cases):
        for line, (variant, measured) in enumerate(results.items()):
            figures = measured.get(case)
            if figures is None:
                continue
            y = TOP + row * row_height + ROW_GAP / 2 + LINE_HEIGHT * (line + 0.5)
            begin, end = axis.place(figures["p50_us"]), axis.place(figures["p99_us"])
            tooltip = (
                f"{case} {variant}: median {figures['p50_us']:.1f} us, p99 {figures['p99_us']:.1f}"
            )
            yield (
                f"<g><title>{escape(tooltip)}</title>"
                f'<path class="s{line}" d="M{begin:.1f} {y:.1f}H{end:.1f}" stroke-width="2" '
                f'stroke-opacity="0.5"/><circle class="f{line}" cx="{begin:.1f}" cy="{y:.1f}" '
                f'r="{DOT_RADIUS}"/></g>'
            )
