"""All GPU tests and benchmarks in one command, inside eight minutes; docs/gpu.md explains.

    tools/gpu_check --fetch-wheels DIR         where there is a network: what the machine may lack
    tools/gpu_check --wheels DIR --out DIR     on the machine with the GPU
    tools/gpu_check --tune --out DIR           entries for the tables of the kernels
    tools/gpu_check --rehearse --out DIR       the same without a GPU, on small things

Writes gpu-check.json, gpu-check.md and gpu-check.log, anew after each part. Exits with 1 if a
part failed or had no time, with 130 or 143 if it was stopped, and what was measured stays.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any, TextIO

from gpu import wheels
from gpu.figures import Figures
from gpu.parts import PARTS, Part, select
from gpu.record import ROOT, make_record, write_record
from gpu.running import Runner
from gpu.settings import settings_for

BEGAN = time.monotonic()
LIMIT_S = 480.0
RESERVE_S = 15.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write")
    parser.add_argument("--only", action="append", default=[], metavar="PART")
    parser.add_argument("--tune", action="store_true", help="the part tune, and no other")
    parser.add_argument("--list", action="store_true", help="name the parts, and no more")
    parser.add_argument("--here", type=Path, metavar="FILE", help="the one part, in this process")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="install these first")
    parser.add_argument("--fetch-wheels", type=Path, metavar="DIR", help="download, and no more")
    parser.add_argument("--wheel", action="append", default=[], metavar="NAME", help="only these")
    given = parser.parse_args()
    if not (given.list or given.fetch_wheels or given.here or given.out):
        parser.error("say where to write: --out DIR")
    if given.tune and given.only:
        parser.error("--tune takes no --only")
    if given.wheels and not given.wheels.is_dir():
        parser.error(f"no folder {str(given.wheels)!r}; --fetch-wheels makes it")
    try:
        given.parts = select(["tune"] if given.tune else given.only)
    except ValueError as problem:
        parser.error(str(problem))
    if given.here and len(given.parts) != 1:
        parser.error("--here takes one part: --only PART")
    return given


def environment(part: Part, site: Path, rehearsal: bool) -> dict[str, str]:
    """A part sees this repository and the wheels before what is installed."""
    paths = [str(ROOT), str(ROOT / "kernels"), str(site), os.environ.get("PYTHONPATH", "")]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    found.pop("TRITON_INTERPRET", None)
    interpreted = {"TRITON_INTERPRET": "1"} if rehearsal and part.interpreted else {}
    return found | interpreted | {"PYTHONUNBUFFERED": "1"}


def measure(given: argparse.Namespace, log: TextIO, site: Path) -> dict[str, Any]:
    """The whole record, and what is on disk meanwhile."""

    def elapsed() -> float:
        return time.monotonic() - BEGAN

    def report(line: str) -> None:
        print(f"[{elapsed():5.0f} s] {line}", flush=True)

    if given.wheels:
        names = wheels.install(given.wheels, site)
        report(f"installed: {', '.join(names) or 'nothing, all is there'}")
    options = ["--rehearse"] if given.rehearse else []
    runner = Runner(given.limit - RESERVE_S - elapsed(), options, log, report)
    found: dict[str, Any] = {}
    record = make_record(found, given.rehearse, elapsed())
    write_record(record, given.out)
    for part in given.parts:
        found[part.name] = runner.run(part, environment(part, site, given.rehearse))
        record = make_record(found, given.rehearse, elapsed())
        write_record(record, given.out)
    return record


def run_here(part: Part, rehearsal: bool, figures: Path) -> None:
    """What the process of a part does; the last line of what it raises becomes its error."""
    module, _, function = part.target.partition(":")
    run = getattr(import_module(f"gpu.{module}"), function)
    run(settings_for(rehearsal), Figures(figures), *part.arguments)


def list_parts(chosen: list[Part]) -> None:
    for part in PARTS:
        mark = "*" if part in chosen else " "
        print(f"{mark} {part.name:<26} {part.budget_s:4.0f} s  {part.what}")


def fetch_wheels(given: argparse.Namespace) -> int:
    try:
        wheels.fetch(given.fetch_wheels, given.wheel)
    except (ValueError, CalledProcessError) as problem:
        said = (
            "pip got no wheels, see above" if isinstance(problem, CalledProcessError) else problem
        )
        print(f"gpu_check: {said}", file=sys.stderr)
        return 2
    return 0


def main() -> int:
    given = arguments()
    if given.list:
        list_parts(given.parts)
        return 0
    if given.here:
        run_here(given.parts[0], given.rehearse, given.here)
        return 0
    if given.fetch_wheels:
        return fetch_wheels(given)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        with (
            (given.out / "gpu-check.log").open("w", encoding="utf-8") as log,
            tempfile.TemporaryDirectory() as site,
        ):
            record = measure(given, log, Path(site))
        print(f"\n{write_record(record, given.out)}")
    except OSError as problem:
        print(f"gpu_check: {problem}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, SystemExit) as stop:
        print(f"\ngpu_check: stopped; the parts before are in {given.out}", file=sys.stderr)
        return getattr(stop, "code", 130)
    return int(any(part["status"] != "ok" for part in record["parts"].values()))
