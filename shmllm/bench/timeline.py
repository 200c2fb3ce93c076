"""Draws quantities over time: panels above each other on one axis of seconds.

This module owns the layout; `chart` makes the SVG or HTML file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shmllm.bench import chart
from shmllm.bench.axes import LinearAxis
from shmllm.bench.chart import MARGIN, PALETTE, WIDTH, Frame, text

Point = tuple[float, float]

LEFT, RIGHT, TOP, BOTTOM = 76, 24, 64, 46
PANEL_HEIGHT, PANEL_GAP = 170, 46
LINES = [PALETTE[i] for i in (1, 4, 3, 0)]
SHADE = PALETTE[5]


@dataclass(frozen=True)
class Panel:
    """One quantity.

    Attributes:
        title: its name and unit.
        points: (seconds, value) pairs, ordered by time.
    """

    title: str
    points: Sequence[Point]


def write_timeline(
    path: str | Path,
    title: str,
    panels: Sequence[Panel],
    spans: Sequence[Point] = (),
    spans_are: str = "",
) -> Path:
    """Writes the picture.

    Args:
        path: the file to write; its name ends in .svg or .html.
        title: the title of the picture.
        panels: one to four panels, each with at least one point.
        spans: intervals of seconds to shade in all panels.
        spans_are: the meaning of the shade.

    Returns:
        The path.

    Raises:
        ValueError: another suffix, no panel, too many panels, or a panel without points.
    """
    target = Path(path)
    if target.suffix not in chart.SUFFIXES:
        raise ValueError(f"a timeline is written to .svg or .html, got {target.name!r}")
    if not 1 <= len(panels) <= len(LINES) or not all(panel.points for panel in panels):
        raise ValueError(f"a timeline needs 1 to {len(LINES)} panels with points")
    chart.write(target, timeline_svg(title, panels, spans, spans_are), title)
    return target


def timeline_svg(
    title: str, panels: Sequence[Panel], spans: Sequence[Point] = (), spans_are: str = ""
) -> str:
    """The picture as SVG; see `write_timeline` for the arguments."""
    bottom = TOP + len(panels) * (PANEL_HEIGHT + PANEL_GAP) - PANEL_GAP
    seconds = [second for panel in panels for second, _ in panel.points]
    time = LinearAxis.enclosing([0.0, *seconds], LEFT, WIDTH - RIGHT)
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


def _shades(spans: Sequence[Point], frame: Frame, time: LinearAxis) -> Iterator[str]:
    for begin, end in spans:
        x, width = time.place(begin), time.place(end) - time.place(begin)
        yield (
            f'<rect class="f0" fill-opacity="0.25" x="{x:.1f}" y="{frame.top:.1f}" '
            f'width="{max(width, 0.5):.1f}" height="{frame.bottom - frame.top:.1f}"/>'
        )


def _panel(panel: Panel, colour: int, frame: Frame, time: LinearAxis) -> Iterator[str]:
    values = LinearAxis.enclosing([value for _, value in panel.points], frame.bottom, frame.top)
    yield text(frame.left, frame.top - 8, panel.title, "head")
    for tick in values.ticks():
        y = values.place(tick)
        yield f'<path class="hair" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>'
        yield text(frame.left - 8, y + 4, values.label(tick), "axis end")
    line = " ".join(f"{time.place(t):.1f},{values.place(value):.1f}" for t, value in panel.points)
    yield f'<polyline class="s{colour}" stroke-width="1.6" points="{line}"/>'


def _seconds(time: LinearAxis, y: float) -> Iterator[str]:
    for tick in time.ticks():
        x = time.place(tick)
        yield f'<path class="line" d="M{x:.1f} {y:.1f}v5"/>'
        yield text(x, y + 18, time.label(tick), "axis middle")
    yield text((LEFT + WIDTH - RIGHT) / 2, y + 36, "seconds", "axis middle")
