"""What a model computes behind pooling: its head, from the architecture's name, config.json and the
files of sentence-transformers, and what the options make of that.

`registry.py` knows which family an architecture belongs to. Encoders say themselves what their
heads consist of; those of decoders are here. This module must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.config_file import read_fields
from shmllm.models.fields import Fields
from shmllm.models.head_specs import (
    DenseSpec,
    HeadActivation,
    HeadNormSpec,
    HeadSpec,
    ScoreActivation,
)
from shmllm.models.registry import Purpose, find_family, purpose_of
from shmllm.models.sentence_files import DenseFile, SentenceFiles, read_sentence_files


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    """What a model is loaded for.

    Attributes:
        runner: "auto", "generate" or "pooling".
        convert: "auto", "none", "embed" or "classify".
        overrides: fields that take the place of those of config.json.
    """

    runner: str = "auto"
    convert: str = "auto"
    overrides: dict[str, Any] = field(default_factory=dict)


def read_labels(fields: Fields) -> tuple[str, ...]:
    """Returns the names of the classes, by index: ``id2label``, or as many as ``num_labels`` says,
    which is 2 where neither is there."""
    table: dict[str, Any] = fields.table("id2label")
    count = len(table) or fields.integer("num_labels", 2)
    return tuple(str(table.get(str(index), f"LABEL_{index}")) for index in range(count))


def read_score_activation(fields: Fields, num_labels: int) -> ScoreActivation:
    """Returns what makes scores of logits: the sigmoid for one label and for several that do not
    exclude each other, the softmax for others, nothing for a regression."""
    kind = fields.values.get("problem_type")
    if kind is not None:
        of_problems: dict[Any, ScoreActivation] = {
            "regression": "none",
            "single_label_classification": "softmax",
            "multi_label_classification": "sigmoid",
        }
        if not isinstance(kind, str) or kind not in of_problems:
            raise fields.error(f"problem_type {kind!r} is not known; known: {[*of_problems]}")
        return of_problems[kind]
    return "sigmoid" if num_labels == 1 else "softmax"


def classifier(fields: Fields, *steps: DenseSpec | HeadNormSpec) -> HeadSpec:
    """Returns a classifier of these steps, with labels and activation from the fields."""
    labels = read_labels(fields)
    return HeadSpec(
        kind="classifier",
        steps=steps,
        labels=labels,
        activation=read_score_activation(fields, len(labels)),
    )


def read_config(directory: Path, use: ModelUse) -> ModelConfig:
    """Returns a model's configuration, with what the architecture, sentence-transformers' files and
    the options say of a head, of pooling and of the LM head.

    Raises:
        EngineStartError: see `ModelConfig.from_directory`; or they contradict each other, or ask
            for what is not supported.
    """
    fields = read_fields(directory, use.overrides)
    config = ModelConfig.from_fields(fields, directory)
    purpose = purpose_of(config.architecture)
    if config.head is None and purpose in _HEADS:
        config = replace(config, head=_HEADS[purpose](fields, config.hidden_size))
    files = read_sentence_files(directory)
    if purpose is Purpose.SPARSE or (files is not None and files.sparse is not None):
        config = _with_sparse_vectors(config, fields, files)
    if files is not None:
        config = _with_sentence_files(config, fields, files)
    return _converted(config, fields, use)


def _with_sparse_vectors(
    config: ModelConfig, fields: Fields, files: SentenceFiles | None
) -> ModelConfig:
    """Returns the configuration of a model that makes sparse vectors (SPLADE; Formal et al.,
    2021), with the head that predicts masked tokens."""
    family = find_family(config.architecture)
    if not hasattr(family, "with_mlm_head"):
        raise fields.error(
            f"sparse vectors of {config.architecture} are not supported; supported: those of BERT "
            "and DistilBERT"
        )
    model: ModelConfig = family.with_mlm_head(config, fields)
    if files is None or files.sparse is None or model.head is None:
        return model
    return replace(model, head=replace(model.head, activation=files.sparse))


def _score(fields: Fields, hidden_size: int) -> HeadSpec:
    """The head of a decoder's sequence classifier."""
    tokens = _tokens_of_classes(fields)
    if tokens:
        is_pair = _is_pair(fields)
        if is_pair and len(tokens) != 2:
            raise fields.error(f"classifier_from_token must have 2 tokens, got {len(tokens)}")
        fields = _with_labels(fields, 1 if is_pair else len(tokens))
    labels = len(read_labels(fields))
    dense = DenseSpec(name="score", inputs=hidden_size, outputs=labels, tokens=tokens)
    return classifier(fields, dense)


def _with_labels(fields: Fields, count: int) -> Fields:
    """Returns the fields for so many classes, which have no names."""
    return Fields(fields.values | {"num_labels": count, "id2label": None}, fields.where)


def _is_pair(fields: Fields) -> bool:
    """Returns whether the only class is the second of two tokens as opposed to the first."""
    method = fields.text("method", "no_post_processing")
    if method not in ("no_post_processing", "from_2_way_softmax"):
        raise fields.error(
            f"method {method!r} is not supported; supported: 'no_post_processing', "
            "'from_2_way_softmax'"
        )
    is_reranker = fields.flag("is_original_qwen3_reranker", False)
    return is_reranker or method == "from_2_way_softmax"


def _tokens_of_classes(fields: Fields) -> tuple[int, ...]:
    """Returns the ids of the tokens whose texts ``classifier_from_token`` has; empty without it."""
    names: Any = fields.values.get("classifier_from_token")
    if names is None:
        return ()
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise fields.error(f"'classifier_from_token' must be a list of tokens, not {names!r}")
    path = Path(fields.where).parent / "tokenizer.json"
    if not path.is_file():
        raise fields.error(f"'classifier_from_token' needs {path}, which does not exist")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    vocabulary = tokenizer.get_vocab()
    if unknown := [name for name in names if name not in vocabulary]:
        raise fields.error(f"classifier_from_token: {unknown[0]!r} is no token")
    return tuple(vocabulary[name] for name in names)


def _token_score(fields: Fields, hidden_size: int) -> HeadSpec:
    """The head of a decoder's token classifier."""
    labels, bias = len(read_labels(fields)), fields.flag("token_classification_bias", True)
    return classifier(
        fields, DenseSpec(name="score", inputs=hidden_size, outputs=labels, bias=bias)
    )


def _reward(fields: Fields, hidden_size: int) -> HeadSpec:
    """The head of a reward model: two projections (Qwen2.5-Math-RM and -PRM)."""
    is_process = "Process" in str(fields.values.get("architectures"))
    labels = fields.integer("num_labels", 2 if is_process else 1)
    fields = _with_labels(fields, labels)
    first = DenseSpec(
        name="score.0", inputs=hidden_size, outputs=hidden_size, bias=True, activation="relu"
    )
    last = DenseSpec(name="score.2", inputs=hidden_size, outputs=labels, bias=True)
    return replace(classifier(fields, first, last), activation="softmax" if is_process else "none")


_HEADS: dict[Purpose, Callable[[Fields, int], HeadSpec]] = {
    Purpose.CLASSIFY: _score,
    Purpose.CLASSIFY_TOKENS: _token_score,
    Purpose.REWARD: _reward,
}


def _with_sentence_files(config: ModelConfig, fields: Fields, files: SentenceFiles) -> ModelConfig:
    if files.score_tokens and config.head is None:
        config = replace(config, head=_logit_score(fields, config.hidden_size, files.score_tokens))
    if config.head is not None and config.head.kind == "classifier":
        activation: Any = files.activation or config.head.activation
        return replace(config, head=replace(config.head, activation=activation))
    if files.dense:
        width = config.hidden_size
        for dense in files.dense:
            if dense.in_features != width:
                raise fields.error(
                    f"{dense.prefix} reads {dense.in_features} numbers, and gets {width}"
                )
            width = dense.out_features
        steps = tuple(map(_dense_of, files.dense))
        config = replace(config, head=HeadSpec(kind="projection", steps=steps))
    return replace(
        config,
        pooling=files.pooling or config.pooling,
        normalizes=files.normalize,
        usual_length=files.max_seq_length,
    )


def _logit_score(fields: Fields, hidden_size: int, tokens: tuple[int, ...]) -> HeadSpec:
    """The head of a cross-encoder that reads the logit of "yes", or how much it exceeds that of
    "no"."""
    fields = _with_labels(fields, 1)
    dense = DenseSpec(name="score", inputs=hidden_size, outputs=1, tokens=tokens[::-1])
    return replace(classifier(fields, dense), activation="sigmoid")


def _dense_of(file: DenseFile) -> DenseSpec:
    return DenseSpec(
        name=f"{file.prefix}.linear",
        inputs=file.in_features,
        outputs=file.out_features,
        bias=file.bias,
        activation=cast(HeadActivation, file.activation),
    )


def _converted(config: ModelConfig, fields: Fields, use: ModelUse) -> ModelConfig:
    has_classifier = config.head is not None and config.head.kind == "classifier"
    if use.runner == "generate" and not config.lm_head:
        reason = "attends both ways" if config.both_ways else "has no LM head"
        raise EngineStartError(f"runner='generate' is not possible: {config.architecture} {reason}")
    if use.convert == "embed" and has_classifier:
        config = _without_head(config)
    elif use.convert == "classify" and not has_classifier:
        config = replace(config, head=_score(fields, config.hidden_size))
    if config.classes_are_tokens and config.lm_head_bias:
        raise fields.error("classes that are tokens of an LM head with a bias are not supported")
    is_pooling = use.runner == "pooling" or use.convert in ("embed", "classify")
    if is_pooling and config.num_encoded and (use.convert == "embed" or not has_classifier):
        raise EngineStartError(
            f"{config.architecture} is an encoder-decoder, which makes no vectors, and classes by "
            "a classifier of its checkpoint only: leave runner='pooling' and convert out"
        )
    return replace(config, lm_head=config.lm_head and not is_pooling)


def _without_head(config: ModelConfig) -> ModelConfig:
    """Returns the configuration without the head, whose weights a checkpoint may have."""
    steps = () if config.head is None else config.head.steps
    names = tuple(f"{step.name}." for step in steps)
    return replace(config, head=None, skipped_prefixes=(*config.skipped_prefixes, *names))
