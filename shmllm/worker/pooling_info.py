"""What an engine reports of pooling: from the model's configuration and its files."""

from __future__ import annotations

from pathlib import Path

from shmllm.config.pooling import PoolingInfo, PoolingTask
from shmllm.models.config import ModelConfig
from shmllm.models.config_file import read_fields
from shmllm.models.fields import Fields
from shmllm.models.pooled import ModelUse
from shmllm.models.registry import Purpose, purpose_of
from shmllm.models.sentence_files import SentenceFiles, read_sentence_files


def pooling_info(config: ModelConfig, directory: Path, use: ModelUse) -> PoolingInfo:
    """Returns what a model with this configuration computes of prompts.

    Args:
        config: what `read_config` returned.
        directory: the model's.
        use: what it was loaded for.
    """
    fields, files = read_fields(directory, use.overrides), read_sentence_files(directory)
    head, files = config.head, files or SentenceFiles(prompts={})
    pairs = None if head is None else head.pairs
    is_classifier = head is not None and head.kind == "classifier"
    tasks: tuple[PoolingTask, ...] = ("embed", "token_embed")
    if is_classifier:
        tasks = "classify", "token_classify"
    is_multi = head is not None and head.kind == "multi"
    if is_multi:
        tasks = (*tasks, "token_classify")
    if config.text is not None:
        tasks = ("classify",) if is_classifier else ()
    if use.runner == "generate":
        tasks = ()
    return PoolingInfo(
        tasks=tasks,
        task=_default_task(config, tasks, files),
        pooling_type=config.pooling,
        normalize=config.normalizes,
        embedding_size=config.hidden_size
        if head is None or is_classifier or is_multi
        else head.width,
        head="" if head is None else head.kind,
        activation="none" if head is None else head.activation,
        labels=() if head is None else head.labels,
        both_ways=config.whole_prompts,
        generates=config.lm_head,
        matryoshka=bool(
            fields.flag("is_matryoshka", False) or fields.values.get("matryoshka_dimensions")
        ),
        matryoshka_dimensions=_dimensions(fields),
        prompts=files.prompts,
        markers=files.markers,
        default_prompt=files.default_prompt or "",
        include_prompt=files.include_prompt,
        token_types=config.num_token_types > 1,
        # As in vLLM: a chat model that is asked for "yes" or "no" reads the texts as one.
        separates_pairs=fields.flag(
            "use_sep_token", not fields.values.get("classifier_from_token")
        ),
        ends=_ends(fields) if is_multi else (),
        logit_mean=0.0 if head is None else head.logit_mean,
        pair_template="" if pairs is None else pairs.template,
        pair_end=() if pairs is None else pairs.end,
        text_length=0 if config.padding_token is None else config.max_position_embeddings,
        padding_token=config.padding_token or 0,
    )


def _default_task(
    config: ModelConfig, tasks: tuple[PoolingTask, ...], files: SentenceFiles
) -> PoolingTask:
    purpose = purpose_of(config.architecture)
    if "classify" in tasks:
        per_token = purpose in (Purpose.CLASSIFY_TOKENS, Purpose.REWARD)
        return "token_classify" if per_token else "classify"
    per_token = purpose is Purpose.EMBED_TOKENS or files.task == "token_embed"
    return "token_embed" if per_token else "embed"


def _ends(fields: Fields) -> tuple[int, ...]:
    """Returns the tokens that begin and end a text, by transformers' defaults of XLM-RoBERTa."""
    return tuple(
        fields.integer(name, default, minimum=0)
        for name, default in (("bos_token_id", 0), ("eos_token_id", 2))
    )


def _dimensions(fields: Fields) -> tuple[int, ...]:
    """Returns ``matryoshka_dimensions``, which may be absent."""
    values = fields.values.get("matryoshka_dimensions") or []
    if not isinstance(values, list) or not all(type(each) is int and each > 0 for each in values):
        raise fields.error(f"'matryoshka_dimensions' must be a list of numbers, not {values!r}")
    return tuple(values)
