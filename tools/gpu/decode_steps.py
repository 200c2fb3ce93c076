"""What an engine's step log says about decodes of one batch size. Pure arithmetic.

A step's time is from its beginning to that of the next one, so it does not matter which of its
phases overlap. The host waits for the device in the phase `execute` and works in all others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shmllm.bench.steps import PHASE_FIELDS, StepTable, is_decode
from shmllm.ipc.stats import StepField

SKIPPED = 3
WAITED_AT_ALL_NS = 5_000


def decode_figures(steps: StepTable, batch: int, prompt: int, overlaps: bool) -> dict[str, Any]:
    """
    Args:
        steps: all steps of one run, from its first on.
        batch: requests of the steps that count.
        prompt: tokens of each request's prompt.
        overlaps: the engine prepares a step while the one before it runs.

    Returns:
        num_steps; step_us, its median, and p99_us; tokens_per_s by the median; context, the mean
        tokens that a request attended to; host_us and waited_us, means; unhidden_us and
        unhidden_share: time that the host worked and the device had nothing to do.
        unhidden_by says how that is known: "device" where steps have the device's own time,
        else "phases", which is a bound: all of the host's work in a step, unless it had to wait
        for a step that was queued before it began to work.
        num_steps is 0, and the rest missing, if the batch never ran as a whole.
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
