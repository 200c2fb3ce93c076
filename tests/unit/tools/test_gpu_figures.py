"""Computing figures from an engine's step log and from a profiler's trace."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from gpu.decode_steps import SKIPPED, decode_figures
from gpu.trace import kernel_table, read_events

from shmllm.ipc.stats import StepField

PREFILL_US, HOST_US = 5_000, 40


def log(batch: int, steps: int, period_us: int, waited_us: int) -> np.ndarray:
    """Returns the log of a prefill and of decodes of the whole batch."""
    table = np.zeros((steps + 1, len(StepField)), np.int64)
    table[:, StepField.NUM_REQUESTS] = table[:, StepField.NUM_SAMPLED] = batch
    table[:, StepField.NUM_TOKENS] = batch
    table[0, StepField.NUM_TOKENS] = 100 * batch
    table[0, StepField.NUM_FIRST] = batch
    table[1:, StepField.BEGAN_NS] = 1000 * (PREFILL_US + period_us * np.arange(steps))
    table[1:, StepField.EXECUTE_NS] = 1000 * waited_us
    table[1:, StepField.SCHEDULE_NS] = 1000 * HOST_US // 4
    table[1:, StepField.PUBLISH_NS] = 1000 * HOST_US * 3 // 4
    return table


def test_a_steps_time_ends_when_the_next_step_begins():
    found = decode_figures(log(8, 20, 500, 450), 8, prompt=100)
    assert found["num_steps"] == 20 - 1 - SKIPPED
    assert found["step_us"] == found["p99_us"] == 500
    assert found["tokens_per_s"] == pytest.approx(16_000)
    assert (found["host_us"], found["waited_us"]) == (HOST_US, 450)


def test_the_context_includes_the_generated_tokens():
    # Step i after the prefill attends to the prompt and i + 1 tokens. The last step is not counted.
    steps = 20
    found = decode_figures(log(8, steps, 500, 450), 8, prompt=100)
    assert found["context"] == 100 + np.mean(np.arange(SKIPPED, steps - 1) + 1)


def test_steps_of_another_batch_size_are_not_counted():
    steps = log(8, 20, 500, 450)
    steps[11, [StepField.NUM_REQUESTS, StepField.NUM_TOKENS, StepField.NUM_SAMPLED]] = 7
    steps[12:, StepField.BEGAN_NS] += 10**9
    found = decode_figures(steps, 8, 100)
    assert found["step_us"] == found["p99_us"] == 500
    assert decode_figures(steps, 9, 100) == {"num_steps": 0}


def event(name: str, ts: float, dur: float, kind: str = "kernel") -> dict[str, object]:
    return {"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur}


def test_kernel_times_are_summed_by_name_and_overlapping_time_counts_once(tmp_path):
    events = [
        event("gemm", 0, 40),
        event("copy", 20, 30, "gpu_memcpy"),
        event("gemm", 80, 20),
        event("aten::mm", 0, 1000, "cpu_op"),
        {"ph": "i", "cat": "kernel", "name": "mark", "ts": 5},
    ]
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": events}, file)
    found = kernel_table(read_events(path), num_steps=2)
    assert found["us_per_step"] == 45
    # Of the last three quarters, 25 to 100, nothing ran from 50 to 80.
    assert found["busy_share"] == pytest.approx(0.6)
    assert found["largest_gap_us"] == 30
    assert [(row["name"], row["us_per_step"]) for row in found["kernels"]] == [
        ("gemm", 30),
        ("copy", 15),
    ]
    assert found["kernels"][0]["calls_per_step"] == 1
    assert found["kernels"][0]["share"] == pytest.approx(60 / 90)


def test_a_device_that_waits_for_the_host_between_steps_is_not_busy():
    # A step's first event is reached at once if the device is idle, and hides these 100 us.
    events = [event("step", 1000 * number, 900) for number in range(40)]
    found = kernel_table(events, num_steps=40)
    assert found["busy_share"] == pytest.approx(0.9, abs=0.01)
    assert found["largest_gap_us"] == 100


def test_the_beginning_of_a_profile_does_not_count():
    events = [event("step", 0, 1), *(event("step", ts, 10) for ts in range(1000, 5000, 10))]
    assert kernel_table(events, num_steps=1)["busy_share"] == pytest.approx(1.0)


def test_a_trace_without_kernels_is_an_empty_table():
    assert kernel_table([event("aten::mm", 0, 1, "cpu_op")], 3)["kernels"] == []
