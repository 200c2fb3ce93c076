"""Decides which parts of an earlier run still count.

The figures of a part count as long as the code that they depend on, the card and the versions of
the packages are the same. This module must not know what the parts measure.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from gpu.parts import Part

ROOT = Path(__file__).resolve().parents[2]
DONE = "ok"
UNFINISHED = ("unfinished", "interrupted")
"""The states of a part that goes on where it stopped, if it can."""
PACKAGES = ("torch", "triton", "transformers")
NUM_DIGITS = 12
TILES = "tiles.json"
BESIDE_THE_FIGURES = frozenset(
    ROOT / "tools" / "gpu" / f"{name}.py"
    for name in (
        *("derived", "main", "orphans", "parts", "record", "resume"),
        *("running", "session", "table", "targets", "wheels", "write_tiles"),
    )
)
"""Modules that change no figure: they choose parts, or show what the parts measured."""


def read_record(path: Path) -> dict[str, Any]:
    """Returns the record of an earlier run; {} if there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("parts"), dict) else {}


def identity(part: Part, machine: str) -> dict[str, str]:
    """Returns what has to be the same for the figures of a part to count: code and machine."""
    return {"code": digest(part.code), "machine": machine}


@cache
def digest(paths: tuple[str, ...]) -> str:
    """Returns a hash of the names and contents of all Python files, and of the table of tile sizes,
    under these paths, which are relative to the repository, without `BESIDE_THE_FIGURES`."""
    found = hashlib.sha256()
    files = {file for path in paths for file in _code_files(ROOT / path)}
    for file in sorted(files - BESIDE_THE_FIGURES):
        content = file.read_bytes()
        found.update(f"{file.relative_to(ROOT)} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()[:NUM_DIGITS]


def _code_files(path: Path) -> Iterable[Path]:
    return [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob(TILES)]


def machine_key(rehearsal: bool) -> str:
    """Returns one line that names the card, its driver and the versions of the packages."""
    versions = [f"{name} {_version(name)}" for name in PACKAGES]
    return ", ".join([_card(rehearsal), *versions])


def counts(earlier: Mapping[str, Any], wanted: Mapping[str, str]) -> bool:
    """Returns whether an earlier outcome is of the same code and machine."""
    return bool(earlier) and all(earlier.get(name) == value for name, value in wanted.items())


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "is missing"


def _card(rehearsal: bool) -> str:
    if rehearsal:
        return "a rehearsal"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "an unknown card"
    return done.stdout.strip().replace("\n", "; ") or "an unknown card"
