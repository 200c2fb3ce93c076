"""The metadata of a GGUF file that describe a model, and the check that nothing is lost in them.

The names are llama.cpp's. The check reads the metadata back as an engine would: what a file has no
place for, such as an unusual scale of scores, is an error and no file that computes something else.
This module must not know tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shmllm.errors import EngineStartError, QuantizeError
from shmllm.formats.gguf import GgufHeader, TensorEntry
from shmllm.formats.gguf_families import FAMILIES, GgufFamily, family_of_class
from shmllm.frontend.gguf.config import model_config
from shmllm.frontend.gguf.rope import FACTORS, llama3_factors
from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.registry import find_family
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MoESpec

Values = dict[str, Any]
"""Metadata by their keys: str, int, float, bool, or lists of these."""

_TOLERANCE = 1e-5


@dataclass(frozen=True)
class PlannedHeader(GgufHeader):
    """The header of a file that is not written yet.

    Attributes:
        factors: the values of the tensor FACTORS.
    """

    factors: Sequence[float] = ()

    def floats(self, name: str) -> list[float]:
        return list(self.factors)


def find_gguf_family(config: ModelConfig) -> tuple[str, GgufFamily]:
    """llama.cpp's architecture of a model, and its family.

    Raises:
        QuantizeError: GGUF files of such models are not supported.
    """
    found = family_of_class(config.architecture)
    if found is None:
        known = [name for each in FAMILIES.values() for name in (each.architecture, *each.also)]
        raise QuantizeError(
            f"{config.architecture} cannot be written as a GGUF file; supported: {', '.join(known)}"
        )
    return found


def describe(config: ModelConfig, fields: Mapping[str, Any], architecture: str) -> Values:
    """The metadata of a model's shapes and constants.

    Args:
        config: the model.
        fields: the content of its config.json.
        architecture: llama.cpp's name, which is the prefix of the keys.
    """
    layer = config.layers[0]
    attention, mlp = layer.attention, layer.mlp
    full = next((each.attention for each in config.layers if each.attention.window is None), None)
    windows = sorted({window for window in config.layer_windows if window is not None})
    values: Values = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": _feed_forward_length(config, fields),
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm.eps,
        "vocab_size": config.vocab_size,
    }
    if isinstance(mlp, MoESpec):
        values |= {
            "expert_count": mlp.num_experts,
            "expert_used_count": mlp.top_k,
            "expert_feed_forward_length": mlp.inner,
        }
    if windows:
        values["attention.sliding_window"] = windows[0]
    if attention.soft_cap is not None:
        values["attn_logit_softcapping"] = attention.soft_cap
    if config.logits_cap is not None:
        values["final_logit_softcapping"] = config.logits_cap
    rope = (full or attention).rope
    if rope is not None:
        values |= _rope(rope)
    return {f"{architecture}.{key}": value for key, value in values.items()}


def _feed_forward_length(config: ModelConfig, fields: Mapping[str, Any]) -> int:
    mlp = config.layers[0].mlp
    width = fields.get("intermediate_size")
    return width if isinstance(mlp, MoESpec) and type(width) is int else mlp.inner


def _rope(rope: RopeConfig) -> Values:
    values: Values = {"rope.freq_base": rope.theta, "rope.dimension_count": rope.rotary_dim}
    if rope.type == "llama3":
        values["rope.scaling.original_context_length"] = rope.original_max_positions
    if rope.type in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope.type, "rope.scaling.factor": rope.factor}
    if rope.type == "yarn":
        values |= {
            "rope.scaling.original_context_length": rope.original_max_positions,
            "rope.scaling.yarn_beta_fast": rope.beta_fast,
            "rope.scaling.yarn_beta_slow": rope.beta_slow,
        }
    return values


def rope_factors(config: ModelConfig) -> list[float]:
    """The values of the tensor FACTORS; empty if a model needs none."""
    for rope in config.ropes:
        if rope.type == "llama3":
            return llama3_factors(
                rope.theta, config.head_dim, rope.factor, rope.original_max_positions
            )
    return []


def check_kept(
    config: ModelConfig, values: Values, architecture: str, tensors: Mapping[str, TensorEntry]
) -> None:
    """Checks that a reader of the file gets the same model.

    Args:
        config: the model.
        values: the metadata.
        architecture: llama.cpp's name.
        tensors: the tensors of the file by name.

    Raises:
        QuantizeError: the model has something that the file cannot say.
    """
    factors = rope_factors(config)
    metadata = values | {"general.architecture": architecture}
    entries = dict(tensors)
    if factors:
        entries[FACTORS] = TensorEntry((len(factors),), 0, 0, 4 * len(factors))
    header = PlannedHeader(Path(f"GGUF ({architecture})"), metadata, entries, factors=factors)
    try:
        fields = model_config(header)
        found = find_family(fields["architectures"][0]).configure(Fields(fields, str(header.path)))
    except EngineStartError as error:
        raise QuantizeError(f"no GGUF file can be written of this model: {error}") from None
    lost = _difference(_comparable(config), _comparable(found), "")
    if lost:
        raise QuantizeError(
            f"a GGUF file of the architecture {architecture!r} cannot express this model: {lost}"
        )


def _comparable(config: ModelConfig) -> Values:
    same = replace(config, architecture="", dtype=None, eos_token_ids=())
    return asdict(same)


def _difference(wanted: Any, found: Any, where: str) -> str:
    """The first difference of two nested values, in words; "" if there is none."""
    if isinstance(wanted, dict) and isinstance(found, dict) and wanted.keys() == found.keys():
        pairs = [(wanted[key], found[key], f"{where}.{key}".lstrip(".")) for key in wanted]
    elif isinstance(wanted, tuple) and isinstance(found, tuple) and len(wanted) == len(found):
        both = enumerate(zip(wanted, found, strict=True))
        pairs = [(one, other, f"{where}[{index}]") for index, (one, other) in both]
    elif isinstance(wanted, float) and isinstance(found, float):
        is_same = math.isclose(wanted, found, rel_tol=_TOLERANCE)
        return "" if is_same else f"{where} is {wanted:g}, it would become {found:g}"
    else:
        return "" if wanted == found else f"{where} is {wanted!r}, it would become {found!r}"
    return next(filter(None, (_difference(*pair) for pair in pairs)), "")
