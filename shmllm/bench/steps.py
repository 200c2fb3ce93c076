"""An engine's steps while something is measured, all of them.

Owns following the step log, which forgets what nobody takes in time; must not know what is
measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shmllm.ipc import layout
from shmllm.ipc.stats import PHASES, StepField
from shmllm.ipc.step_log import StepLogReader

StepTable = npt.NDArray[np.int64]

PHASE_FIELDS = [StepField[f"{phase.upper()}_NS"] for phase in PHASES]
TAKE_AFTER = layout.NUM_STEP_RECORDS // 4
LAST_RECORD_S = 0.2


class StepFollower:
    """
    Args:
        log: of the engine.
    """

    def __init__(self, log: StepLogReader) -> None:
        self._log = log
        self._parts: list[StepTable] = []
        self._since = 0
        self.num_missed = 0

    def begin(self) -> None:
        """Leave out all steps before now."""
        self._parts.clear()
        self._since = self._log.count

    def keep_up(self) -> None:
        """Take what might be overwritten soon; to be called every few steps."""
        if self._log.count - self._since >= TAKE_AFTER:
            self._take()

    def finish(self, num_steps: Callable[[], int]) -> StepTable:
        """All steps since `begin`, a row each, a column for each StepField.

        Args:
            num_steps: how many the engine says it has run. A step is logged just after its
                outputs were published, so the last one may be still to come.
        """
        deadline = time.monotonic() + LAST_RECORD_S
        while self._log.count < num_steps() and time.monotonic() < deadline:
            time.sleep(0.001)
        self._take()
        return np.concatenate(self._parts)

    def _take(self) -> None:
        steps = self._log.read(self._since)
        self._since = steps.next
        self.num_missed += steps.num_missed
        self._parts.append(steps.fields)


def step_us(steps: StepTable) -> npt.NDArray[np.float64]:
    """How long each step took, all phases together, in microseconds."""
    total: npt.NDArray[np.float64] = steps[:, PHASE_FIELDS].sum(axis=1) / 1e3
    return total


def phases_us(steps: StepTable) -> dict[str, npt.NDArray[np.float64]]:
    """How long each phase of each step took, in microseconds."""
    return {p: steps[:, f] / 1e3 for p, f in zip(PHASES, PHASE_FIELDS, strict=True)}


def is_decode(steps: StepTable) -> npt.NDArray[np.bool_]:
    """Which steps computed one token of each of their requests, and sampled for all."""
    tokens, requests = steps[:, StepField.NUM_TOKENS], steps[:, StepField.NUM_REQUESTS]
    later = steps[:, StepField.NUM_SAMPLED] - steps[:, StepField.NUM_FIRST]
    found: npt.NDArray[np.bool_] = (tokens == requests) & (later == requests)
    return found
