"""PoolerConfig: the defaults of the pooling requests of an LLM, with vLLM's names."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, fields
from typing import Any

from shmllm.errors import RequestError
from shmllm.params.pooling_ranges import check_choice, check_fields
from shmllm.params.pooling_tasks import (
    POOLING_TYPES,
    SEQ_POOLING_TYPES,
    TOK_POOLING_TYPES,
    check_task,
)
from shmllm.params.unknown_options import reject_unknown_options


@dataclass(frozen=True, slots=True)
class PoolerConfig:
    """Defaults for the pooling requests of an LLM, and how their results are made.

    Args:
        task: the task of `encode` without a task, and what `score` computes; None takes the
            model's.
        pooling_type: "CLS", "LAST", "MEAN", "ALL" or "STEP": sets one of the next two.
        seq_pooling_type: the hidden states of which embeddings and scores of a prompt are made:
            "CLS", "LAST" or "MEAN"; None takes the model's.
        tok_pooling_type: the rows of token_embed and token_classify: "ALL" or None for all tokens,
            "STEP" for those with the id `step_tag_id`.
        use_activation: normalize embeddings to length 1, and make scores of logits; None takes
            the model's files' word for embeddings, and True for scores.
        enable_flash_late_interaction: accepted for compatibility; there is one way to score.
        dimensions: the number of leading components of embeddings to keep; None keeps all.
        enable_chunked_processing: `embed` takes texts that are too long for the model. It divides
            them into chunks of `max_model_len` tokens, and the embedding of a text is the mean of
            those of its chunks, weighted by their tokens.
        max_embed_len: the most tokens of a prompt of `embed`; None means as many as the model
            takes, and any number with `enable_chunked_processing`.
        logit_mean, logit_sigma: (logit - logit_mean) / logit_sigma replaces the logits of
            classifiers, before the activation.
        step_tag_id: with "STEP", the token id whose rows are returned; None returns all rows.
        returned_token_ids: with "STEP", the indices of the components to return; None returns all.
        normalize: refused, as in vLLM.

    Raises:
        RequestError: a field is out of its range, or two pooling types are given.
    """

    task: str | None = None
    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    use_activation: bool | None = None
    enable_flash_late_interaction: bool = True
    dimensions: int | None = None
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    normalize: InitVar[object] = None

    def __post_init__(self, normalize: object) -> None:
        if normalize is not None:
            raise RequestError("Parameter `normalize` was removed; use `use_activation` instead.")
        check_task(self.task)
        check_choice("pooling_type", self.pooling_type, POOLING_TYPES)
        check_choice("seq_pooling_type", self.seq_pooling_type, SEQ_POOLING_TYPES)
        check_choice("tok_pooling_type", self.tok_pooling_type, TOK_POOLING_TYPES)
        self._resolve_pooling_type()
        check_fields(self)
        if self.logit_sigma == 0:
            raise RequestError("logit_sigma cannot be 0 (division by zero)")

    def _resolve_pooling_type(self) -> None:
        kind = self.pooling_type
        if kind is None:
            return
        for other in ("seq_pooling_type", "tok_pooling_type"):
            if getattr(self, other) is not None:
                raise RequestError(f"Cannot set both `pooling_type` and `{other}`")
        own = "seq_pooling_type" if kind in SEQ_POOLING_TYPES else "tok_pooling_type"
        object.__setattr__(self, own, kind)

    @classmethod
    def make(cls, value: PoolerConfig | dict[str, Any] | None) -> PoolerConfig:
        """The PoolerConfig for a value of the option `pooler_config`.

        Raises:
            TypeError: `value` has another type, or an unknown key.
            RequestError: a field is out of its range.
        """
        if value is None or isinstance(value, cls):
            return value or cls()
        if not isinstance(value, dict):
            raise TypeError(f"pooler_config is a PoolerConfig or a dict, got {value!r}")
        known = [each.name for each in fields(cls)]
        reject_unknown_options("PoolerConfig", value, [*known, "normalize"])
        return cls(**value)
