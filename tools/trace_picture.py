#!/usr/bin/env python
"""Draws a piece of a trace as SVG: lanes, the records between them, and requests' lives.

    shmllm trace -o trace.json -- python script.py
    python tools/trace_picture.py trace.json docs/results/trace.svg --from-step 0 --to-step 6

Reads the file alone, so what it draws is what every other viewer finds in it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, ROW, GAP, TOP = 1180, 150, 18, 14, 34
COLOURS = {
    "step": "#e8ebf0",
    "drain": "#b9c2d0",
    "schedule": "#7aa6da",
    "prepare": "#b294bb",
    "execute": "#8abf8a",
    "sample": "#e6b87d",
    "apply": "#d5c76a",
    "publish": "#e08e8e",
    "send": "#c0504d",
    "receive": "#4f81bd",
    "process outputs": "#8fc4c0",
    "tokenize": "#b9c2d0",
    "request": "#e8ebf0",
    "submit": "#c9b7d8",
    "queued": "#c8c8c8",
    "prefill": "#e6b87d",
    "decode": "#8abf8a",
    "preempted": "#d9705f",
    "detokenize": "#8fc4c0",
}
DEPTH_OF_LANES = 3

Event = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """Microseconds to pixels."""

    begin: float
    end: float

    def x(self, at: float) -> float:
        share = (min(max(at, self.begin), self.end) - self.begin) / (self.end - self.begin)
        return LEFT + share * (WIDTH - LEFT - 12)


def colour_of(name: str) -> str:
    return COLOURS.get(name) or COLOURS.get(name.split(" ")[0], "#dddddd")


def box(scale: Scale, y: float, name: str, begin: float, end: float, height: float = ROW) -> str:
    x, width = scale.x(begin), max(scale.x(end) - scale.x(begin), 0.7)
    label = escape(name)
    parts = [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{colour_of(name)}" stroke="white" stroke-width="0.4">'
        f"<title>{label}: {end - begin:.1f} us</title></rect>"
    ]
    if width > 6.2 * len(name) + 4:
        parts.append(f'<text x="{x + 3:.1f}" y="{y + height - 5:.1f}">{label}</text>')
    return "".join(parts)


def with_depth(slices: list[Event]) -> Iterator[tuple[int, Event]]:
    """How many slices each one lies in; parents come first."""
    ends: list[float] = []
    for event in slices:
        while ends and ends[-1] <= event["ts"] + 1e-4:
            ends.pop()
        yield len(ends), event
        ends.append(event["ts"] + event["dur"])


class Picture:
    """
    Args:
        events: of a trace.
        first: number of the first step to show.
        last: of the last.
    """

    def __init__(self, events: list[Event], first: int, last: int) -> None:
        self._events = events
        steps = {e["name"]: e for e in events if e["ph"] == "X" and e["name"].startswith("step ")}
        begin, end = steps[f"step {first}"], steps[f"step {last}"]
        length = end["ts"] + end["dur"] - begin["ts"]
        self._scale = Scale(begin["ts"] - length * 0.07, end["ts"] + end["dur"] + length * 0.03)
        self._y = float(TOP)
        self._places: dict[tuple[int, int, float, str], float] = {}
        self._parts: list[str] = []

    def draw(self) -> str:
        self._draw_axis()
        names = {
            e["pid"]: e["args"]["name"].split(",")[0]
            for e in self._events
            if e["name"] == "process_name"
        }
        lanes = sorted({(e["pid"], e["tid"]) for e in self._events if e["ph"] == "X"})
        for lane in sorted(lanes, key=lambda lane: names[lane[0]], reverse=True):
            self._draw_lane(lane, names[lane[0]])
        self._draw_arrows()
        self._draw_requests()
        height = self._y + 6
        style = "text{font:11px sans-serif;fill:#222}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
            f'viewBox="0 0 {WIDTH} {height:.0f}"><style>{style}</style>'
            f'<rect width="100%" height="100%" fill="white"/>{"".join(self._parts)}</svg>\n'
        )

    def _visible(self, begin: float, end: float) -> bool:
        return end >= self._scale.begin and begin <= self._scale.end

    def _draw_axis(self) -> None:
        span_ms = (self._scale.end - self._scale.begin) / 1000
        tick_ms = next(t for t in (0.5, 1, 2, 5, 10, 20, 50, 100, 1e9) if span_ms / t < 14)
        tick = 0
        while tick * tick_ms < span_ms:
            x = self._scale.x(self._scale.begin + tick * tick_ms * 1000)
            self._parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="100%" stroke="#eee"/>'
                f'<text x="{x + 2:.1f}" y="14">{tick * tick_ms:g} ms</text>'
            )
            tick += 1

    def _label(self, name: str) -> None:
        self._parts.append(f'<text x="6" y="{self._y + 13:.1f}">{escape(name)}</text>')

    def _draw_lane(self, lane: tuple[int, int], name: str) -> None:
        self._label(name)
        deepest = 0
        slices = [e for e in self._events if e["ph"] == "X" and (e["pid"], e["tid"]) == lane]
        for depth, event in with_depth(slices):
            end = event["ts"] + event["dur"]
            if depth < DEPTH_OF_LANES and self._visible(event["ts"], end):
                y = self._y + depth * ROW
                deepest = max(deepest, depth)
                self._places[*lane, event["ts"], event["name"]] = y + ROW / 2
                self._parts.append(box(self._scale, y, event["name"], event["ts"], end))
        self._y += (deepest + 1) * ROW + GAP

    def _draw_arrows(self) -> None:
        ends = {e["id"]: e for e in self._events if e["ph"] == "f"}
        for s in (e for e in self._events if e["ph"] == "s"):
            f = ends[s["id"]]
            if self._scale.begin < s["ts"] and f["ts"] < self._scale.end:
                y1 = self._places[s["pid"], s["tid"], s["ts"], f"send {s['name']}"]
                y2 = self._places[f["pid"], f["tid"], f["ts"], f"receive {f['name']}"]
                self._parts.append(
                    f'<line x1="{self._scale.x(s["ts"]):.1f}" y1="{y1:.1f}" '
                    f'x2="{self._scale.x(f["ts"]):.1f}" y2="{y2:.1f}" stroke="#333" '
                    f'stroke-width="0.7" opacity="0.6"><title>{escape(s["name"])}</title></line>'
                )

    def _draw_requests(self) -> None:
        by_id: dict[str, list[Event]] = {}
        for event in self._events:
            if event.get("cat") == "request":
                by_id.setdefault(event["id2"]["local"], []).append(event)
        for events in by_id.values():
            if self._visible(events[0]["ts"], events[-1]["ts"]):
                self._label(events[0]["name"])
                self._draw_life(events[1:-1])
                self._y += ROW + 4

    def _draw_life(self, events: list[Event]) -> None:
        begun: dict[str, float] = {}
        for event in events:
            if event["ph"] == "b":
                begun[event["name"]] = event["ts"]
            elif event["ph"] == "e" and self._visible(begun[event["name"]], event["ts"]):
                begin = begun[event["name"]]
                self._parts.append(box(self._scale, self._y, event["name"], begin, event["ts"]))
            elif event["ph"] == "n" and self._visible(event["ts"], event["ts"]):
                x = self._scale.x(event["ts"])
                self._parts.append(
                    f'<path d="M{x:.1f} {self._y - 1:.1f}v{ROW + 2}" stroke="#000">'
                    f"<title>{escape(event['name'])}</title></path>"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--from-step", type=int, default=0)
    parser.add_argument("--to-step", type=int, default=6)
    arguments = parser.parse_args()
    events = json.loads(arguments.trace.read_text())["traceEvents"]
    picture = Picture(events, arguments.from_step, arguments.to_step).draw()
    arguments.picture.write_text(picture)


if __name__ == "__main__":
    main()
