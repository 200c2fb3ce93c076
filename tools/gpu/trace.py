"""The kernels of a trace that torch's profiler wrote, by time. Pure arithmetic on its events."""

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
    """What ran on the device, the longest first.

    Args:
        events: of a Chrome trace, times in microseconds.
        num_steps: that were recorded.
        categories: of the events that count.

    Returns:
        us_per_step of all together; busy_share: of the time from the first to the last, that in
        which anything ran; kernels: name, us_per_step, share of all, calls_per_step of the
        first few, and how many others there are.
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
