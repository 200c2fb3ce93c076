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
WAITED_AT_ALL_NS = 5_000
"""A longer wait means that the device still worked when the host began to wait."""


def decode_figures(steps: StepTable, batch: int, prompt: int, overlaps: bool) -> dict[str, Any]:
    """Returns the figures of the steps that decode the whole batch.

    Args:
        steps: all steps of one run, from its first step on.
        batch: the number of requests in the steps that are counted.
        prompt: the number of tokens in each request's prompt.
        overlaps: whether the engine prepares a step while the previous one runs.

    Returns:
        num_steps; step_us and p99_us, median and 99th percentile; tokens_per_s, from the median;
        context, the mean number of tokens that a request attends to; host_us and waited_us, means;
        unhidden_us and unhidden_share, the time in which the host works and the device is idle;
        unhidden_by, the source of that: "device" if steps have the device's own time, otherwise
        "phases". The latter is an upper bound: all of the host's work in a step, except in steps
        in which the host had to wait for a step that was queued before its work began.
        If the batch never ran as a whole, only num_steps, which is 0.
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
    busy = steps[chosen, StepField.DEVICE_NS]
    is_timed = bool(busy.any())
    if is_timed:
        unhidden = np.maximum(took - busy, 0.0)
    else:
        unhidden = np.where(overlaps & (waited > WAITED_AT_ALL_NS), 0.0, host)
    median = float(np.median(took))
    return {
        "num_steps": len(chosen),
        "step_us": median / 1e3,
        "p99_us": float(np.percentile(took, 99)) / 1e3,
        "tokens_per_s": batch * 1e9 / median,
        "context": prompt + float(sampled_before.mean()) / batch,
        "host_us": float(host.mean()) / 1e3,
        "waited_us": float(waited.mean()) / 1e3,
        "unhidden_us": float(unhidden.mean()) / 1e3,
        "unhidden_share": float(unhidden.sum() / took.sum()),
        "unhidden_by": "device" if is_timed else "phases",
    }
