"""Summarizes the measurements of batches as a JSON record and as text.

This module owns the percentiles and the layout of record and text; it must not know how the
measurements were made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmllm.bench.generation import Measured
from shmllm.bench.report import number, table
from shmllm.bench.steps import StepTable, is_decode, phases_us, step_us
from shmllm.ipc.stats import PHASES, StepField

PERCENTILES = (10, 25, 50, 75, 90, 99)
LATENCIES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
SHOWN = ("p50", "p90", "p99", "max")

Values = Sequence[float] | npt.NDArray[np.float64]


def percentiles(values: Values) -> dict[str, float]:
    """The mean, the nearest-rank percentiles and the maximum; zeros if `values` is empty."""
    found = np.asarray(values if len(values) else [0.0], dtype=np.float64)
    ranks = np.percentile(found, PERCENTILES, method="inverted_cdf")
    named = {f"p{p}": float(value) for p, value in zip(PERCENTILES, ranks, strict=True)}
    return {"mean": float(found.mean()), **named, "max": float(found.max())}


def summary(measured: Measured) -> dict[str, Any]:
    """All figures of some batches. The rates are those of the batch with the median tokens/s."""
    rates = sorted(
        zip(
            [n / s for n, s in zip(measured.output_tokens, measured.seconds, strict=True)],
            measured.seconds,
            measured.prompt_tokens,
            measured.output_tokens,
            strict=True,
        )
    )
    rate, seconds, prompt_tokens, output_tokens = rates[len(rates) // 2]
    milliseconds = {
        "ttft_ms": measured.ttft_s,
        "itl_ms": measured.itl_s,
        "tpot_ms": measured.tpot_s,
        "e2e_ms": measured.e2e_s,
    }
    return {
        "seconds": seconds,
        "output_tokens_per_s": rate,
        "output_tokens_per_s_range": [rates[0][0], rates[-1][0]],
        "total_tokens_per_s": (prompt_tokens + output_tokens) / seconds,
        "latency_s": percentiles(measured.seconds),
        **{k: percentiles([1000 * v for v in values]) for k, values in milliseconds.items()},
        **_step_figures(measured.all_steps()),
    }


def _step_figures(steps: StepTable) -> dict[str, Any]:
    decodes = steps[is_decode(steps)]
    decode = step_us(decodes)
    slowest = float(decode.max() / np.median(decode)) if len(decode) else None
    return {
        "num_steps": len(steps),
        "step_ms": percentiles(step_us(steps) / 1e3),
        "decode_step_ms": percentiles(decode / 1e3),
        "slowest_decode_step_over_median": slowest,
        **_draft_figures(steps, decodes),
        "phases_us": {phase: percentiles(values) for phase, values in phases_us(steps).items()},
    }


def _draft_figures(steps: StepTable, decodes: StepTable) -> dict[str, Any]:
    """What became of drafted tokens, and how many tokens a request got in a decode step."""
    drafted, accepted = (
        int(steps[:, field].sum())
        for field in (StepField.NUM_DRAFT_TOKENS, StepField.NUM_ACCEPTED_TOKENS)
    )
    num_tokens = int((decodes[:, StepField.NUM_SAMPLED] - decodes[:, StepField.NUM_FIRST]).sum())
    num_requests = int(decodes[:, StepField.NUM_REQUESTS].sum())
    return {
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "tokens_per_request_and_decode_step": num_tokens / num_requests if num_requests else None,
    }


def latency_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A table of the latencies of each result.

    Args:
        results: the summaries by the prefix of their lines.
    """
    rows = {
        f"{title} {name}".strip(): result[key]
        for title, result in results.items()
        for key, name in {**LATENCIES, "step_ms": "step"}.items()
    }
    columns = {p: (lambda row, p=p: number(rows[row][p])) for p in ("mean", *SHOWN)}
    return table("ms", list(rows), columns)


def phase_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A table of the mean duration of each phase and its share of the step.

    Args:
        results: the summaries by the heading of their column.
    """

    def cell(result: Mapping[str, Any], phase: str) -> str:
        means = {name: found["mean"] for name, found in result["phases_us"].items()}
        share = 100 * means[phase] / (sum(means.values()) or 1)
        return f"{number(means[phase])} ({share:.0f} %)"

    columns = {
        title: (lambda phase, result=result: cell(result, phase))
        for title, result in results.items()
    }
    return table("per step, us", list(PHASES), columns)
