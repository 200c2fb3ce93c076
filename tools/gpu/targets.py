"""The performance targets of the engine on a GPU, and whether the figures reach them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpu.derived import Parts, figure
from gpu.settings import Settings
from gpu.shapes import NAMES

DECODE_ONE = {"8b": 0.85, "1b": 0.75}
DECODE_MANY = 0.70
PREFILL = 0.60
UNHIDDEN = 0.03
TRANSFORMERS = (3.0, 8.0)
TEST_GROUPS = ("kernels", "others")


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
    return [*_tests(parts), *_decodes(parts, derived, settings), *_comparisons(derived, settings)]


def _tests(parts: Parts) -> Iterator[Target]:
    groups = [group for name in TEST_GROUPS if (group := figure(parts, "tests", name))]
    failed = sum(group["failed"] for group in groups)
    done = len(groups) == len(TEST_GROUPS) and all(group["finished"] for group in groups)
    # Zero failures count only if all tests were run, and not all skipped.
    known = failed or (done and any(group["passed"] for group in groups))
    yield Target("GPU tests that fail", 0.0, float(failed) if known else None, at_most=True)


def _decodes(parts: Parts, derived: dict[str, Any], settings: Settings) -> Iterator[Target]:
    few, many = str(min(settings.batches)), str(max(settings.batches))

    def roofline(size: str, batch: str) -> float | None:
        share: float | None = derived["decode"].get(size, {}).get(batch, {}).get("of_copy")
        return share

    for size, asked in DECODE_ONE.items():
        name = f"{NAMES[size]}: decode at batch {few}, of the roofline"
        yield Target(name, asked, roofline(size, few))
    for size, name in NAMES.items():
        yield Target(
            f"{name}: decode at batch {many}, of the roofline", DECODE_MANY, roofline(size, many)
        )
    for size, name in NAMES.items():
        share = derived["prefill"].get(size, {}).get("of_gemm")
        yield Target(f"{name}: prefill, of the GEMM rate", PREFILL, share)
    for size, name in NAMES.items():
        share = figure(parts, f"engine-{size}", "decode", many, "unhidden_share")
        yield Target(
            f"{name}: host time not hidden at batch {many}, of a step",
            UNHIDDEN,
            share,
            at_most=True,
        )


def _comparisons(derived: dict[str, Any], settings: Settings) -> Iterator[Target]:
    for batch, asked in zip(settings.compare_batches, TRANSFORMERS, strict=True):
        for size, name in NAMES.items():
            ratios = derived["transformers"].get(size, {}).get("eager", {}).get(str(batch), {})
            yield Target(
                f"{name}: times transformers' generate at batch {batch}",
                asked,
                ratios.get("whole"),
            )
