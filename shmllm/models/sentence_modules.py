"""Reads the modules of sentence-transformers behind a transformer: pooling, projections, a norm.

Each module of modules.json has a directory with its config.json. The names and defaults of fields
are those of sentence_transformers/sentence_transformer/modules and base/modules. Both generations
are read: files before version 5.4 name a pooling by flags ("pooling_mode_cls_token") and have
shorter names of classes. This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shmllm.errors import EngineStartError
from shmllm.formats.gguf_directory import IDENTITY
from shmllm.models.fields import Fields, read_json_object

PoolingName = Literal["CLS", "LAST", "MEAN"]
SparseActivation = Literal["log1p_relu", "log1p_log1p_relu"]

ACTIVATIONS = {
    "Identity": "none",
    "Tanh": "tanh",
    "GELU": "gelu",
    "ReLU": "relu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
"""Our names of the activations behind a projection, by the names of torch's classes."""

TOKENS, SENTENCE, SCORES = "token_embeddings", "sentence_embedding", "scores"
"""What a module reads or writes: an embedding of each token, one of a text, scores of a pair."""

SPARSE: dict[str, SparseActivation] = {
    "relu": "log1p_relu",
    "log1p_relu": "log1p_log1p_relu",
}
"""What a SpladePooling makes of the largest logits, by the name of its activation."""

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_POOLINGS: dict[str, PoolingName] = {"cls": "CLS", "lasttoken": "LAST", "mean": "MEAN"}
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The names of modes, by the flags of files before version 5.4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFile:
    """A projection: activation(x W^T + b).

    Attributes:
        path: the file of tensors, with "linear.weight" of shape [out_features, in_features] and,
            with a bias, "linear.bias" of shape [out_features]; None: a GGUF file has them with the
            others.
        prefix: the name of the module's directory, such as "2_Dense".
        in_features: the width of what it reads.
        out_features: the width of what it makes.
        bias: whether it adds a bias.
        activation: "none", "tanh", "gelu" (the exact one), "relu", "silu" or "sigmoid".
    """

    path: Path | None
    prefix: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


class ModuleChain:
    """The modules of a model in the order in which they run, added one by one.

    Attributes:
        pooling: how embeddings of tokens become one; None if they stay.
        include_prompt: whether the tokens of a prompt's prefix are pooled, too.
        dense: the projections.
        normalize: whether the last step divides by the Euclidean norm.
        output: TOKENS, SENTENCE or SCORES: what the last module makes.
        score_tokens: the ids of the tokens for yes and for no whose logits' difference is the
            score; without the second one, the logit itself; empty if no logits are read.
        skiplist_words: the tokens of a document that a late interaction leaves out.
        sparse: what makes a sparse vector of the largest logits of tokens; None: nothing does.
    """

    def __init__(self) -> None:
        self.pooling: PoolingName | None = None
        self.include_prompt = True
        self.dense: tuple[DenseFile, ...] = ()
        self.normalize = False
        self.output = TOKENS
        self.score_tokens: tuple[int, ...] = ()
        self.skiplist_words: tuple[str, ...] = ()
        self.sparse: SparseActivation | None = None
        self._width: int | None = None

    def add(self, kind: str, directory: Path) -> None:
        """Adds the next module.

        Args:
            kind: the name of its class, as in modules.json.
            directory: with its files.

        Raises:
            EngineStartError: it is none that shmllm computes, it has a setting that shmllm does not
                compute, or it does not follow the modules before it.
        """
        name = kind.rpartition(".")[2]
        reader = _READERS.get(name)
        if reader is None:
            raise EngineStartError(
                f"{directory.parent / 'modules.json'}: shmllm does not compute the module "
                f"{kind!r}; it computes {', '.join(['Transformer', *_READERS])}"
            )
        if self.output == SCORES or (self.normalize and name != "MultiVectorMask"):
            raise EngineStartError(
                f"{directory}: shmllm does not compute a {name} behind "
                f"{'scores' if self.output == SCORES else 'Normalize'}"
            )
        reader(self, directory, kind)

    def _add_pooling(self, directory: Path, kind: str) -> None:
        fields = _read(directory)
        if self.pooling is not None or self.dense:
            raise fields.error("shmllm computes one Pooling, directly behind the Transformer")
        mode = _pooling_mode(fields)
        if mode not in _POOLINGS:
            raise fields.error(
                f"shmllm does not compute the pooling {mode!r}; it computes "
                f"{', '.join(map(repr, _POOLINGS))}, one of them alone"
            )
        self.pooling = _POOLINGS[mode]
        self.include_prompt = fields.null_as_false("include_prompt").flag("include_prompt", True)
        width = fields.optional_integer("embedding_dimension")
        self._width = width or fields.optional_integer("word_embedding_dimension")
        self.output = SENTENCE

    def _add_dense(self, directory: Path, kind: str) -> None:
        fields = _read(directory)
        width = fields.integer("in_features")
        if self._width not in (None, width):
            raise fields.error(
                f"'in_features' is {width:,}, but the module before it makes vectors of "
                f"{self._width:,}"
            )
        if fields.flag("use_residual", False):
            raise fields.error("shmllm does not compute a Dense with 'use_residual'")
        # PyLate's class reads the tokens' embeddings, whatever its file says.
        output = TOKENS if kind.startswith("pylate.") else self._output_of(fields)
        self._width = fields.integer("out_features")
        dense = DenseFile(
            path=_weights_of(directory),
            prefix=directory.name,
            in_features=width,
            out_features=self._width,
            bias=fields.null_as_false("bias").flag("bias", True),
            activation=activation(fields, "activation_function", ACTIVATIONS, "torch.nn.Tanh"),
        )
        self.dense, self.output = (*self.dense, dense), output

    def _add_normalize(self, directory: Path, kind: str) -> None:
        # Files before version 5.4 have neither a config.json nor, often, a directory.
        if (directory / "config.json").is_file():
            self._output_of(_read(directory), allows_scores=False)
        self.normalize = True

    def _add_mask(self, directory: Path, kind: str) -> None:
        fields = _read(directory)
        if self.output != TOKENS:
            raise fields.error(f"shmllm does not compute a MultiVectorMask of {self.output!r}")
        if fields.values.get("keep_only_token_ids") is not None:
            raise fields.error("shmllm does not compute 'keep_only_token_ids'")
        if fields.texts("skiplist_tasks") not in ([], ["document"]):
            raise fields.error("shmllm computes 'skiplist_tasks' only for [\"document\"]")
        self.skiplist_words = tuple(fields.texts("skiplist_words"))

    def _add_logit_score(self, directory: Path, kind: str) -> None:
        fields = _read(directory)
        if self.dense or self.pooling:
            raise fields.error("shmllm computes a LogitScore only directly behind the Transformer")
        names = ["true_token_id"]
        if fields.values.get("false_token_id") is not None:
            names.append("false_token_id")
        self.score_tokens = tuple(fields.integer(name, minimum=0) for name in names)
        self.output = SCORES

    def _add_splade(self, directory: Path, kind: str) -> None:
        fields = _read(directory)
        if self.output != TOKENS or self.dense:
            raise fields.error("shmllm computes a SpladePooling only behind the MLMTransformer")
        strategy = fields.text("pooling_strategy", "max")
        if strategy != "max":
            raise fields.error(f"shmllm does not compute the pooling {strategy!r}, only 'max'")
        self.sparse = fields.meaning("activation_function", SPARSE, "relu")
        self.output = SENTENCE

    def _output_of(self, fields: Fields, *, allows_scores: bool = True) -> str:
        """What a module makes, if it reads what the modules before it made."""
        source = fields.text("module_input_name", self.output)
        output = fields.text("module_output_name", source)
        makes_scores = output == SCORES and self.pooling is not None and allows_scores
        if source != self.output or not (output == source or makes_scores):
            raise fields.error(
                f"shmllm does not compute a module from {source!r} to {output!r} behind one that "
                f"makes {self.output!r}"
            )
        return output


_READERS: dict[str, Callable[[ModuleChain, Path, str], None]] = {
    "Pooling": ModuleChain._add_pooling,
    "Dense": ModuleChain._add_dense,
    "Normalize": ModuleChain._add_normalize,
    "SpladePooling": ModuleChain._add_splade,
    "MultiVectorMask": ModuleChain._add_mask,
    "LogitScore": ModuleChain._add_logit_score,
}


def activation(fields: Fields, name: str, known: dict[str, str], default: str | None = None) -> str:
    """Returns our name of an activation that a field names by a class of torch.nn.

    Args:
        fields: the object.
        name: of its field.
        known: our names, by the names of torch's classes.
        default: the class if the field is absent; None: it is required.

    Raises:
        EngineStartError: it is another class.
    """
    path = fields.text(name, default)
    package, _, kind = path.rpartition(".")
    if kind not in known or not f"{package}.".startswith("torch.nn."):
        raise fields.error(
            f"shmllm does not compute the activation {path!r}; it computes "
            f"{', '.join(known)} of torch.nn"
        )
    return known[kind]


def _read(directory: Path) -> Fields:
    path = directory / "config.json"
    return Fields(read_json_object(path), str(path))


def _pooling_mode(fields: Fields) -> str:
    given: Any = fields.values.get("pooling_mode")
    if given is None:
        given = [mode for flag, mode in _MODES.items() if fields.flag(flag, False)] or ["mean"]
    if isinstance(given, list) and all(isinstance(each, str) for each in given):
        return "+".join(given)
    return fields.text("pooling_mode")


def _weights_of(directory: Path) -> Path | None:
    if (directory.parent / IDENTITY).is_file():
        return None
    for name in _WEIGHTS:
        if (directory / name).is_file():
            return directory / name
    raise EngineStartError(f"{directory} has neither {' nor '.join(_WEIGHTS)}; copy or download it")
