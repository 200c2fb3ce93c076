"""Runs all GPU checks, tests and benchmarks, in commands of at most ten minutes (CONTRIBUTING.md).

    tools/gpu_check --fetch-wheels DIR         on a machine with a network: download wheels
    tools/gpu_check --wheels DIR --out DIR     on the machine with the GPU, until all is done
    tools/gpu_check --only PART --out DIR      one part, with all the time there is
    tools/gpu_check --rehearse --out DIR       without a GPU, with small models
    tools/gpu_check --write-tiles RECORD       on any machine: measured tile sizes into the table

It stops at the first part that fails and prints the reason. The same command goes on where it
stopped: parts whose code, card and packages have not changed are not run again. It writes
gpu-check.json and gpu-check.md after each part, and adds to gpu-check.log. A copy of
gpu-check.json in --out DIR is enough to go on.

The exit code is 0 if all chosen parts are done, 1 if one failed, 3 if the time is over and parts
are left, and 129, 130 or 143 if the command was interrupted. All temporary files are in --out DIR;
the command removes them when it ends, and the next one does so after a command that was killed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from subprocess import CalledProcessError
from typing import TextIO

from gpu import wheels
from gpu.figures import Figures
from gpu.parts import PARTS, Part, select
from gpu.running import PARENT
from gpu.scratch import scratch
from gpu.session import SITE, Session

BEGAN = time.monotonic()
LIMIT_S = 580.0
KERNELS = Path(__file__).resolve().parents[2] / "kernels"
INTERRUPTS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # sys/prctl.h


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="the directory of the results")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PART",
        help='run only this part, or all whose names begin so ("tests"); repeatable',
    )
    parser.add_argument(
        "--again",
        action="append",
        default=[],
        metavar="PART",
        help="run this part even if an earlier run has its figures; repeatable",
    )
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
    parser.add_argument(
        "--prepare",
        type=Path,
        metavar="DIR",
        help="compile for an H100 or H200 what engines, searches and tests launch, without a GPU;"
        " exit",
    )
    parser.add_argument(
        "--write-tiles",
        type=Path,
        metavar="RECORD",
        help="replace the tile sizes for which the record DIR/gpu-check.json has better ones; exit",
    )
    given = parser.parse_args()
    others = given.list, given.fetch_wheels, given.here, given.prepare, given.write_tiles
    if not (any(others) or given.out):
        parser.error("name the directory of the results: --out DIR")
    if given.wheels and not given.wheels.is_dir():
        parser.error(f"no folder {str(given.wheels)!r}; --fetch-wheels creates it")
    try:
        given.parts = select(given.only)
        given.repeated = select(given.again) if given.again else []
    except ValueError as problem:
        parser.error(str(problem))
    if given.here:
        given.parts = [part for part in given.parts if part.name in given.only]
        if len(given.parts) != 1:
            parser.error("--here runs one part: name it with --only PART")
    return given


def run_parts(given: argparse.Namespace, log: TextIO, directory: Path) -> int:
    """Runs the parts, prints the results, and returns the exit code. Temporary files go into
    `directory`."""

    def report(line: str) -> None:
        print(f"[{time.monotonic() - BEGAN:5.0f} s] {line}", flush=True)

    if given.wheels:
        names = wheels.install(given.wheels, directory / SITE)
        report(f"installed: {', '.join(names) or 'nothing, no package is missing'}")
    session = Session(given.out, given.rehearse, BEGAN + given.limit, log, directory, report)
    text, code = session.run(given.parts, bool(given.only), given.repeated)
    print(f"\n{text}")
    return code


def run_here(part: Part, rehearsal: bool, figures: Path) -> None:
    """Runs a part in this process. The last line of an exception becomes the part's error."""
    end_with_parent()
    from gpu.settings import settings_for

    if not rehearsal:
        from shmllm_kernels.gpu.cache_keys import fix_cache_keys

        fix_cache_keys()
    if rehearsal and part.interpreted:
        from gpu.rehearsal import interpret

        interpret()
    module, _, function = part.target.partition(":")
    run = getattr(import_module(f"gpu.{module}"), function)
    run(settings_for(rehearsal), Figures(figures), *part.arguments)


def end_with_parent() -> None:
    """Lets this process end with the one that started it, also if that is killed: two parts would
    share the device otherwise."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.environ.get(PARENT, "") not in ("", str(os.getppid())):
        sys.exit("gpu_check has ended")


def list_parts(chosen: list[Part]) -> None:
    for part in PARTS:
        mark = "*" if part in chosen else " "
        print(f"{mark} {part.name:<26} {part.budget_s:4.0f} s  {part.what}")


def fetch_wheels(given: argparse.Namespace) -> int:
    try:
        size = wheels.fetch(given.fetch_wheels, given.wheel)
    except (ValueError, CalledProcessError) as problem:
        is_pip = isinstance(problem, CalledProcessError)
        message = "pip could not download the wheels, see above" if is_pip else problem
        print(f"gpu_check: {message}", file=sys.stderr)
        return 2
    print(f"{size / 2**20:.1f} MiB in {given.fetch_wheels}")
    return 0


def prepare_parts(given: argparse.Namespace) -> int:
    from gpu.prepare import TARGETS, prepare

    parts = [part for part in given.parts if part.target in TARGETS]
    if not parts:
        names = ", ".join(part.name for part in PARTS if part.target in TARGETS)
        print(f"gpu_check: --prepare is for the parts {names}", file=sys.stderr)
        return 2
    try:
        given.prepare.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        print(f"gpu_check: {problem}", file=sys.stderr)
        return 2
    with scratch(given.prepare) as directory:
        os.environ["TMPDIR"] = str(directory)  # for torch's caches
        return prepare(parts, given.prepare, given.rehearse, print)


def write_tiles(record: Path) -> int:
    sys.path.insert(0, str(KERNELS))  # whose table is written, not that of an installed shmllm
    from gpu.write_tiles import RefusedRecord, write_tiles
    from shmllm_kernels.gpu.tiles import TileError

    table = KERNELS / "shmllm_kernels" / "gpu" / "tiles.json"
    try:
        print("\n".join(write_tiles(record, table)))
    except (RefusedRecord, TileError) as problem:
        print(f"gpu_check: {problem}", file=sys.stderr)
        return 2
    return 0


class Stopped(BaseException):
    """A signal has interrupted this command."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def stop(number: int, _: object) -> None:
    """Ends this command at a signal. Further ones must not interrupt the removal of its files."""
    for each in INTERRUPTS:
        signal.signal(each, signal.SIG_IGN)
    raise Stopped(number)


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
    if given.write_tiles:
        return write_tiles(given.write_tiles)
    if given.prepare:
        return prepare_parts(given)
    for number in INTERRUPTS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, stop)
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        with (
            (given.out / "gpu-check.log").open("a", encoding="utf-8") as log,
            scratch(given.out) as directory,
        ):
            return run_parts(given, log, directory)
    except OSError as problem:
        print(f"gpu_check: {problem}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(f"\ngpu_check: stopped; the completed parts are in {given.out}", file=sys.stderr)
        return 128 + stopped.number
