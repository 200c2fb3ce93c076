"""The comparison as a picture: an SVG of its own making, alone or inside an HTML page.

Owns geometry and colours; refers to nothing outside the file. A row is a case, the
logarithmic axis the time of a round trip; each arm has its line in a row, with a dot at
the median and a tail to the 99th percentile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from shmllm.bench.measure import Figures

Results = Mapping[str, Mapping[str, Figures]]

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 170, 30, 84, 44
LINE_HEIGHT, ROW_GAP = 9, 8
DOT_RADIUS = 3.4
COLOURS = {
    "shm-latency": "#08519c",
    "shm-balanced": "#3182bd",
    "shm-idle": "#9ecae1",
    "zmq": "#d94801",
    "zmq-nocopy": "#fdae6b",
    "pipe": "#6a51a3",
    "queue": "#969696",
    "faster-fifo": "#238b45",
    "iceoryx2": "#dd1c77",
}
OTHER_COLOUR = "#000000"
STYLE = (
    "text{font-family:sans-serif;font-size:12px;fill:#222}"
    ".title{font-size:16px;font-weight:bold}.axis{font-size:11px;fill:#555}"
    ".case{text-anchor:end}.tick{text-anchor:middle}"
)


class Axis:
    """Microseconds to pixels, over whole decades."""

    def __init__(self, lowest: float, highest: float) -> None:
        self.first = math.floor(math.log10(lowest))
        self.last = max(math.ceil(math.log10(highest)), self.first + 1)

    def x(self, value_us: float) -> float:
        share = (math.log10(value_us) - self.first) / (self.last - self.first)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """(value, label); only decades are labelled."""
        for power in range(self.first, self.last + 1):
            yield 10.0**power, duration(10.0**power)
            if power < self.last:
                yield from ((step * 10.0**power, "") for step in range(2, 10))


def duration(value_us: float) -> str:
    """With the unit that suits it."""
    for limit, scale, unit in ((1e3, 1.0, "us"), (1e6, 1e3, "ms"), (math.inf, 1e6, "s")):
        if value_us < limit:
            return f"{value_us / scale:g} {unit}"
    raise AssertionError


def svg(results: Results, cases: Sequence[str], subtitle: str) -> str:
    """The whole picture."""
    arms = list(results)
    shown = [case for case in cases if any(case in figures for figures in results.values())]
    every = [figures[case] for figures in results.values() for case in shown if case in figures]
    axis = Axis(
        min(figures["p50_us"] for figures in every), max(figures["p99_us"] for figures in every)
    )
    row_height = LINE_HEIGHT * len(arms) + ROW_GAP
    height = TOP + row_height * len(shown) + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text class="title" x="16" y="26">Round trip between two Python processes</text>',
        f'<text class="axis" x="16" y="45">{escape(subtitle)}; dot: median, '
        "tail: 99th percentile</text>",
        *_legend(arms),
        *_rows(shown, row_height),
        *_grid(axis, TOP, height - BOTTOM),
        *_marks(results, arms, shown, axis, row_height),
        f'<text class="axis tick" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{height - 8}">'
        "one message with encoding and decoding, and its acknowledgement (logarithmic)</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def html(results: Results, cases: Sequence[str], subtitle: str) -> str:
    """The picture in a page."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f"<title>shmllm bench ipc</title></head><body>\n{svg(results, cases, subtitle)}"
        "</body></html>\n"
    )


def _legend(arms: Sequence[str]) -> Iterator[str]:
    x = 16.0
    for arm in arms:
        yield f'<circle cx="{x + 5:.0f}" cy="64" r="5" fill="{COLOURS.get(arm, OTHER_COLOUR)}"/>'
        yield f'<text x="{x + 14:.0f}" y="68">{escape(arm)}</text>'
        x += 30 + 6.9 * len(arm)


def _rows(cases: Sequence[str], row_height: int) -> Iterator[str]:
    for index, case in enumerate(cases):
        top = TOP + index * row_height
        if index % 2 == 0:
            yield (f'<rect x="0" y="{top}" width="{WIDTH}" height="{row_height}" fill="#f4f4f4"/>')
        yield (
            f'<text class="case" x="{LEFT - 10}" y="{top + row_height / 2 + 4:.1f}">'
            f"{escape(case)}</text>"
        )


def _grid(axis: Axis, top: int, bottom: int) -> Iterator[str]:
    for value, label in axis.ticks():
        x, colour = axis.x(value), "#bbbbbb" if label else "#e4e4e4"
        yield f'<path d="M{x:.1f} {top}V{bottom}" stroke="{colour}" stroke-width="1"/>'
        if label:
            yield f'<text class="axis tick" x="{x:.1f}" y="{bottom + 16}">{label}</text>'


def _marks(
    results: Results, arms: Sequence[str], cases: Sequence[str], axis: Axis, row_height: int
) -> Iterator[str]:
    for row, case in enumerate(cases):
        for line, arm in enumerate(arms):
            figures = results[arm].get(case)
            if figures is None:
                continue
            y = TOP + row * row_height + ROW_GAP / 2 + LINE_HEIGHT * (line + 0.5)
            begin, end = axis.x(figures["p50_us"]), axis.x(figures["p99_us"])
            colour = COLOURS.get(arm, OTHER_COLOUR)
            told = f"{case} {arm}: median {figures['p50_us']:.1f} us, p99 {figures['p99_us']:.1f}"
            yield (
                f"<g><title>{escape(told)}</title>"
                f'<path d="M{begin:.1f} {y:.1f}H{end:.1f}" stroke="{colour}" stroke-width="2" '
                f'stroke-opacity="0.5"/><circle cx="{begin:.1f}" cy="{y:.1f}" '
                f'r="{DOT_RADIUS}" fill="{colour}"/></g>'
            )
