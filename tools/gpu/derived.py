"""What the parts' figures say together: rooflines, and ratios to transformers. Pure arithmetic.

Whatever a part did not measure is None here, never an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu.shapes import SHAPES

Parts = Mapping[str, Mapping[str, Any]]
MODES = ("eager", "compiled")


def look(parts: Parts, part: str, *path: str) -> Any:
    """A figure of a part; None if there is none."""
    found: Any = parts.get(part, {}).get("figures", {})
    for name in path:
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def derive(parts: Parts) -> dict[str, Any]:
    """
    Returns:
        decode: by model and batch, share of the copy's bandwidth and of the best reading's;
        prefill: by model, share of the large product's rate;
        transformers: by model, mode and batch, how many times its speed; see `beside`.
    """
    engines = {size: f"engine-{size}" for size in SHAPES if f"engine-{size}" in parts}
    return {
        "decode": {
            size: {
                batch: _decode(parts, found)
                for batch, found in (look(parts, part, "decode") or {}).items()
            }
            for size, part in engines.items()
        },
        "prefill": {
            size: _prefill(parts, found)
            for size, part in engines.items()
            if (found := look(parts, part, "prefill"))
        },
        "transformers": {
            size: {mode: each for mode in MODES if (each := beside(parts, size, mode))}
            for size in engines
        },
    }


def _decode(parts: Parts, found: Mapping[str, Any]) -> dict[str, float | None]:
    rate = ratio(found.get("bytes"), found.get("step_us", 0.0) / 1e6)
    return {
        "bytes_per_s": rate,
        "of_copy": ratio(rate, look(parts, "environment", "bandwidth", "copy")),
        "of_read": ratio(rate, look(parts, "environment", "bandwidth", "read")),
    }


def _prefill(parts: Parts, found: Mapping[str, Any]) -> dict[str, float | None]:
    rate = ratio(found.get("flops"), found.get("s"))
    of_gemm = ratio(rate, look(parts, "environment", "gemm", "flops_per_s"))
    return {"flops_per_s": rate, "of_gemm": of_gemm}


def beside(parts: Parts, size: str, mode: str) -> dict[str, dict[str, float]]:
    """By batch: whole, how many times as fast all of `generate` is; decode, the same without
    what one token takes; agreed, the share of requests whose first tokens are equal."""
    part = f"transformers-{size}" if mode == "eager" else f"transformers-{size}-{mode}"
    found = {}
    for batch, theirs in (look(parts, part, "generate") or {}).items():
        ours = look(parts, f"engine-{size}", "generate", batch)
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
