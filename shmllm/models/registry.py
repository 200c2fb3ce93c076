"""Finds the module of an architecture's family, by `architectures.py` or by what plugins say.

This module must not import torch, nor a family before it is needed.
"""

from __future__ import annotations

from enum import Enum
from importlib import import_module
from typing import Any

from shmllm.errors import EngineStartError
from shmllm.formats.published import PUBLISHED
from shmllm.formats.text_files import read_text
from shmllm.formats.thinker import THINKERS
from shmllm.models.architectures import ARCHITECTURES, REFUSED


class Purpose(Enum):
    """What an architecture computes of hidden states."""

    GENERATE = "tokens, and vectors"
    EMBED = "vectors"
    EMBED_TOKENS = "vectors of each token"
    SPARSE = "sparse vectors"
    CLASSIFY = "scores of classes"
    CLASSIFY_TOKENS = "scores of classes, for each token"
    REWARD = "rewards of each token"


_PURPOSES = {
    "ForSequenceClassification": Purpose.CLASSIFY,
    "ForTokenClassification": Purpose.CLASSIFY_TOKENS,
    "ForProcessRewardModel": Purpose.REWARD,
    "ForRewardModel": Purpose.REWARD,
    "SpladeSparseEmbeddingModel": Purpose.SPARSE,
    "ForMaskedLM": Purpose.EMBED,
    "ForRetrieval": Purpose.EMBED_TOKENS,
    "ForPreTraining": Purpose.EMBED,
    "Model": Purpose.EMBED,
}
"""The ends of the names of architectures without an LM head, or with one that is left out."""

_WITH_LM_HEAD = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "MTModel")

REGISTERED: dict[str, str] = {}
"""As `ARCHITECTURES`, for the families of other packages: "module" or "module:object"."""

NUM_NAMED = 3
"""The number of known architectures that the error for an unknown one names."""


def register_model(architecture: str, family: str) -> None:
    """Adds a family that another package has, for a general plugin to call; docs/plugins.md says
    how. A process that reads config.json or makes a model imports the family.

    Args:
        architecture: the name in a config.json's ``architectures``.
        family: "module", or "module:object", with what `find_family` returns.

    Raises:
        ValueError: the architecture is one of ours, or a name has the wrong form.
    """
    if not isinstance(family, str) or not all(family.split(":")) or family.count(":") > 1:
        raise ValueError(f"a family is named as 'module' or 'module:object', got {family!r}")
    if architecture in ARCHITECTURES:
        raise ValueError(f"{architecture} is an architecture that shmllm has itself")
    REGISTERED[architecture] = family


def known_architectures() -> frozenset[str]:
    """Returns the names in a config.json's ``architectures`` that have a family, those of whole
    models whose thinker has one included, and those of files that are read in other terms."""
    return frozenset({*ARCHITECTURES, *THINKERS, *PUBLISHED, *REGISTERED})


def purpose_of(architecture: str) -> Purpose:
    """Returns what an architecture computes of hidden states, by the end of its name."""
    if architecture.endswith(_WITH_LM_HEAD) or architecture in REGISTERED:
        return Purpose.GENERATE
    ends = (purpose for end, purpose in _PURPOSES.items() if architecture.endswith(end))
    return next(ends, Purpose.EMBED)


def _of_same_stem(architecture: str) -> str:
    """Returns the name in ARCHITECTURES of the architecture that has the same layers; the name
    itself if there is none."""
    for end in _PURPOSES:
        stem = architecture.removesuffix(end)
        if stem != architecture:
            stem = stem.removesuffix("Text")  # of language models of multimodal ones
            known = (f"{stem}{other}" for other in (*_WITH_LM_HEAD, "Model"))
            return next((name for name in known if name in ARCHITECTURES), architecture)
    return architecture


def find_family(architecture: str) -> Any:
    """Returns the module of a family. It has ``configure(fields)``, which returns a `ModelConfig`,
    and may have ``named_weights(weights, config)``, ``module_weights(weights, config)`` and
    ``other_names(weights, config)``; README.md describes them.

    Raises:
        EngineStartError: the architecture is unknown; the message names the nearest known ones. Or
            the family that another package has cannot be used.
    """
    if architecture in REGISTERED:
        return _find_registered(architecture, REGISTERED[architecture])
    name = architecture if architecture in ARCHITECTURES else _of_same_stem(architecture)
    if architecture in REFUSED:
        raise EngineStartError(f"{architecture} is not supported: {REFUSED[architecture]}")
    if name not in ARCHITECTURES:
        raise EngineStartError(_unknown(architecture))
    return import_module(f"shmllm.models.families.{ARCHITECTURES[name]}")


def _find_registered(architecture: str, name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        family: Any = import_module(module)
        for part in filter(None, path.split(".")):
            family = getattr(family, part)
    except Exception as problem:
        text = " ".join(f"{type(problem).__name__}: {problem}".split())
        raise EngineStartError(
            f"{architecture} is registered as {name}, which cannot be imported: {text}"
        ) from problem
    if not callable(getattr(family, "configure", None)):
        raise EngineStartError(
            f"{architecture} is registered as {name}, which has no configure(fields): a family is "
            "what shmllm/models/README.md describes; classes of vLLM's models do not run here"
        )
    return family


def _unknown(architecture: str) -> str:
    import difflib

    shown = architecture[:100]  # a comparison takes time that grows with both lengths
    known = sorted({*ARCHITECTURES, *REGISTERED})
    near = difflib.get_close_matches(shown, known, NUM_NAMED, 0.0)
    advice = "shmllm/models/README.md says how to add one"
    if is_of_transformers(architecture):
        advice = f"model_impl='transformers' may run it, slower, and {advice}"
    return (
        f"unknown architecture {shown!r}; the nearest of {len(known)} known ones: "
        f"{', '.join(near)}; {advice}"
    )


def is_of_transformers(architecture: str) -> bool:
    """Returns whether the installed transformers has a causal language model of this name. It reads
    a source file: to import transformers would take seconds."""
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return False
    path = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    try:
        text = read_text(path)
    except OSError:
        return False
    table = text.partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")[2].partition("_MAPPING_NAMES")[0]
    return f'"{architecture}"' in table
