"""Makes and writes the record of a run: one JSON object, and a short text.

{"schema", "rehearsal", "date", "commit", "seconds",
 "targets": [{"name", "asked", "sense", "measured", "ok"}],
 "derived": see `derived.derive`,
 "parts": {NAME: {"status", "seconds", "budget_s", "error", "figures": {...}}}}
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu.derived import derive
from gpu.settings import settings_for
from gpu.table import markdown
from gpu.targets import targets

SCHEMA = 1
ROOT = Path(__file__).resolve().parents[2]


def make_record(parts: Mapping[str, Any], rehearsal: bool, seconds: float) -> dict[str, Any]:
    derived = derive(parts)
    asked = targets(parts, derived, settings_for(rehearsal))
    return {
        "schema": SCHEMA,
        "rehearsal": rehearsal,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "seconds": round(seconds, 1),
        "targets": [target.record(rehearsal) for target in asked],
        "derived": derived,
        "parts": dict(parts),
    }


def write_record(record: dict[str, Any], directory: Path) -> str:
    """Writes gpu-check.json and gpu-check.md; returns the text."""
    text = markdown(record)
    (directory / "gpu-check.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    (directory / "gpu-check.md").write_text(text, "utf-8")
    return text


def commit() -> str | None:
    """Returns the commit of this repository; None without git or without a git repository."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None
