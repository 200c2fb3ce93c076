"""Reads what sentence-transformers leaves in a model's directory.

modules.json names the modules and their order, `sentence_modules` reads each of them. Beside it lie
the prompts (config_sentence_transformers.json), the length at which texts are cut
(sentence_bert_config.json or tokenizer_config.json) and the activation of a cross-encoder (also in
config.json). This module must not import torch: front ends import it too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any, Literal

from shmllm.errors import EngineStartError
from shmllm.formats.text_files import read_text
from shmllm.models.fields import LARGEST_INTEGER, Fields, read_json_object
from shmllm.models.sentence_modules import (
    SCORES,
    SENTENCE,
    TOKENS,
    DenseFile,
    ModuleChain,
    PoolingName,
    SparseActivation,
    activation,
)

__all__ = ["DenseFile", "SentenceFiles", "Task", "read_sentence_files"]

Task = Literal["embed", "token_embed", "classify"]

SCORE_ACTIVATIONS = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
"""Our names of the activations of scores, by the names of torch's classes."""

_MODULES, _MODEL = "modules.json", "config_sentence_transformers.json"
_FAMILIES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_TASKS: dict[str, Task] = {
    "SentenceTransformer": "embed",
    "SparseEncoder": "embed",
    "MultiVectorEncoder": "token_embed",
    "ColBERT": "token_embed",
    "CrossEncoder": "classify",
}
"""What a model is for, by its "model_type". "ColBERT" is PyLate's."""
_OUTPUT_TASKS: dict[str, Task] = {SENTENCE: "embed", TOKENS: "token_embed", SCORES: "classify"}
_OLD_ACTIVATION = "sbert_ce_default_activation_function"
_COLBERT = "HF_ColBERT"
_PUNCTUATION = tuple("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceFiles:
    """What the files of sentence-transformers say of a model.

    Attributes:
        task: what the model is for; None if the files do not say so.
        pooling: how the embeddings of tokens become one; None if they stay (late interaction), or
            if the files do not say so.
        include_prompt: whether the tokens of a prompt's prefix are pooled, too.
        dense: the projections behind the pooling, or of each token without one, in their order.
        normalize: whether embeddings are divided by their Euclidean norm at the end.
        max_seq_length: the number of tokens at which sentence-transformers cuts a text.
        do_lower_case: whether texts become lower case before they are tokenized.
        prompts: the texts that sentence-transformers puts before others, by their names.
        markers: the beginnings of such texts that were inserted as a token when it was trained.
        default_prompt: the name of the prompt that it uses if none is named.
        similarity: how embeddings are compared: "cosine", "dot", "maxsim" and so on.
        activation: of a cross-encoder's scores: "none", "sigmoid" or "softmax".
        score_tokens: of a cross-encoder that reads logits: see `ModuleChain`.
        skiplist_words: the tokens of a document that a late interaction leaves out.
        sparse: what makes a sparse vector of the largest logits; None: vectors are dense.
    """

    task: Task | None = None
    pooling: PoolingName | None = None
    include_prompt: bool = True
    dense: tuple[DenseFile, ...] = ()
    normalize: bool = False
    max_seq_length: int | None = None
    do_lower_case: bool = False
    prompts: dict[str, str]
    markers: tuple[str, ...] = ()
    default_prompt: str | None = None
    similarity: str | None = None
    activation: str | None = None
    score_tokens: tuple[int, ...] = ()
    skiplist_words: tuple[str, ...] = ()
    sparse: SparseActivation | None = None


def read_sentence_files(directory: Path) -> SentenceFiles | None:
    """Returns what the files say, or None if sentence-transformers left none.

    Args:
        directory: of the model, with config.json.

    Raises:
        EngineStartError: a file is damaged, or names a module, a pooling or an activation that
            shmllm does not compute.
    """
    modules = _read_modules(directory / _MODULES)
    model, config = _optional(directory / _MODEL), _optional(directory / "config.json")
    transformer = _transformer_fields(modules[0][1] if modules else directory)
    activation = _activation(model, config)
    if not modules and not model.values and transformer is None and activation is None:
        is_colbert = config.values.get("architectures") == [_COLBERT]
        return _of_colbert(directory) if is_colbert else None
    transformer = transformer or Fields({}, str(directory))
    chain = ModuleChain()
    for kind, path in modules[1:]:
        chain.add(kind, path)
    model_type = model.values.get("model_type")
    is_pylate = model_type == "ColBERT" or any(kind.startswith("pylate.") for kind, _ in modules)
    prompts = _prompts(model)
    return SentenceFiles(
        task=_task(model_type, chain, activation),
        pooling=chain.pooling,
        include_prompt=chain.include_prompt,
        dense=chain.dense,
        # PyLate normalizes without a module for it.
        normalize=chain.normalize or is_pylate,
        max_seq_length=_max_seq_length(directory, transformer),
        do_lower_case=transformer.flag("do_lower_case", False),
        prompts=prompts,
        markers=tuple(_prefixes(model).values()),
        default_prompt=_default_prompt(model, prompts),
        similarity=_optional_text(model, "similarity_fn_name"),
        activation=activation,
        score_tokens=chain.score_tokens,
        skiplist_words=_pylate_skiplist(model) if is_pylate else chain.skiplist_words,
        sparse=chain.sparse,
    )


def read_colbert_metadata(directory: Path) -> Fields:
    """Returns the fields that ColBERT's own code leaves beside a model; none without the file."""
    return _optional(directory / "artifact.metadata")


def _of_colbert(directory: Path) -> SentenceFiles:
    """Returns what sentence-transformers takes for a model of ColBERT's own code."""
    metadata = read_colbert_metadata(directory)
    # BERT's pre-tokenizer drops the space.
    markers = {
        "query": metadata.text("query_token_id", "[unused0]") + " ",
        "document": metadata.text("doc_token_id", "[unused1]") + " ",
    }
    masks = metadata.flag("mask_punctuation", True)
    return SentenceFiles(
        task="token_embed",
        normalize=True,
        prompts=markers,
        markers=tuple(markers.values()),
        similarity="maxsim",
        skiplist_words=_PUNCTUATION if masks else (),
    )


def _read_modules(path: Path) -> list[tuple[str, Path]]:
    """The class and the directory of each module; empty without the file."""
    if not path.exists():
        return []
    try:
        modules = json.loads(read_text(path))
    except OSError as error:
        raise EngineStartError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise EngineStartError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise EngineStartError(f"{path} must hold a list of objects")
    found = [_read_module(Fields(each, str(path))) for each in modules]
    if not found or found[0][0].rpartition(".")[2] not in ("Transformer", "MLMTransformer"):
        first = repr(found[0][0]) if found else "none"
        raise EngineStartError(f"{path}: the first module must be a Transformer, it is {first}")
    return [(kind, path.parent / subfolder) for kind, subfolder in found]


def _read_module(fields: Fields) -> tuple[str, str]:
    kind, subfolder = fields.text("type"), fields.text("path")
    place = PureWindowsPath(subfolder)  # which knows the separators of all systems
    parts = place.parts
    if place.anchor or ".." in parts or not subfolder.isprintable() or len(subfolder) > 255:
        raise fields.error(f"'path' must name a directory below the model's, not {subfolder!r}")
    return kind, subfolder


def _transformer_fields(directory: Path) -> Fields | None:
    """The fields of the first file that is not empty; None without one."""
    for family in _FAMILIES:
        fields = _optional(directory / f"sentence_{family}_config.json")
        if fields.values:
            return fields
    return None


def _max_seq_length(directory: Path, transformer: Fields) -> int | None:
    # Since version 5.4 sentence-transformers writes it to the tokenizer's file.
    name = "max_seq_length"
    if transformer.values.get(name) is not None:
        return transformer.integer(name)
    length = _optional(directory / "tokenizer_config.json").values.get("model_max_length")
    # Tokenizers without a limit have 10 ** 30.
    return length if type(length) is int and 0 < length <= LARGEST_INTEGER else None


def _task(model_type: Any, chain: ModuleChain, activation: str | None) -> Task | None:
    if isinstance(model_type, str) and model_type in _TASKS:
        return _TASKS[model_type]
    if activation is not None:
        return "classify"
    has_modules = chain.pooling or chain.dense or chain.normalize or chain.output != TOKENS
    return _OUTPUT_TASKS[chain.output] if has_modules else None


def _activation(model: Fields, config: Fields) -> str | None:
    """The activation of scores, which each generation has written to another place."""
    nested = Fields(config.table("sentence_transformers"), config.where)
    for fields, name in (
        (model, "activation_fn"),
        (nested, "activation_fn"),
        (config, _OLD_ACTIVATION),
    ):
        if fields.values.get(name) is not None:
            return activation(fields, name, SCORE_ACTIVATIONS)
    return None


def _prompts(model: Fields) -> dict[str, str]:
    table = Fields(model.table("prompts"), f"{model.where}, prompts")
    prompts = {name: table.text(name) for name, text in table.values.items() if text is not None}
    for name, prefix in _prefixes(model).items():
        prompts[name] = prefix + prompts.get(name, "").removeprefix(prefix)
    return prompts


def _prefixes(model: Fields) -> dict[str, str]:
    """The texts whose token PyLate inserts before a prompt, by the name of the prompt."""
    found = {name: _optional_text(model, f"{name}_prefix") for name in ("query", "document")}
    return {name: prefix for name, prefix in found.items() if prefix is not None}


def _default_prompt(model: Fields, prompts: dict[str, str]) -> str | None:
    name = _optional_text(model, "default_prompt_name")
    if name is not None and name not in prompts:
        known = ", ".join(map(repr, prompts)) or "none"
        raise model.error(f"'default_prompt_name' is {name!r}; the prompts are {known}")
    return name


def _pylate_skiplist(model: Fields) -> tuple[str, ...]:
    given = model.values.get("skiplist_words")
    return _PUNCTUATION if given is None else tuple(model.texts("skiplist_words"))


def _optional(path: Path) -> Fields:
    return Fields(read_json_object(path) if path.exists() else {}, str(path))


def _optional_text(fields: Fields, name: str) -> str | None:
    return None if fields.values.get(name) is None else fields.text(name)
