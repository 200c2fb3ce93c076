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
        us_per_step, the time of all kernels; busy_share, the share of the recorded time in which
        any kernel ran; kernels, the name, us_per_step, share of the time and calls_per_step of the
        first kernels; others, the number of kernels that are not listed.
    """
    counted = [e for e in events if e.get("ph") == "X" and e.get("cat") in categories]
    if not counted:
        return {"us_per_step": 0.0, "busy_share": None, "kernels": [], "others": 0}
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
        "busy_share": _busy_share(counted),
        "kernels": rows,
        "others": len(names) - len(rows),
    }


def _busy_share(events: list[Mapping[str, Any]]) -> float | None:
    spans = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events)
    first, reached = spans[0]
    busy = reached - first
    for begin, end in spans[1:]:
        busy += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return busy / (reached - first) if reached > first else None
