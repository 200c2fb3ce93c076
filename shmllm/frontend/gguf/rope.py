"""Makes the fields of rotary embedding from the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

from shmllm.formats.gguf import shown
from shmllm.frontend.gguf.metadata import Metadata

FACTORS = "rope_freqs.weight"
"""The tensor by which the frequencies of Llama 3.1 and later are divided, one for each pair."""

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""The tensors by which longrope divides the frequencies, one number for each pair."""

_LLAMA3_LENGTH = 8192
_BOUNDS = (1.0, 4.0), (1.0, 1.0)
"""The numbers of rotations within the original context between which factors are interpolated: of
Llama 3.1 and later, and of Llama 4."""
_TOLERANCE = 1e-4
_STANDING = 1e29
"""The factors from which on no pair moves; llama.cpp's conversion writes 1e30."""


def rope_fields(known: Metadata, head_dim: int, length: int, *, is_partial: bool) -> dict[str, Any]:
    """The fields rope_theta, rope_scaling and partial_rotary_factor of config.json.

    Args:
        known: the metadata.
        head_dim: the width of a head.
        length: the context length, in tokens.
        is_partial: whether a part of each head may be rotated.

    Raises:
        EngineStartError: the file asks for a method that is not supported.
    """
    rotary_dim = known.whole("rope.dimension_count", head_dim)
    if rotary_dim > head_dim or (rotary_dim < head_dim and not is_partial):
        raise known.header.error("rotary embedding of a part of each head is not supported")
    theta = known.number("rope.freq_base", 10000.0)
    kind = known.find("rope.scaling.type")
    linear = known.find("rope.scale_linear")  # in files from before rope.scaling.type
    if kind in (None, "none") and linear not in (None, 1.0):
        kind = "linear"
    scaling: dict[str, Any] = {}
    if FACTORS in known.header.tensors:
        if kind not in (None, "none"):
            raise known.header.error(f"{FACTORS} together with rope scaling {shown(kind)}")
        scaling = _proportional(known, head_dim) or _llama3(known, theta, head_dim)
    elif LONG_FACTORS in known.header.tensors and kind in (None, "none", "longrope"):
        scaling = _longrope(known, rotary_dim, length)
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
    if is_partial:
        fields["partial_rotary_factor"] = _share(rotary_dim, head_dim)
    return fields | ({"rope_scaling": scaling} if scaling else {})


def _share(part: int, whole: int) -> float:
    """The quotient, by which `whole` is multiplied and rounded down to get `part` again."""
    share = part / whole
    return share if int(whole * share) == part else math.nextafter(share, 1.0)


def _longrope(known: Metadata, rotary_dim: int, length: int) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": known.whole(
            "rope.scaling.original_context_length", length
        ),
        "attention_factor": known.number("rope.scaling.attn_factor", 1.0),
    }
    for name, tensor in (("long_factor", LONG_FACTORS), ("short_factor", SHORT_FACTORS)):
        if tensor not in known.header.tensors:
            raise known.header.error(f"no tensor {tensor}; the file is damaged or incomplete")
        scaling[name] = known.header.floats(tensor)
        if 2 * len(scaling[name]) != rotary_dim:
            count = len(scaling[name])
            raise known.header.error(f"{tensor} has {count} factors for {rotary_dim} elements")
    return scaling


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
    if known.find("rope.scaling.yarn_attn_factor") is not None:
        # llama.cpp's conversion copies the one of config.json, which replaces that of the paper.
        scaling["attention_factor"] = known.number("rope.scaling.yarn_attn_factor")
    elif ours != 1.0:  # llama.cpp multiplies the factor of the paper by this one
        scaling["attention_factor"] = ours * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return scaling


def _shorter(length: int, factor: float) -> int:
    """A context length before it was scaled; 0 if there is none."""
    shorter = length / factor
    return round(shorter) if shorter < math.inf else 0


def _proportional(known: Metadata, head_dim: int) -> dict[str, Any]:
    """Finds which part of a head is rotated, if the others are those whose factors let them stand;
    empty: the factors are others."""
    stored = known.header.floats(FACTORS)
    num_rotated = sum(each == 1.0 for each in stored)
    standing = [each >= _STANDING for each in stored]
    if len(stored) != head_dim // 2 or standing != [n >= num_rotated for n in range(len(stored))]:
        return {}
    share = _share(2 * num_rotated, head_dim)
    return {"rope_type": "proportional", "partial_rotary_factor": share}


def _llama3(known: Metadata, theta: float, head_dim: int) -> dict[str, Any]:
    """Finds the parameters whose factors are those in the file.

    The file has only the factors. All models that have them use bounds of these, and the largest
    factor is the one of the longest wavelengths.
    """
    stored = known.header.floats(FACTORS)
    length = known.whole("rope.scaling.original_context_length", _LLAMA3_LENGTH)
    factor = round(max(stored, default=1.0), 4)
    is_whole = len(stored) == head_dim // 2 and 0 < factor < math.inf
    for low, high in _BOUNDS if is_whole else ():
        wanted = llama3_factors(theta, head_dim, factor, length, low, high)
        pairs = zip(stored, wanted, strict=True)
        if all(abs(value - each) <= _TOLERANCE * each for value, each in pairs):
            break
    else:
        raise known.header.error(
            f"{FACTORS} has other factors than Llama 3's for an original context of {length:,} "
            f"tokens, scaled by {factor:g}"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }


def llama3_factors(
    theta: float, head_dim: int, factor: float, length: int, low: float, high: float
) -> list[float]:
    """The values of the tensor FACTORS.

    Args:
        theta: the base of the wavelengths.
        head_dim: the width of a head.
        factor: the ratio of the extended to the original context length.
        length: the original context length, in tokens.
        low, high: up to `low` rotations within it, a frequency is divided by all of the factor,
            from `high` on it stays.
    """
    turns = (length / (2 * math.pi * theta ** (2 * i / head_dim)) for i in range(head_dim // 2))
    return [_llama3_factor(each, factor, low, high) for each in turns]


def _llama3_factor(rotations: float, factor: float, low: float, high: float) -> float:
    """By how much Llama 3 divides the frequency of a pair with so many rotations."""
    kept = float(rotations > low) if low == high else (rotations - low) / (high - low)
    kept = min(max(kept, 0.0), 1.0)
    return 1 / ((1 - kept) / factor + kept)
