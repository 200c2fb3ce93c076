"""Computes an engine's figures for an interval from the samples at its beginning and end.

This module owns the figures that people and scripts get, as plain values. It must not know how
they are shown, nor how samples are taken.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from shmllm.ipc.histogram import Durations
from shmllm.ipc.stats import PHASES, Histogram
from shmllm.monitor.find import FoundEngine
from shmllm.monitor.sample import Sample
from shmllm.outputs.sleep_report import SleepState

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

Figures = dict[str, Any]

_COUNTS = ("running", "waiting", "requests_finished", "generated_tokens", "preemptions")
_SHARED_COUNTS = ("shared_blocks_lent", "shared_blocks_saved", "shared_blocks_reused")


def figures(engine: FoundEngine, now: Sample, before: Sample | None) -> Figures:
    """The figures of an engine, as `shmllm top --json` and `engine ls --json` print them
    (docs/top.md).

    Args:
        engine: the engine.
        now: the latest sample.
        before: the sample at the beginning of the interval; None: the figures of the interval
            are None.
    """
    stats = now.stats
    interval_s = (now.time_ns - before.time_ns) / 1e9 if before else None
    return {
        "name": engine.name,
        "pid": engine.pid or None,
        "state": now.state if now.state != "ready" else _activity(stats),
        "model": now.model or None,
        "device": now.device or None,
        "precision": now.precision or None,
        "speculation": now.speculation or None,
        "paused": bool(stats["paused"]),
        "asleep": bool(SleepState(stats["asleep"]).tags),
        "uptime_s": now.uptime_s,
        "interval_s": interval_s,
        **{key: stats[key] for key in _COUNTS},
        "kv_blocks_used": stats["kv_blocks_used"],
        "kv_blocks_total": stats["kv_blocks_total"],
        "kv_used": _share(stats["kv_blocks_used"], stats["kv_blocks_total"]),
        "generated_tokens_per_s": _rate("generated_tokens", now, before),
        "prompt_tokens_per_s": _rate("prompt_tokens", now, before),
        "requests_per_s": _rate("requests_finished", now, before),
        "steps_per_s": _rate("steps", now, before),
        "prefix_hit_rate": {
            "interval": _hit_rate(now, before) if before else None,
            "since_start": _hit_rate(now, None),
        },
        "shared_kv_cache_bytes": stats["shared_kv_cache_bytes"],
        "shared_hit_rate": {
            "interval": _shared_hit_rate(now, before) if before else None,
            "since_start": _shared_hit_rate(now, None),
        },
        **{key: stats[key] for key in _SHARED_COUNTS},
        "draft_tokens": stats["draft_tokens"],
        "draft_tokens_per_s": _rate("draft_tokens", now, before),
        "draft_acceptance_rate": {
            "interval": _acceptance_rate(now, before) if before else None,
            "since_start": _acceptance_rate(now, None),
        },
        "draft_break_even": stats["draft_break_even"] / 1000 or None,
        "mean_acceptance_length": {
            "interval": _acceptance_length(now, before) if before else None,
            "since_start": _acceptance_length(now, None),
        },
        **{f"{h.name.lower()}_ms": _latencies(h, now, before) for h in Histogram},
        "phases_us": _phases(now, before),
        "clients": [asdict(client) for client in now.clients],
        "errors": sum(error.count for error in now.errors),
        "last_error": _last_error(now),
    }


def _activity(stats: Mapping[str, int]) -> str:
    """The state of an engine that is ready: "ready", "paused", "asleep" or "weights missing"."""
    if asleep := SleepState(stats["asleep"]):
        return "asleep" if asleep.tags else "weights missing"
    return "paused" if stats["paused"] else "ready"


def _last_error(now: Sample) -> dict[str, Any] | None:
    """The error that occurred last, and its age at the time of the call."""
    if not now.errors:
        return None
    error = now.errors[-1]
    age_s = max(0.0, (time.time_ns() - error.last_ns) / 1e9)
    return {"text": error.text, "count": error.count, "age_s": age_s}


def latencies_ms(durations: Durations) -> dict[str, float | None]:
    """The count, and mean and quantiles in milliseconds, which are None if the count is 0."""
    if not (count := durations.count):
        return {"count": 0, "mean": None, **dict.fromkeys(QUANTILES)}
    found = {name: durations.quantile_ns(share) / 1e6 for name, share in QUANTILES.items()}
    return {"count": count, "mean": durations.mean_ns / 1e6, **found}


def _latencies(histogram: Histogram, now: Sample, before: Sample | None) -> dict[str, Any]:
    since_start = now.durations[histogram]
    recent = since_start.since(before.durations[histogram]) if before else None
    return {
        "interval": latencies_ms(recent) if recent else None,
        "since_start": latencies_ms(since_start),
    }


def _grown(key: str, now: Sample, before: Sample | None) -> int:
    return now.stats[key] - (before.stats[key] if before else 0)


def _rate(key: str, now: Sample, before: Sample | None) -> float | None:
    if before is None or now.time_ns <= before.time_ns:
        return None
    return _grown(key, now, before) * 1e9 / (now.time_ns - before.time_ns)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _hit_rate(now: Sample, before: Sample | None) -> float | None:
    """The share of prompt tokens that the prefix cache held; None if it was asked for none."""
    return _share(
        _grown("prefix_hit_tokens", now, before), _grown("prefix_query_tokens", now, before)
    )


def _shared_hit_rate(now: Sample, before: Sample | None) -> float | None:
    """The share of prompt tokens that only blocks of the shared cache held; None if it was asked
    for none."""
    return _share(
        _grown("shared_hit_tokens", now, before), _grown("prefix_query_tokens", now, before)
    )


def _acceptance_rate(now: Sample, before: Sample | None) -> float | None:
    """The share of drafted tokens that were right; None if none was drafted."""
    return _share(_grown("accepted_tokens", now, before), _grown("draft_tokens", now, before))


def _acceptance_length(now: Sample, before: Sample | None) -> float | None:
    """The mean number of tokens that a request with drafts got in a step; None without drafts."""
    num_drafts, num_accepted = (_grown(key, now, before) for key in ("drafts", "accepted_tokens"))
    return 1 + num_accepted / num_drafts if num_drafts else None


def _phases(now: Sample, before: Sample | None) -> dict[str, float] | None:
    """The mean microseconds of each phase of a step; None if the interval has no step."""
    num_steps = _grown("steps", now, before)
    if not num_steps:
        return None
    return {phase: _grown(f"{phase}_ns", now, before) / 1e3 / num_steps for phase in PHASES}
