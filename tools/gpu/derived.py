"""Combines the figures of several parts: shares of the roofline, and ratios to transformers.

A figure that was not measured gives None, not an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu.families import FAMILIES
from gpu.shapes import SHAPES

Parts = Mapping[str, Mapping[str, Any]]
MODES = ("eager", "compiled")


def figure(parts: Parts, part: str, *path: str) -> Any:
    """Returns a figure of a part, or None if it was not measured."""
    found: Any = parts.get(part, {}).get("figures", {})
    for name in path:
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def derive(parts: Parts) -> dict[str, Any]:
    """Computes the combined figures.

    Returns:
        decode: by model and batch, the share of the copy's bandwidth and of the best read's;
        float8: by batch, the same with FP8 keys and values;
        families: by name of a family and batch, the same;
        prefill: by model, the share of the large product's rate;
        sampled: by model, load and batch, the time of a step as a multiple of a greedy one;
        transformers: by model, mode and batch, the ratios of `compare`.
    """
    engines = {size: f"engine-{size}" for size in SHAPES if f"engine-{size}" in parts}
    return {
        "decode": {
            size: {
                batch: _decode(parts, found)
                for batch, found in (figure(parts, part, "decode") or {}).items()
            }
            for size, part in engines.items()
        },
        "float8": {
            batch: _decode(parts, found)
            for batch, found in (figure(parts, "float8", "decode") or {}).items()
        },
        "families": {
            name: {
                batch: _decode(parts, found)
                for batch, found in (figure(parts, f"family-{name}", "decode") or {}).items()
            }
            for name in FAMILIES
        },
        "prefill": {
            size: _prefill(parts, found)
            for size, part in engines.items()
            if (found := figure(parts, part, "prefill"))
        },
        "sampled": {size: _sampled(parts, part) for size, part in engines.items()},
        "transformers": {
            size: {mode: each for mode in MODES if (each := compare(parts, size, mode))}
            for size in engines
        },
    }


def _decode(parts: Parts, found: Mapping[str, Any]) -> dict[str, float | None]:
    rate = ratio(found.get("bytes"), found.get("step_us", 0.0) / 1e6)
    return {
        "bytes_per_s": rate,
        "of_copy": ratio(rate, figure(parts, "environment", "bandwidth", "copy")),
        "of_read": ratio(rate, figure(parts, "environment", "bandwidth", "read")),
    }


def _prefill(parts: Parts, found: Mapping[str, Any]) -> dict[str, float | None]:
    rate = ratio(found.get("flops"), found.get("s"))
    of_gemm = ratio(rate, figure(parts, "environment", "gemm", "flops_per_s"))
    return {"flops_per_s": rate, "of_gemm": of_gemm}


def _sampled(parts: Parts, part: str) -> dict[str, dict[str, float | None]]:
    return {
        load: {
            batch: ratio(found.get("step_us"), figure(parts, part, "decode", batch, "step_us"))
            for batch, found in by_batch.items()
        }
        for load, by_batch in (figure(parts, part, "sampled") or {}).items()
    }


def compare(parts: Parts, size: str, mode: str) -> dict[str, dict[str, float]]:
    """Compares the engine's `generate` with transformers'.

    Returns:
        By batch: whole, the ratio of the times of all of `generate`; decode, the same ratio
        without the time of one token; agreed, the share of requests whose first tokens are equal.
    """
    part = f"transformers-{size}" if mode == "eager" else f"transformers-{size}-{mode}"
    found = {}
    for batch, theirs in (figure(parts, part, "generate") or {}).items():
        ours = figure(parts, f"engine-{size}", "generate", batch)
        if ours is None:
            continue
        pairs = zip(ours["first_tokens"], theirs["first_tokens"], strict=True)
        equal = [a == b for a, b in pairs]
        found[batch] = {
            "whole": theirs["all_s"] / ours["all_s"],
            "decode": (theirs["all_s"] - theirs["one_s"]) / (ours["all_s"] - ours["one_s"]),
            "agreed": sum(equal) / len(equal),
        }
    return found
