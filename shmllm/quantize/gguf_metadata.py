"""The check that nothing of a model is lost in the metadata of a GGUF file.

It reads the metadata back as an engine would: what a file has no place for, such as an unusual
scale of scores, is an error and no file that computes something else. This module must not know
tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shmllm.errors import EngineStartError, QuantizeError
from shmllm.formats.gguf import GgufHeader, TensorEntry
from shmllm.formats.gguf_family import GgufFamily
from shmllm.formats.gguf_model import family_of_class, written_families
from shmllm.frontend.gguf.config import model_config
from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.registry import find_family
from shmllm.models.rope import attention_factor
from shmllm.quantize.gguf_description import Values, rope_tensors
from shmllm_kernels.windows import Chunk

_TOLERANCE = 1e-5


@dataclass(frozen=True)
class PlannedHeader(GgufHeader):
    """The header of a file that is not written yet.

    Attributes:
        factors: the tensors of factors of frequencies, by name.
    """

    factors: Mapping[str, list[float]] = field(default_factory=dict)

    def floats(self, name: str) -> list[float]:
        return self.factors[name]


def find_gguf_family(config: ModelConfig) -> tuple[str, GgufFamily]:
    """llama.cpp's architecture of a model, and its family.

    Raises:
        QuantizeError: GGUF files of such models are not supported.
    """
    found = family_of_class(config.architecture, bool(config.mixtures))
    if found is None:
        known = dict.fromkeys(name for _, family in written_families() for name in family.classes)
        raise QuantizeError(
            f"{config.architecture} cannot be written as a GGUF file; supported: {', '.join(known)}"
        )
    return found


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
    factors = rope_tensors(config)
    metadata = values | {"general.architecture": architecture}
    entries = dict(tensors)
    for name, numbers in factors.items():
        entries[name] = TensorEntry((len(numbers),), 0, 0, 4 * len(numbers))
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
    """The fields, without different ways to say the same."""
    layers = tuple(_comparable_layer(each, config) for each in config.layers)
    return asdict(
        replace(
            config,
            layers=layers,
            architecture="",
            dtype=None,
            eos_token_ids=(),
            skipped_prefixes=(),  # what the file does not have
            skipped_experts=None,
        )
    )


def _comparable_layer(layer: LayerSpec, config: ModelConfig) -> LayerSpec:
    attention = layer.mixer
    if not isinstance(attention, AttentionSpec):
        return layer
    window, rope = attention.window, attention.rope
    size = window.size if isinstance(window, Chunk) else window
    if size is not None and size >= config.max_position_embeddings:
        window = None
    if rope is not None:
        rope = replace(rope, attention_factor=attention_factor(rope), mscale=None)
        rope = replace(rope, mscale_all_dim=None)
        if rope.type == "longrope":  # only the factor of angles depends on it
            rope = replace(rope, factor=1.0)
    return replace(layer, mixer=replace(attention, window=window, rope=rope))


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
