"""Runs parts until one fails or the time is over, and keeps the record of this and earlier runs.

This module owns which parts run, how much time each gets, and the files in the directory of the
results. It must not know what the parts measure.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from gpu import resume
from gpu.figures import read_figures, write_json
from gpu.parts import PARTS, Part
from gpu.record import make_record, write_record
from gpu.running import CHECK, Runner

ROOT = Path(__file__).resolve().parents[2]
RECORD = "gpu-check.json"
RUNNING = "gpu-check.running.json"
BEFORE = "gpu-check.before.json"
SITE = "site"
RESERVE_S = 12.0
LEAST_S = 2.0
ALL_DONE, FAILED, TIME_IS_OVER = 0, 1, 3

Report = Callable[[str], None]


class Session:
    """One run of gpu_check.

    Args:
        out: the directory of the results, with the record of an earlier run if there was one.
        rehearsal: whether there is no GPU.
        ends: when the time is over, by `time.monotonic`.
        log: the file that gets the output of the parts.
        directory: the folder of temporary files, with the packages that were installed for this
            run in `SITE`.
        report: called with a line when a part begins and when it ends.
        program: the command that runs one part, see `Runner`.
        table: all parts that there are.
    """

    def __init__(
        self,
        out: Path,
        rehearsal: bool,
        ends: float,
        log: TextIO,
        directory: Path,
        report: Report,
        program: Path = CHECK,
        table: Sequence[Part] = PARTS,
    ) -> None:
        self._out = out
        self._rehearsal = rehearsal
        self._began = time.monotonic()
        self._ends = ends - RESERVE_S
        self._site = directory / SITE
        self._report = report
        self._machine = resume.machine_key(rehearsal)
        options = ["--rehearse"] if rehearsal else []
        self._runner = Runner(options, log, out / RUNNING, directory, program)
        self._table = {part.name: part for part in table}
        earlier = resume.read_record(out / RECORD)
        self._earlier_s = float(earlier.get("seconds", 0.0))
        self._found: dict[str, Any] = dict(earlier.get("parts", {}))
        self._adopt_running()
        self._drop_outdated(earlier)

    def run(
        self, parts: Sequence[Part], are_named: bool, repeated: Sequence[Part]
    ) -> tuple[str, int]:
        """Runs the parts that no earlier run has done, up to the first that fails.

        Args:
            parts: the chosen parts, in their order.
            are_named: whether they were named. Each then gets all the time that is left.
            repeated: the parts that run even if an earlier run has done them.

        Returns:
            The text of the record, and the exit code.
        """
        has_begun = False
        for part in parts:
            if part not in repeated and self._is_done(part):
                self._report(f"{part.name}: done by an earlier run")
                continue
            left_s = self._ends - time.monotonic()
            wanted_s = LEAST_S if are_named or not has_begun else part.budget_s
            if left_s < wanted_s:
                self._report(f"{part.name} is next, and may take {part.budget_s:.0f} s")
                return self._write(next_part=part.name), TIME_IS_OVER
            outcome = self._run_part(part, left_s if are_named else min(part.budget_s, left_s))
            has_begun = has_begun or not part.leaves_files
            if outcome["status"] == "unfinished":
                return self._write(next_part=part.name), TIME_IS_OVER
            if outcome["status"] != resume.DONE:
                return self._stop(part, outcome), FAILED
        return self._write(), ALL_DONE

    def _is_done(self, part: Part) -> bool:
        status = self._found.get(part.name, {}).get("status")
        return status == resume.DONE and not part.leaves_files

    def _run_part(self, part: Part, budget_s: float) -> dict[str, Any]:
        identity = resume.identity(part, self._machine)
        earlier = self._found.get(part.name, {})
        kept = earlier["figures"] if earlier.get("status") in resume.UNFINISHED else {}
        running = {"status": "running", "seconds": 0.0, "budget_s": budget_s, "error": None}
        self._found[part.name] = {**running, "output": [], "figures": {}, **identity}
        self._write()
        self._report(f"{part.name}: {part.what} (at most {budget_s:.0f} s)")
        outcome = self._runner.run(part, self._environment(part), budget_s, kept) | identity
        self._found[part.name] = outcome
        self._write()
        error = outcome["error"]
        after = f"{part.name}: {outcome['status']} after {outcome['seconds']:.1f} s"
        self._report(after + (f": {error}" if error else ""))
        return outcome

    def _environment(self, part: Part) -> dict[str, str]:
        """Returns the environment variables of a part. It imports this repository and the installed
        wheels before the machine's own packages."""
        own = [ROOT, ROOT / "kernels", ROOT / "tools", self._site]
        paths = [*map(str, own), os.environ.get("PYTHONPATH", "")]
        found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        found.pop("TRITON_INTERPRET", None)
        interpreted = {"TRITON_INTERPRET": "1"} if self._rehearsal and part.interpreted else {}
        return found | interpreted | {"PYTHONUNBUFFERED": "1"}

    def _adopt_running(self) -> None:
        """Takes over the figures of a part during which an earlier run was killed."""
        for name, outcome in self._found.items():
            if outcome.get("status") == "running":
                figures = read_figures(self._out / RUNNING)
                self._found[name] = outcome | {"status": "interrupted", "figures": figures}
        (self._out / RUNNING).unlink(missing_ok=True)

    def _drop_outdated(self, earlier: Mapping[str, Any]) -> None:
        """Drops the figures of other code or of another machine; a copy of the record has them."""
        known = self._table
        counted = {
            name: outcome
            for name, outcome in self._found.items()
            if name in known and resume.counts(outcome, resume.identity(known[name], self._machine))
        }
        if len(counted) < len(self._found):
            write_json(self._out / BEFORE, earlier)
            dropped = ", ".join(name for name in self._found if name not in counted)
            self._report(f"outdated, kept in {BEFORE}: {dropped}")
            self._found = counted

    def _stop(self, part: Part, outcome: Mapping[str, Any]) -> str:
        """Returns what fits on one screen: the reason, and the last lines of the part."""
        stopped = {"part": part.name, "status": outcome["status"], "error": outcome["error"]}
        self._write(stopped=stopped, next_part=part.name)
        lines = [f"{part.name} {outcome['status']}: {outcome['error']}", "", *outcome["output"]]
        lines += ["", f"all figures: {self._out / RECORD}; all output: gpu-check.log beside it"]
        return "\n".join(lines)

    def _write(self, stopped: Mapping[str, Any] | None = None, next_part: str | None = None) -> str:
        seconds = self._earlier_s + time.monotonic() - self._began
        record = make_record(self._found, self._rehearsal, seconds, self._machine)
        return write_record(record | {"stopped": stopped, "next": next_part}, self._out)
