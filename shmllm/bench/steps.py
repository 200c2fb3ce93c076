"""Collects all steps of an engine during a measurement.

This module follows the engine's step log, a ring that overwrites its oldest records. It must not
know what is measured.
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
READ_AFTER = layout.NUM_STEP_RECORDS // 4
LAST_RECORD_S = 0.2


class StepFollower:
    """Reads the records of a step log before they are overwritten.

    Args:
        log: the engine's step log.

    Attributes:
        num_missed: number of steps that were overwritten before they were read.
    """

    def __init__(self, log: StepLogReader) -> None:
        self._log = log
        self._parts: list[StepTable] = []
        self._since = 0
        self.num_missed = 0

    def begin(self) -> None:
        """Starts a new measurement, which leaves out all earlier steps."""
        self._parts.clear()
        self._since = self._log.count

    def keep_up(self) -> None:
        """Reads the records that could be overwritten soon; call it every few steps."""
        if self._log.count - self._since >= READ_AFTER:
            self._read()

    def finish(self, num_steps: Callable[[], int]) -> StepTable:
        """Ends the measurement.

        Args:
            num_steps: returns the number of steps that the engine has run. The engine logs a step
                just after it publishes the step's outputs, so this function may have to wait for
                the last record.

        Returns:
            All steps since `begin`: one row per step, one column per StepField.
        """
        deadline = time.monotonic() + LAST_RECORD_S
        while self._log.count < num_steps() and time.monotonic() < deadline:
            time.sleep(0.001)
        self._read()
        return np.concatenate(self._parts)

    def _read(self) -> None:
        steps = self._log.read(self._since)
        self._since = steps.next
        self.num_missed += steps.num_missed
        self._parts.append(steps.fields)


def step_us(steps: StepTable) -> npt.NDArray[np.float64]:
    """The duration of each step (the sum of its phases) in microseconds."""
    total: npt.NDArray[np.float64] = steps[:, PHASE_FIELDS].sum(axis=1) / 1e3
    return total


def phases_us(steps: StepTable) -> dict[str, npt.NDArray[np.float64]]:
    """By phase, the duration of the phase in each step, in microseconds."""
    return {p: steps[:, f] / 1e3 for p, f in zip(PHASES, PHASE_FIELDS, strict=True)}


def is_decode(steps: StepTable) -> npt.NDArray[np.bool_]:
    """Whether each step was a pure decode step.

    A decode step computes one token of each of its requests, perhaps drafted tokens behind it, and
    samples a token, which is not the first one, for each of them.
    """
    tokens, requests = steps[:, StepField.NUM_TOKENS], steps[:, StepField.NUM_REQUESTS]
    known = tokens - steps[:, StepField.NUM_DRAFT_TOKENS]
    later = steps[:, StepField.NUM_SAMPLED] - steps[:, StepField.NUM_FIRST]
    found: npt.NDArray[np.bool_] = (known == requests) & (later >= requests)
    return found
