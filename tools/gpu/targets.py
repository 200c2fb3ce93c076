"""The performance targets of the engine on a GPU, and whether the figures reach them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpu.derived import Parts, figure
from gpu.settings import Settings
from gpu.shapes import NAMES
from gpu.tests_part import SHARDS

DECODE_ONE = {"8b": 0.85, "1b": 0.75}
DECODE_MANY = 0.75
PREFILL = {"8b": 0.65}
IDLE = 0.03
START_S = 20.0
SLEEP_S = 1.0
TRANSFORMERS = 10.0
FIRST_S = 60.0
GRADED = tuple(DECODE_ONE)


@dataclass(frozen=True)
class Target:
    """One target.

    Attributes:
        name: the description of the figure.
        asked: the number that the figure must reach.
        measured: the figure; None: not measured.
        at_most: whether the figure must be at most ``asked``; otherwise it must be at least that.
    """

    name: str
    asked: float
    measured: float | None
    at_most: bool = False

    @property
    def ok(self) -> bool | None:
        """Whether the target is reached; None if the figure was not measured."""
        if self.measured is None:
            return None
        return self.measured <= self.asked if self.at_most else self.measured >= self.asked

    def record(self, rehearsal: bool) -> dict[str, Any]:
        """Returns the target for JSON. In a rehearsal no target is reached or missed."""
        return {
            "name": self.name,
            "asked": self.asked,
            "sense": "<=" if self.at_most else ">=",
            "measured": self.measured,
            "ok": None if rehearsal else self.ok,
        }


def targets(parts: Parts, derived: dict[str, Any], settings: Settings) -> list[Target]:
    """Returns all targets, including those whose figure was not measured."""
    found = [_first(parts), *_tests(parts), *_shares(derived, settings), *_times(parts, settings)]
    return [*found, *_comparisons(derived, settings)]


def _first(parts: Parts) -> Target:
    first = parts.get("first", {})
    seconds = first["seconds"] if first.get("status") == "ok" else None
    return Target("the first part, s", FIRST_S, seconds, at_most=True)


def _tests(parts: Parts) -> Iterator[Target]:
    shards = [shard for name in SHARDS if (shard := figure(parts, f"tests-{name}", "tests"))]
    failed = sum(shard["failed"] for shard in shards)
    done = len(shards) == len(SHARDS) and all(shard["finished"] for shard in shards)
    # Zero failures count only if all tests were run, and not all skipped.
    known = failed or (done and any(shard["passed"] for shard in shards))
    yield Target("GPU tests that fail", 0.0, float(failed) if known else None, at_most=True)


def _shares(derived: dict[str, Any], settings: Settings) -> Iterator[Target]:
    few, many = str(min(settings.batches)), str(max(settings.batches))

    def roofline(size: str, batch: str) -> float | None:
        share: float | None = derived["decode"].get(size, {}).get(batch, {}).get("of_copy")
        return share

    for size, asked in DECODE_ONE.items():
        name = f"{NAMES[size]}: decode at batch {few}, of the copy roofline"
        yield Target(name, asked, roofline(size, few))
    for size in GRADED:
        name = f"{NAMES[size]}: decode at batch {many}, of the copy roofline"
        yield Target(name, DECODE_MANY, roofline(size, many))
    for size, asked in PREFILL.items():
        name = f"{NAMES[size]}: prefill of {settings.prefill_tokens:,} tokens, of the GEMM rate"
        yield Target(name, asked, derived["prefill"].get(size, {}).get("of_gemm"))


def _times(parts: Parts, settings: Settings) -> Iterator[Target]:
    many = str(max(settings.batches))
    for size in GRADED:
        part, name = f"engine-{size}", NAMES[size]
        busy = figure(parts, part, "profile", many, "busy_share")
        idle = None if busy is None else 1 - busy
        yield Target(f"{name}: the device is idle at batch {many}, of a step", IDLE, idle, True)
        ready = figure(parts, part, "start", "ready_s")
        yield Target(f"{name}: start with graphs, s", START_S, ready, True)
    part, name = "engine-8b", NAMES["8b"]
    for what, path in (
        ("sleep at level 1", ("sleep", "sleep_s")),
        ("wake up", ("sleep", "wake_s")),
        ("update of all weights", ("update", "update_s")),
    ):
        yield Target(f"{name}: {what}, s", SLEEP_S, figure(parts, part, *path), True)


def _comparisons(derived: dict[str, Any], settings: Settings) -> Iterator[Target]:
    batch = str(max(settings.compare_batches))
    for size in GRADED:
        ratios = derived["transformers"].get(size, {}).get("eager", {}).get(batch, {})
        name = f"{NAMES[size]}: times transformers' generate at batch {batch}"
        yield Target(name, TRANSFORMERS, ratios.get("whole"))
