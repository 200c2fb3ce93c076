"""Makes and writes the record of a run: one JSON object, and a short text.

{"schema", "rehearsal", "date", "commit", "machine", "seconds",
 "stopped": {"part", "status", "error"} of the part that failed, or null,
 "next": the part with which the same command goes on, or null,
 "targets": [{"name", "asked", "sense", "measured", "ok"}],
 "derived": see `derived.derive`,
 "parts": {NAME: {"status", "seconds", "budget_s", "error", "output", "code", "machine",
                  "figures": {...}}}}

"seconds" is the time of all runs that the record has figures of.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu.derived import derive
from gpu.figures import write_json, write_text
from gpu.settings import settings_for
from gpu.table import markdown
from gpu.targets import targets

SCHEMA = 2
ROOT = Path(__file__).resolve().parents[2]


def make_record(
    parts: Mapping[str, Any], rehearsal: bool, seconds: float, machine: str = ""
) -> dict[str, Any]:
    derived = derive(parts)
    asked = targets(parts, derived, settings_for(rehearsal))
    return {
        "schema": SCHEMA,
        "rehearsal": rehearsal,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "machine": machine,
        "seconds": round(seconds, 1),
        "stopped": None,
        "next": None,
        "targets": [target.record(rehearsal) for target in asked],
        "derived": derived,
        "parts": dict(parts),
    }


def write_record(record: dict[str, Any], directory: Path) -> str:
    """Writes gpu-check.json and gpu-check.md; returns the text."""
    text = markdown(record)
    write_json(directory / "gpu-check.json", record)
    write_text(directory / "gpu-check.md", text)
    return text


def commit() -> str | None:
    """Returns the commit of this repository; None without git or without a git repository."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None
