"""Quantities over time as a picture: panels above each other on one axis of seconds.

Owns what is drawn where; `chart` has the SVG around it. Alone as SVG, or inside an HTML
page, as the file's name says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shmllm.bench import chart
from shmllm.bench.chart import MARGIN, PALETTE, WIDTH, Frame, text

Point = tuple[float, float]

LEFT, RIGHT, TOP, BOTTOM = 76, 24, 64, 46
PANEL_HEIGHT, PANEL_GAP = 170, 46
MOST_TICKS = 8
LINES = [PALETTE[i] for i in (1, 4, 3, 0)]
SHADE = PALETTE[5]


@dataclass(frozen=True)
class Panel:
    """One quantity.

    Attributes:
        title: what it is, with its unit.
        points: (seconds, value), by time.
    """

    title: str
    points: Sequence[Point]


class RangeAxis:
    """Values between two others to pixels, with round ticks that enclose them."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        low, high = min(values), max(values)
        if high - low < 1e-9 * max(abs(high), 1.0):
            low, high = low - 0.5, high + 0.5
        self._step = _round_step((high - low) / MOST_TICKS)
        self._low = math.floor(low / self._step + 1e-9)
        self._high = math.ceil(high / self._step - 1e-9)
        self._begin, self._scale = begin, (end - begin) / (self._high - self._low)

    def place(self, value: float) -> float:
        return self._begin + (value / self._step - self._low) * self._scale

    def ticks(self) -> Iterator[tuple[float, str]]:
        """(pixel, label)."""
        digits = max(0, -math.floor(math.log10(self._step) + 1e-9))
        for number in range(self._low, self._high + 1):
            value = number * self._step
            yield self.place(value), f"{value:.{digits}f}"


def write_timeline(
    path: str | Path,
    title: str,
    panels: Sequence[Panel],
    spans: Sequence[Point] = (),
    spans_are: str = "",
) -> Path:
    """Write the picture.

    Args:
        path: ends in .svg or .html.
        title: above it.
        panels: one to four, each with at least one point.
        spans: intervals of seconds that are shaded in all panels.
        spans_are: what the shade means.

    Returns:
        The path.

    Raises:
        ValueError: another suffix, no panels or too many, or one without points.
    """
    target = Path(path)
    if target.suffix not in (".svg", ".html"):
        raise ValueError(f"a timeline is written to .svg or .html, got {target.name!r}")
    if not 1 <= len(panels) <= len(LINES) or not all(panel.points for panel in panels):
        raise ValueError(f"a timeline needs 1 to {len(LINES)} panels with points")
    picture = timeline_svg(title, panels, spans, spans_are)
    if target.suffix == ".html":
        picture = chart.page(picture, title)
    target.write_text(picture, encoding="utf-8")
    return target


def timeline_svg(
    title: str, panels: Sequence[Panel], spans: Sequence[Point] = (), spans_are: str = ""
) -> str:
    """The picture itself; see `write_timeline`."""
    bottom = TOP + len(panels) * (PANEL_HEIGHT + PANEL_GAP) - PANEL_GAP
    seconds = [second for panel in panels for second, _ in panel.points]
    time = RangeAxis([0.0, *seconds], LEFT, WIDTH - RIGHT)
    colours = {"": SHADE} | {p.title: colour for p, colour in zip(panels, LINES, strict=False)}
    parts = [text(MARGIN, 26, title, "title")]
    if spans:
        parts.append(text(WIDTH - RIGHT, 26, f"shaded: {spans_are}", "axis end"))
    for number, panel in enumerate(panels):
        top = TOP + number * (PANEL_HEIGHT + PANEL_GAP)
        frame = Frame(LEFT, WIDTH - RIGHT, top, top + PANEL_HEIGHT)
        parts += _shades(spans, frame, time)
        parts += _panel(panel, number + 1, frame, time)
    parts += _seconds(time, bottom)
    return chart.svg(bottom + BOTTOM, parts, colours, title)


def _shades(spans: Sequence[Point], frame: Frame, time: RangeAxis) -> Iterator[str]:
    for begin, end in spans:
        x, width = time.place(begin), time.place(end) - time.place(begin)
        yield (
            f'<rect class="f0" fill-opacity="0.25" x="{x:.1f}" y="{frame.top:.1f}" '
            f'width="{max(width, 0.5):.1f}" height="{frame.bottom - frame.top:.1f}"/>'
        )


def _panel(panel: Panel, colour: int, frame: Frame, time: RangeAxis) -> Iterator[str]:
    values = RangeAxis([value for _, value in panel.points], frame.bottom, frame.top)
    yield text(frame.left, frame.top - 8, panel.title, "head")
    for y, label in values.ticks():
        yield f'<path class="hair" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>'
        yield text(frame.left - 8, y + 4, label, "axis end")
    line = " ".join(f"{time.place(t):.1f},{values.place(value):.1f}" for t, value in panel.points)
    yield f'<polyline class="s{colour}" stroke-width="1.6" points="{line}"/>'


def _seconds(time: RangeAxis, y: float) -> Iterator[str]:
    for x, label in time.ticks():
        yield f'<path class="line" d="M{x:.1f} {y:.1f}v5"/>'
        yield text(x, y + 18, label, "axis middle")
    yield text((LEFT + WIDTH - RIGHT) / 2, y + 36, "seconds", "axis middle")


def _round_step(at_least: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= at_least * (1 - 1e-9))
