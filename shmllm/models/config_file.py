"""Reads config.json: the fields of a language model, and those that are no family's.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shmllm.errors import EngineStartError
from shmllm.formats.draft_heads import in_terms_of_vllm
from shmllm.formats.published import in_terms_of_transformers
from shmllm.formats.thinker import thinker_of
from shmllm.models.architectures import ARCHITECTURES
from shmllm.models.fields import Fields, read_json_object
from shmllm.models.own_names import MODEL_TYPES, own_name
from shmllm.models.text_models import TEXT_MODELS

DTYPES = ("float32", "float16", "bfloat16")

_OUTER_FIELDS = (
    "architectures",
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization_config",
    "num_labels",
    "id2label",
    "problem_type",
    "classifier_from_token",
    "token_classification_bias",
    "is_original_qwen3_reranker",
    "method",
)
"""The fields that hold for a multimodal model's language model although they are beside its
``text_config``, which may have them, too."""


OF_MODELOPT = "hf_quant_config.json"
"""What older versions of modelopt wrote in place of config.json's ``quantization_config``."""

_FIRST_NAME = "compression_config"
"""What the first versions of compressed-tensors wrote instead."""


def read_config(path: Path) -> dict[str, Any]:
    """Returns what a directory's config.json has, in the terms of transformers and of a model that
    speaks that of its thinker, and how its weights are quantized if another file says so, or
    config.json does not name the method in the way of others.

    Raises:
        EngineStartError: a file is missing or malformed.
    """
    values = in_terms_of_transformers(_read_whole(path), path)
    return thinker_of(values, str(path / "config.json"))


def _read_whole(path: Path) -> dict[str, Any]:
    where = path / "config.json"
    values = in_terms_of_vllm(read_json_object(where), path)
    found, other = values.get("quantization_config"), path / OF_MODELOPT
    if not found and other.is_file():
        found = read_json_object(other).get("quantization")
    if not found and (first := values.get(_FIRST_NAME)):
        values["quantization_config"] = first
    if isinstance(found, Mapping) and "quant_algo" in found:
        values["quantization_config"] = {"quant_method": "modelopt", **found}
    return values


def read_fields(path: Path, overrides: Mapping[str, Any] | None = None) -> Fields:
    """Returns the fields of a model's config.json; those of the language model of a multimodal one.

    Args:
        path: the model's directory.
        overrides: fields that take the place of those in the file; tables are merged.

    Raises:
        EngineStartError: there is no such file, or it is malformed.
    """
    config_path = path / "config.json"
    if not config_path.is_file():
        raise EngineStartError(f"no model in {path}: looked for {config_path}")
    overrides = overrides or {}  # which have the names of the file or of transformers
    values = in_terms_of_transformers(_merged(_read_whole(path), overrides), path)
    values = thinker_of(_merged(values, overrides), str(config_path))
    return text_fields(Fields(values, str(config_path)))


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in overrides.items():
        inner = merged.get(name)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            value = _merged(inner, value)
        merged[name] = value
    return merged


def text_fields(fields: Fields) -> Fields:
    """Returns the fields of the language model of a multimodal one, which has them in
    ``text_config``, with those around them as ``whole``; those of any other model as they are.

    Raises:
        EngineStartError: the language model is of another type than those of the architecture.
    """
    nested = fields.table("text_config")
    if not nested:
        return fields
    where, architecture = f"{fields.where}: text_config", architecture_name(fields)
    found, expected = nested.get("model_type"), TEXT_MODELS.get(architecture)
    found = MODEL_TYPES.get(str(found), found)
    if expected is not None and found not in (None, *expected):
        raise EngineStartError(
            f"{where}: model_type {found!r} is not supported in {architecture}; supported: "
            f"{', '.join(expected)}"
        )
    outer = {name: fields.values.get(name) for name in _OUTER_FIELDS}
    outer = {name: value for name, value in outer.items() if value is not None}
    return Fields(nested | outer, where, fields)


def architecture_name(fields: Fields) -> str:
    """Returns the first of ``architectures``; the family's own name for it where a file has that of
    another one."""
    names = fields.values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise fields.error(
            "'architectures' must list the model's class, such as \"LlamaForCausalLM\"; "
            f"docs/models.md has the {len(ARCHITECTURES)} that are known"
        )
    return own_name(fields.values, names[0])


def stored_dtype(fields: Fields) -> str | None:
    """Returns the dtype name of a checkpoint; None: config.json does not name one."""
    name = "torch_dtype" if fields.values.get("dtype") is None else "dtype"
    if fields.values.get(name) is None:
        return None
    dtype = fields.text(name).removeprefix("torch.")
    if dtype not in DTYPES:
        raise fields.error(f"{name} {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    return dtype


def eos_token_ids(fields: Fields, generation_path: Path) -> tuple[int, ...]:
    """Returns the union of the ids in config.json and in generation_config.json, if that exists."""
    sources = [fields]
    if generation_path.is_file():
        sources.append(Fields(read_json_object(generation_path), str(generation_path)))
    token_ids: list[int] = []
    for source in sources:
        value: Any = source.values.get("eos_token_id")
        found = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(token_id) is not int or token_id < 0 for token_id in found):
            raise source.error(f"'eos_token_id' must be token ids, not {value!r}")
        token_ids += found
    return tuple(dict.fromkeys(token_ids))
