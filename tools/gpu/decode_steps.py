"""Computes decode figures of one batch size from an engine's step log.

A step's time is from its beginning to the beginning of the next step, so it does not matter which
of its phases overlap. The host waits for the device in the phase `execute` and works in all others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shmllm.bench.steps import PHASE_FIELDS, StepTable, is_decode
from shmllm.ipc.stats import StepField

SKIPPED = 3
"""The number of first decode steps that are not counted."""


def decode_figures(steps: StepTable, batch: int, prompt: int) -> dict[str, Any]:
    """Returns the figures of the steps that decode the whole batch.

    Args:
        steps: all steps of one run, from its first step on.
        batch: the number of requests in the steps that are counted.
        prompt: the number of tokens in each request's prompt.

    Returns:
        num_steps; step_us and p99_us, median and 99th percentile; tokens_per_s, from the median;
        context, the mean number of tokens that a request attends to; host_us and waited_us, means
        of the host's work and of its wait for the device. If the batch never ran as a whole, only
        num_steps, which is 0. None of them shows whether the device was idle: the events of a step
        are reached at once if it was. The profile does (`trace.kernel_table`).
    """
    full = is_decode(steps) & (steps[:, StepField.NUM_REQUESTS] == batch)
    chosen = np.flatnonzero(full[:-1] & full[1:])[SKIPPED:]
    if not len(chosen):
        return {"num_steps": 0}
    began = steps[:, StepField.BEGAN_NS]
    took = (began[chosen + 1] - began[chosen]).astype(np.float64)
    waited = steps[chosen, StepField.EXECUTE_NS].astype(np.float64)
    host = steps[chosen][:, PHASE_FIELDS].sum(axis=1) - waited
    sampled_before = np.cumsum(steps[:, StepField.NUM_SAMPLED])[chosen - 1]
    median = float(np.median(took))
    return {
        "num_steps": len(chosen),
        "step_us": median / 1e3,
        "p99_us": float(np.percentile(took, 99)) / 1e3,
        "tokens_per_s": batch * 1e9 / median,
        "context": prompt + float(sampled_before.mean()) / batch,
        "host_us": float(host.mean()) / 1e3,
        "waited_us": float(waited.mean()) / 1e3,
    }
