"""Makes the fields of rotary embedding from the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

from shmllm.formats.gguf import shown
from shmllm.frontend.gguf.metadata import Metadata

FACTORS = "rope_freqs.weight"
"""The tensor by which the frequencies of Llama 3.1 and later are divided, one for each pair."""

_LLAMA3_LENGTH = 8192
_LOW, _HIGH = 1.0, 4.0
_TOLERANCE = 1e-4


def rope_fields(known: Metadata, head_dim: int, length: int) -> dict[str, Any]:
    """The fields rope_theta and rope_scaling of config.json.

    Args:
        known: the metadata.
        head_dim: the width of a head.
        length: the context length, in tokens.

    Raises:
        EngineStartError: the file asks for a method that is not supported.
    """
    theta = known.number("rope.freq_base", 10000.0)
    kind = known.find("rope.scaling.type")
    linear = known.find("rope.scale_linear")  # in files from before rope.scaling.type
    if kind in (None, "none") and linear not in (None, 1.0):
        kind = "linear"
    scaling: dict[str, Any] = {}
    if FACTORS in known.header.tensors:
        if kind not in (None, "none"):
            raise known.header.error(f"{FACTORS} together with rope scaling {shown(kind)}")
        scaling = _llama3(known, theta, head_dim)
    elif kind == "linear":
        factor = known.number("rope.scaling.factor", linear)
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        scaling = _yarn(known, length)
    elif kind not in (None, "none"):
        raise known.header.error(
            f"rope scaling {shown(kind)} is not supported; supported: none, linear, yarn, and "
            f"Llama 3's ({FACTORS})"
        )
    fields: dict[str, Any] = {"rope_theta": theta}
    return fields | ({"rope_scaling": scaling} if scaling else {})


def _yarn(known: Metadata, length: int) -> dict[str, Any]:
    factor = known.number("rope.scaling.factor")
    original = known.whole("rope.scaling.original_context_length", _shorter(length, factor))
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": known.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": known.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    ours = known.number("rope.scaling.attn_factor", 1.0)
    ours *= known.number("rope.scaling.yarn_attn_factor", 1.0)
    if ours != 1.0:
        # llama.cpp multiplies the factor of the paper by this one; transformers replaces it.
        scaling["attention_factor"] = ours * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return scaling


def _shorter(length: int, factor: float) -> int:
    """A context length before it was scaled; 0 if there is none."""
    shorter = length / factor
    return round(shorter) if shorter < math.inf else 0


def _llama3(known: Metadata, theta: float, head_dim: int) -> dict[str, Any]:
    """Finds the parameters whose factors are those in the file.

    The file has only the factors. All models that have them use the same bounds, and the largest
    factor is the one of the longest wavelengths.
    """
    stored = known.header.floats(FACTORS)
    length = known.whole("rope.scaling.original_context_length", _LLAMA3_LENGTH)
    factor = round(max(stored, default=1.0), 4)
    fits = len(stored) == head_dim // 2 and 0 < factor < math.inf
    if fits:
        wanted = llama3_factors(theta, head_dim, factor, length)
        pairs = zip(stored, wanted, strict=True)
        fits = all(abs(value - each) <= _TOLERANCE * each for value, each in pairs)
    if not fits:
        raise known.header.error(
            f"{FACTORS} has other factors than Llama 3's for an original context of {length:,} "
            f"tokens, scaled by {factor:g}"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": length,
    }


def llama3_factors(theta: float, head_dim: int, factor: float, length: int) -> list[float]:
    """The values of the tensor FACTORS.

    Args:
        theta: the base of the wavelengths.
        head_dim: the width of a head.
        factor: the ratio of the extended to the original context length.
        length: the original context length, in tokens.
    """
    return [
        _llama3_factor(2 * math.pi * theta ** (2 * pair / head_dim), factor, length)
        for pair in range(head_dim // 2)
    ]


def _llama3_factor(wavelength: float, factor: float, length: int) -> float:
    """By how much Llama 3 divides the frequency of one pair."""
    kept = (length / wavelength - _LOW) / (_HIGH - _LOW)
    kept = min(max(kept, 0.0), 1.0)
    return 1 / ((1 - kept) / factor + kept)
