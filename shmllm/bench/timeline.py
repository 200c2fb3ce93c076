"""Quantities over time as a picture: panels above each other on one axis of seconds.

Owns geometry and colours; refers to nothing outside the file, and suits light and dark
pages. Alone as SVG, or inside an HTML page, as the file's name says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

Point = tuple[float, float]

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 64, 46
PANEL_HEIGHT, PANEL_GAP = 170, 46
MOST_TICKS = 8
COLOURS = ("#2f7fd0", "#d97706", "#2a9d5c", "#a855c7")
STYLE = (
    "text{font-family:sans-serif;font-size:12px;fill:#222}"
    ".title{font-size:16px;font-weight:bold}.axis{font-size:11px;fill:#555}"
    ".right{text-anchor:end}.middle{text-anchor:middle}.grid{stroke:#ddd}"
    ".page{fill:#fff}.span{fill:#7c8ba1;fill-opacity:.22}"
    ".line{fill:none;stroke-width:1.6;stroke-linejoin:round}"
    "@media(prefers-color-scheme:dark){text{fill:#e6e6e6}.axis{fill:#aaa}"
    ".grid{stroke:#3c3c3c}.page{fill:#16181c}.span{fill-opacity:.35}}"
)


@dataclass(frozen=True)
class Panel:
    """One quantity.

    Attributes:
        title: what it is, with its unit.
        points: (seconds, value), by time.
    """

    title: str
    points: Sequence[Point]


class Axis:
    """A range of values on a range of pixels, with round ticks."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        low, high = min(values), max(values)
        if high - low < 1e-9 * max(abs(high), 1.0):
            low, high = low - 0.5, high + 0.5
        self.step = _round_step((high - low) / MOST_TICKS)
        self.low = math.floor(low / self.step + 1e-9) * self.step
        self.high = math.ceil(high / self.step - 1e-9) * self.step
        self._first, self._scale = first, (last - first) / (self.high - self.low)

    def at(self, value: float) -> float:
        return self._first + (value - self.low) * self._scale

    def ticks(self) -> Iterator[tuple[float, str]]:
        """(pixel, label)."""
        digits = max(0, -math.floor(math.log10(self.step) + 1e-9))
        for number in range(round((self.high - self.low) / self.step) + 1):
            value = self.low + number * self.step
            yield self.at(value), f"{value:.{digits}f}"


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
        panels: each with at least one point.
        spans: intervals of seconds that are shaded in all panels.
        spans_are: what the shade means.

    Returns:
        The path.

    Raises:
        ValueError: another suffix, or a panel without points.
    """
    target = Path(path)
    if target.suffix not in (".svg", ".html"):
        raise ValueError(f"a timeline is written to .svg or .html, got {target.name!r}")
    if not panels or not all(panel.points for panel in panels):
        raise ValueError("a timeline needs panels with points")
    picture = svg(title, panels, spans, spans_are)
    if target.suffix == ".html":
        picture = (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
            '<meta name="color-scheme" content="light dark"/>'
            f"<title>{escape(title)}</title></head><body>\n{picture}</body></html>\n"
        )
    target.write_text(picture, encoding="utf-8")
    return target


def svg(
    title: str, panels: Sequence[Panel], spans: Sequence[Point] = (), spans_are: str = ""
) -> str:
    """The whole picture; see `write_timeline`."""
    height = TOP + len(panels) * (PANEL_HEIGHT + PANEL_GAP) - PANEL_GAP + BOTTOM
    seconds = [second for panel in panels for second, _ in panel.points]
    time = Axis([0.0, *seconds], LEFT, WIDTH - RIGHT)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
        f'<text class="title" x="16" y="26">{escape(title)}</text>',
        *(_key(spans_are) if spans else ()),
    ]
    for number, panel in enumerate(panels):
        top = TOP + number * (PANEL_HEIGHT + PANEL_GAP)
        parts += _panel(panel, COLOURS[number % len(COLOURS)], top, time, spans)
    parts += _seconds(time, height - BOTTOM)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _key(meaning: str) -> Iterator[str]:
    x = WIDTH - RIGHT
    yield f'<text class="axis right" x="{x}" y="26">shaded: {escape(meaning)}</text>'


def _panel(
    panel: Panel, colour: str, top: float, time: Axis, spans: Sequence[Point]
) -> Iterator[str]:
    values = Axis([value for _, value in panel.points], top + PANEL_HEIGHT, top)
    yield f'<text x="{LEFT}" y="{top - 8}">{escape(panel.title)}</text>'
    for begin, end in spans:
        x, width = time.at(begin), time.at(end) - time.at(begin)
        yield (
            f'<rect class="span" x="{x:.1f}" y="{top}" width="{max(width, 0.5):.1f}" '
            f'height="{PANEL_HEIGHT}"/>'
        )
    for y, label in values.ticks():
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text class="axis right" x="{LEFT - 8}" y="{y + 4:.1f}">{label}</text>'
    line = " ".join(f"{time.at(t):.1f},{values.at(value):.1f}" for t, value in panel.points)
    yield f'<polyline class="line" stroke="{colour}" points="{line}"/>'


def _seconds(time: Axis, y: float) -> Iterator[str]:
    for x, label in time.ticks():
        yield f'<path class="grid" d="M{x:.1f} {y}v5"/>'
        yield f'<text class="axis middle" x="{x:.1f}" y="{y + 18}">{label}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text class="axis middle" x="{middle:.0f}" y="{y + 36}">seconds</text>'


def _round_step(at_least: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= at_least * (1 - 1e-9))
