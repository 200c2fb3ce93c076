"""Sums up the kernels in a trace that torch's profiler wrote."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
ON_HOST = frozenset({"cpu_op"})
MOST_ROWS = 15
NAME_CHARACTERS = 100
UNCOUNTED_SHARE = 0.25


def read_events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def kernel_table(
    events: Iterable[Mapping[str, Any]], num_steps: int, categories: frozenset[str] = ON_DEVICE
) -> dict[str, Any]:
    """Returns a table of the kernels, those with the longest time first.

    Args:
        events: the events of a Chrome trace, times in microseconds.
        num_steps: the number of steps that were recorded.
        categories: the categories of the events that count.

    Returns:
        us_per_step, the time of all kernels; busy_share, the share of the time in which any kernel
        ran, without the first quarter, in which the profiler begins; largest_gap_us, the longest
        time in which none ran, mostly the time between two steps; kernels, the name, us_per_step,
        share of the time and calls_per_step of the first kernels; others, the number of kernels
        that are not listed.
    """
    counted = [e for e in events if e.get("ph") == "X" and e.get("cat") in categories]
    if not counted:
        return {
            "us_per_step": 0.0,
            "busy_share": None,
            "largest_gap_us": None,
            "kernels": [],
            "others": 0,
        }
    times: dict[str, float] = {}
    calls: dict[str, int] = {}
    for event in counted:
        name = event["name"][:NAME_CHARACTERS]
        times[name] = times.get(name, 0.0) + event["dur"]
        calls[name] = calls.get(name, 0) + 1
    total = sum(times.values())
    names = sorted(times, key=lambda name: -times[name])
    rows = [
        {
            "name": name,
            "us_per_step": times[name] / num_steps,
            "share": times[name] / total if total else 0.0,
            "calls_per_step": calls[name] / num_steps,
        }
        for name in names[:MOST_ROWS]
    ]
    return {
        "us_per_step": total / num_steps,
        **_business(counted),
        "kernels": rows,
        "others": len(names) - len(rows),
    }


def _business(events: list[Mapping[str, Any]]) -> dict[str, float | None]:
    """Returns busy_share and largest_gap_us, see `kernel_table`."""
    spans = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events)
    last = max(end for _, end in spans)
    first = reached = spans[0][0] + (last - spans[0][0]) * UNCOUNTED_SHARE
    idle = largest = 0.0
    for begin, end in spans:
        gap = max(begin - reached, 0.0)
        idle, largest = idle + gap, max(largest, gap)
        reached = max(reached, end)
    whole = last - first
    share = (whole - idle) / whole if whole > 0 else None
    return {"busy_share": share, "largest_gap_us": largest}
