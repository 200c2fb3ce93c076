"""Runs all GPU tests and benchmarks in one command, within eight minutes; see docs/gpu.md.

    tools/gpu_check --fetch-wheels DIR         on a machine with a network: download wheels
    tools/gpu_check --wheels DIR --out DIR     on the machine with the GPU
    tools/gpu_check --tune --out DIR           propose entries for the kernels' tables
    tools/gpu_check --rehearse --out DIR       without a GPU, with small models

It writes gpu-check.json, gpu-check.md and gpu-check.log again after each part. The exit code is 1
if a part failed or was skipped, and 130 or 143 if the command was interrupted; the files then have
the figures of the completed parts.
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
    parser.add_argument("--out", type=Path, metavar="DIR", help="the directory of the results")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PART", help="run only this part; repeatable"
    )
    parser.add_argument("--tune", action="store_true", help="run only the part tune")
    parser.add_argument("--list", action="store_true", help="list the parts and exit")
    parser.add_argument(
        "--here", type=Path, metavar="FILE", help="run one part in this process; write its figures"
    )
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="the time of all parts"
    )
    parser.add_argument("--rehearse", action="store_true", help="run without a GPU, small models")
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="install the missing wheels of DIR first"
    )
    parser.add_argument(
        "--fetch-wheels", type=Path, metavar="DIR", help="download wheels to DIR and exit"
    )
    parser.add_argument(
        "--wheel", action="append", default=[], metavar="NAME", help="download only this wheel"
    )
    given = parser.parse_args()
    if not (given.list or given.fetch_wheels or given.here or given.out):
        parser.error("name the directory of the results: --out DIR")
    if given.tune and given.only:
        parser.error("--tune and --only cannot be combined")
    if given.wheels and not given.wheels.is_dir():
        parser.error(f"no folder {str(given.wheels)!r}; --fetch-wheels creates it")
    try:
        given.parts = select(["tune"] if given.tune else given.only)
    except ValueError as problem:
        parser.error(str(problem))
    if given.here and len(given.parts) != 1:
        parser.error("--here runs one part: name it with --only PART")
    return given


def environment(part: Part, site: Path, rehearsal: bool) -> dict[str, str]:
    """Returns the environment variables of a part. It imports this repository and the installed
    wheels before the machine's own packages."""
    paths = [str(ROOT), str(ROOT / "kernels"), str(site), os.environ.get("PYTHONPATH", "")]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    found.pop("TRITON_INTERPRET", None)
    interpreted = {"TRITON_INTERPRET": "1"} if rehearsal and part.interpreted else {}
    return found | interpreted | {"PYTHONUNBUFFERED": "1"}


def measure(given: argparse.Namespace, log: TextIO, site: Path) -> dict[str, Any]:
    """Runs all parts and returns the record; writes it to disk after each part."""

    def elapsed() -> float:
        return time.monotonic() - BEGAN

    def report(line: str) -> None:
        print(f"[{elapsed():5.0f} s] {line}", flush=True)

    if given.wheels:
        names = wheels.install(given.wheels, site)
        report(f"installed: {', '.join(names) or 'nothing, no package is missing'}")
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
    """Runs a part in this process. The last line of an exception becomes the part's error."""
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
        is_pip = isinstance(problem, CalledProcessError)
        message = "pip could not download the wheels, see above" if is_pip else problem
        print(f"gpu_check: {message}", file=sys.stderr)
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
        print(f"\ngpu_check: stopped; the completed parts are in {given.out}", file=sys.stderr)
        return getattr(stop, "code", 130)
    return int(any(part["status"] != "ok" for part in record["parts"].values()))
