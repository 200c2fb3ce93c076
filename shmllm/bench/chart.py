"""Parts of pictures: text, legends, histograms, stacked bars, and the SVG or HTML around them.

This module owns geometry and colours, for light and dark schemes. A picture refers to nothing
outside its file. The module must not know the meaning of the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from shmllm.bench.axes import LinearAxis, LogAxis

SUFFIXES = (".svg", ".html")
WIDTH = 960
MARGIN = 16
# The rules use no CSS variables, because many SVG viewers other than browsers lack them.
STYLE = """
text{font-family:sans-serif;font-size:12px;fill:#222222}
.title{font-size:16px;font-weight:bold}.head{font-size:13px;font-weight:bold}
.axis{font-size:11px;fill:#555555}.end{text-anchor:end}.middle{text-anchor:middle}
.paper{fill:#ffffff}.stripe{fill:#f4f4f4}.line{stroke:#bbbbbb;fill:none}
.hair{stroke:#e4e4e4;fill:none}.mark{stroke:#222222;stroke-dasharray:3 3;fill:none}
"""
DARK_STYLE = (
    "text{fill:#e6e6e6}.axis{fill:#a8adb5}.paper{fill:#16181c}.stripe{fill:#1e2127}"
    ".line{stroke:#4b515b}.hair{stroke:#2a2e35}.mark{stroke:#e6e6e6}"
)
# Pairs for the (light, dark) scheme. The colours also differ in brightness.
PALETTE = (
    ("#7b3294", "#c994e8"),
    ("#2166ac", "#74b3e8"),
    ("#00838f", "#4dd0e1"),
    ("#2e7d32", "#7fce83"),
    ("#c77700", "#ffb74d"),
    ("#6b7077", "#a5abb3"),
    ("#c62828", "#ff8a80"),
)

Colours = Mapping[str, tuple[str, str]]


def _style(colours: Colours) -> str:
    """The CSS rules. Class f<i> fills with colour i, and class s<i> strokes with it."""
    light, dark = (
        "".join(
            f".f{i}{{fill:{pair[scheme]}}}.s{i}{{stroke:{pair[scheme]};fill:none}}"
            for i, pair in enumerate(colours.values())
        )
        for scheme in (0, 1)
    )
    return f"{STYLE}{light}\n@media (prefers-color-scheme:dark){{{DARK_STYLE}{dark}}}\n"


def svg(height: float, parts: Iterable[str], colours: Colours, title: str) -> str:
    """A whole picture, WIDTH pixels wide.

    Args:
        height: its height in pixels.
        parts: its SVG elements.
        colours: (light, dark) colours by name; their order gives the classes f<i> and s<i>.
        title: its title.
    """
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
            f'width="{WIDTH}" height="{height:.0f}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_style(colours)}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{height:.0f}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def write(path: Path, picture: str, title: str) -> None:
    """Writes a picture alone (.svg) or inside an HTML page (.html), depending on the suffix."""
    path.write_text(picture if path.suffix == ".svg" else page(picture, title), encoding="utf-8")


def page(picture: str, title: str) -> str:
    """An HTML page that holds the picture. It is also well-formed XML."""
    return (
        '<!DOCTYPE html>\n<html xmlns="http://www.w3.org/1999/xhtml" lang="en"><head>'
        '<meta charset="utf-8"/><meta name="viewport" content="width=device-width"/>'
        f"<title>{escape(title)}</title><style>:root{{color-scheme:light dark}}"
        "body{margin:0 auto;max-width:960px}svg{max-width:100%;height:auto}</style></head>"
        f"<body>\n{picture}</body></html>\n"
    )


def text(x: float, y: float, content: str, kind: str = "") -> str:
    """One line of text; `kind` names classes of STYLE."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(content)}</text>'


def duration(value_us: float) -> str:
    """Formats microseconds with a suitable unit."""
    for limit, scale, unit in ((1e3, 1.0, "us"), (1e6, 1e3, "ms"), (math.inf, 1e6, "s")):
        if value_us < limit:
            return f"{value_us / scale:.3g} {unit}"
    raise AssertionError


def legend(colours: Colours, x: float, y: float) -> Iterator[str]:
    """Draws a row of names with their colours."""
    for index, name in enumerate(colours):
        yield f'<circle class="f{index}" cx="{x + 5:.0f}" cy="{y - 4:.0f}" r="5"/>'
        yield text(x + 14, y, name)
        x += 30 + 6.9 * len(name)


@dataclass(frozen=True, slots=True)
class Frame:
    """A rectangle to draw in: [left, right) x [top, bottom), in pixels."""

    left: float
    right: float
    top: float
    bottom: float


LABEL_SPACING = 46


def log_grid(axis: LogAxis, frame: Frame) -> Iterator[str]:
    """Draws vertical grid lines, and durations below the labelled lines where they have room.

    The values of the axis are microseconds.
    """
    free_from = -math.inf
    for value, is_labelled in axis.ticks():
        x = axis.place(value)
        kind = "line" if is_labelled else "hair"
        yield f'<path class="{kind}" d="M{x:.1f} {frame.top:.1f}V{frame.bottom:.1f}"/>'
        if is_labelled and x >= free_from:
            yield text(x, frame.bottom + 15, duration(value), "axis middle")
            free_from = x + LABEL_SPACING


def histogram(
    values_us: Sequence[float], frame: Frame, colour: int, name: str, unit: str
) -> Iterator[str]:
    """Draws a histogram of durations on a logarithmic axis, with the median and p99.

    Args:
        values_us: the durations in microseconds; at least one.
        frame: the rectangle of title, bars and labels together.
        colour: the index of the bars' colour.
        name: the title.
        unit: the name of the counted things, such as "requests".
    """
    ordered = sorted(values_us)
    quantiles = {p: ordered[max(-(-p * len(ordered) // 100) - 1, 0)] for p in (50, 99)}
    figures = ", ".join(f"p{p} {duration(value)}" for p, value in quantiles.items())
    yield text(frame.left, frame.top + 12, name, "head")
    yield text(frame.left, frame.top + 28, f"{figures}, max {duration(ordered[-1])}", "axis")
    plot = Frame(frame.left + 40, frame.right - 12, frame.top + 38, frame.bottom - 34)
    axis = LogAxis(max(ordered[0], 1e-3), max(ordered[-1], 1e-3), plot.left, plot.right)
    bins = max(int((plot.right - plot.left) // 6), 1)
    counts = [0] * bins
    for value in ordered:
        share = (axis.place(max(value, axis.lowest)) - plot.left) / (plot.right - plot.left)
        counts[min(int(share * bins), bins - 1)] += 1
    most = max(counts)
    heights = LinearAxis(0, most, plot.bottom, plot.top)
    yield from log_grid(axis, plot)
    for tick in heights.ticks():
        if tick == int(tick):
            yield text(plot.left - 5, heights.place(tick) + 4, f"{tick:,.0f}", "axis end")
    width = (plot.right - plot.left) / bins
    for index, count in enumerate(counts):
        if count:
            y = heights.place(count)
            yield (
                f'<rect class="f{colour}" x="{plot.left + index * width + 0.5:.1f}" '
                f'y="{y:.1f}" width="{width - 1:.1f}" height="{plot.bottom - y:.1f}"/>'
            )
    for value in quantiles.values():
        x = axis.place(max(value, axis.lowest))
        yield f'<path class="mark" d="M{x:.1f} {plot.top:.1f}V{plot.bottom:.1f}"/>'
    yield f'<path class="line" d="M{plot.left:.1f} {plot.bottom:.1f}H{plot.right:.1f}"/>'
    middle = (plot.left + plot.right) / 2
    yield text(middle, frame.bottom - 4, f"duration; {unit} in each bar", "axis middle")


BAR_HEIGHT, BAR_GAP = 18, 8
LABEL_WIDTH, TOTAL_WIDTH = 190, 76


def bars_height(num_rows: int) -> float:
    """The height that `stacked_bars` needs, in pixels."""
    return num_rows * (BAR_HEIGHT + BAR_GAP) + 40


def stacked_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    top: float,
    colours: Colours,
    title: str,
    *,
    as_shares: bool = False,
) -> Iterator[str]:
    """Draws durations as stacked bars: one bar per row, with its parts and its total.

    Args:
        rows: (label, {part: microseconds}); the parts are names of `colours`.
        top: the y pixel of the first bar's top.
        colours: the colours of the parts.
        title: the title of the axis.
        as_shares: whether all bars have the same length, with the axis in percent.
    """
    totals = [sum(parts.values()) or 1e-3 for _, parts in rows]
    left, right = MARGIN + LABEL_WIDTH, WIDTH - MARGIN - TOTAL_WIDTH
    bottom = top + len(rows) * (BAR_HEIGHT + BAR_GAP)
    most = 100.0 if as_shares else max(totals)
    axis = LinearAxis(0, most, left, right)
    for tick in axis.ticks():
        x = axis.place(tick)
        label = f"{tick:.0f} %" if as_shares else duration(tick) if tick else "0"
        yield f'<path class="hair" d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>'
        yield text(x, bottom + 15, label, "axis middle")
    places = {name: index for index, name in enumerate(colours)}
    for row, ((label, parts), total) in enumerate(zip(rows, totals, strict=True)):
        y = top + row * (BAR_HEIGHT + BAR_GAP)
        scale = 100 / total if as_shares else 1.0
        yield text(left - 8, y + 13, label, "end")
        begin = 0.0
        for name, value in parts.items():
            x, end = axis.place(scale * begin), axis.place(scale * (begin + value))
            begin += value
            tooltip = f"{name}: {duration(value)} ({100 * value / total:.1f} %)"
            yield (
                f'<g><title>{escape(tooltip)}</title><rect class="f{places[name]}" x="{x:.2f}" '
                f'y="{y:.1f}" width="{end - x:.2f}" height="{BAR_HEIGHT}"/></g>'
            )
        yield text(axis.place(scale * total) + 6, y + 13, duration(total), "axis")
    yield text((left + right) / 2, bottom + 32, title, "axis middle")
