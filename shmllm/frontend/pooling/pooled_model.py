"""PooledModel: what a model computes of prompts, and how the parameters of a request ask for it.

This module must not know prompts, nor how requests are run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

from shmllm.config.info import EngineInfo
from shmllm.config.pooling import PoolingInfo, PoolingTask
from shmllm.errors import RequestError
from shmllm.frontend.pooling.plan import PoolingPlan
from shmllm.params.pooler_config import PoolerConfig
from shmllm.params.pooling import STEP, Pooling, PoolingParams, PoolingType
from shmllm.params.pooling_tasks import (
    PLUGIN_TASK,
    SEQ_POOLING_TYPES,
    TOK_POOLING_TYPES,
    TOKEN_TASKS,
    check_task,
)

SPARSE = "sparse"
"""`PoolingInfo.head` of models that make sparse vectors."""

MULTI = "multi"
"""The same of models that make vectors and weights of tokens."""

_APIS = {
    "embed": ("Embedding", "embed"),
    "token_embed": ("Embedding", "embed"),
    "classify": ("Classification", "classify"),
    "token_classify": ("Classification", "classify"),
}
"""What vLLM calls the tasks, and the value of `convert` that makes a model able to do them."""


class PooledModel:
    """What a model computes of prompts, under the names that `PoolingParams.verify` reads.

    Args:
        info: what the engine reports.
        config: the defaults of the LLM.

    Attributes:
        pooling: what the model computes of prompts.
        pooler_config: the defaults; what the LLM's have left open comes from the model.
        served_model_name: the model's directory.
        embedding_size: the width of an embedding.
        is_matryoshka, matryoshka_dimensions: which dimensions requests may ask for.
    """

    def __init__(self, info: EngineInfo, config: PoolerConfig) -> None:
        self.pooling = info.pooling
        self.pooler_config = _completed(config, info.pooling)
        self.served_model_name = info.model_directory
        self._hidden_size = info.hidden_size
        self.embedding_size = info.pooling.embedding_size or info.hidden_size
        self.is_matryoshka = info.pooling.matryoshka
        self.matryoshka_dimensions = info.pooling.matryoshka_dimensions or None

    def task_for(self, wanted: str | None, params: PoolingParams | None = None) -> PoolingTask:
        """The task of a request.

        Args:
            wanted: the task of the call; None: it has none.
            params: parameters of the request, which may have a task, too.

        Raises:
            RequestError: it is no task, the two differ, or the model cannot do it.
        """
        check_task(wanted, "pooling_task")
        if wanted == PLUGIN_TASK:
            raise RequestError(
                "pooling_task 'plugin' takes a prompt of {\"data\": ...}, for an IO processor; got "
                "another prompt"
            )
        own = None if params is None or params.task == PLUGIN_TASK else params.task
        if None not in (own, wanted) and own != wanted:
            raise RequestError(
                f"You cannot overwrite params.task={own!r} with pooling_task={wanted!r}!"
            )
        default = self.pooler_config.task
        task = wanted or own or (default if default != PLUGIN_TASK else None) or self.pooling.task
        self._check_supported(task)
        return cast(PoolingTask, task)

    def resolve(self, params: PoolingParams, task: str | None) -> tuple[Pooling, PoolingPlan]:
        """What the engine does for a request, and what becomes of its result.

        Args:
            params: the parameters of the request, which stay as they are.
            task: the task of the call.

        Raises:
            RequestError: the parameters do not go together, or not with the model.
        """
        chosen = self.task_for(task, params)
        if params.extra_kwargs:
            raise RequestError(
                f"extra_kwargs are for score; {chosen} has none of {sorted(params.extra_kwargs)}"
            )
        params = params.clone()
        params.task = chosen
        params.verify(self)
        config = self.pooler_config
        if self.pooling.text_length and (config.enable_chunked_processing or config.max_embed_len):
            raise RequestError(
                "enable_chunked_processing and max_embed_len are not possible: all texts of the "
                f"model have {self.pooling.text_length} tokens, with padding"
            )
        if chosen in TOKEN_TASKS and self.pooling.head == MULTI:
            return self._of_several(params, chosen)
        if chosen in TOKEN_TASKS:
            return self._of_tokens(params, chosen)
        if self._is_sparse(chosen):
            return self._of_sparse(params, chosen)
        kind = self._pooling_type(params, SEQ_POOLING_TYPES, self.pooler_config.seq_pooling_type)
        engine = self._pooling(params, PoolingType[kind])
        return engine, self._plan(params, chosen)

    def _of_tokens(self, params: PoolingParams, task: PoolingTask) -> tuple[Pooling, PoolingPlan]:
        kind = self._pooling_type(params, TOK_POOLING_TYPES, self.pooler_config.tok_pooling_type)
        late = params.late_chunking_params is not None
        if late and kind == STEP:
            raise RequestError("Late chunking does not support the pooling type STEP")
        columns = tuple(params.returned_token_ids or ()) or None
        engine = self._pooling(params, PoolingType.ALL)
        plan = replace(self._plan(params, task), step_tag_id=params.step_tag_id, columns=columns)
        if not late and columns is None:
            return engine, plan
        # Chunks and columns come before what the engine would do to rows.
        width = self._width(task, 0)
        _check_columns(columns or (), width)
        plan = replace(plan, width=width, dimensions=engine.dimensions, normalize=engine.normalize)
        reads = engine.reads_prefix_cache and not late
        return replace(engine, dimensions=0, normalize=False, reads_prefix_cache=reads), plan

    def _of_several(self, params: PoolingParams, task: PoolingTask) -> tuple[Pooling, PoolingPlan]:
        """Vectors or weights of tokens, which the engine returns side by side (BGE-M3)."""
        late = params.late_chunking_params is not None
        if late or (params.pooling_type or "ALL") != "ALL":
            raise RequestError(
                "the model's vectors and weights of tokens have no late chunking, and no pooling "
                "type but ALL"
            )
        first, last = self.pooling.ends
        engine, width = self._pooling(params, PoolingType.ALL), self.embedding_size
        engine = replace(engine, uses_head=True)
        if task == "token_embed":
            plan = PoolingPlan(task=task, width=width, first=first)
            return replace(engine, dimensions=width), plan
        activation = self.pooling.activation if params.use_activation else "none"
        return engine, PoolingPlan(
            task=task,
            width=width + 1,
            columns=(width,),
            first=first,
            last=last,
            flat=True,
            activation=activation,
        )

    def _is_sparse(self, task: str) -> bool:
        return task == "embed" and self.pooling.head == SPARSE

    def _of_sparse(self, params: PoolingParams, task: PoolingTask) -> tuple[Pooling, PoolingPlan]:
        """Sparse vectors: neither a norm nor other pooling types, as in vLLM."""
        if params.pooling_type is not None:
            raise RequestError(
                f"pooling_type {params.pooling_type!r} is not possible: the model makes sparse "
                "vectors, of the largest logits of all tokens",
                parameter="pooling_type",
                value=params.pooling_type,
            )
        if self.pooler_config.enable_chunked_processing:
            raise RequestError("enable_chunked_processing is not possible with sparse vectors")
        engine = Pooling(PoolingType.MAX, normalize=False, uses_head=True)
        width, activation = self.embedding_size, self.pooling.activation
        return engine, PoolingPlan(task=task, width=width, activation=activation)

    def _pooling(self, params: PoolingParams, kind: PoolingType) -> Pooling:
        embeds = params.task in ("embed", "token_embed")
        return Pooling(
            kind,
            params.dimensions or 0,
            normalize=embeds and bool(params.use_activation),
            reads_prefix_cache=not params.skip_reading_prefix_cache,
            uses_head=self.pooling.head == ("projection" if embeds else "classifier"),
        )

    def _plan(self, params: PoolingParams, task: PoolingTask) -> PoolingPlan:
        config, width = self.pooler_config, self._width(task, params.dimensions or 0)
        if task in ("embed", "token_embed"):
            return PoolingPlan(task=task, width=width)
        activation = self.pooling.activation if params.use_activation else "none"
        # As in vLLM: a softmax of one logit would always be 1.
        activation = "sigmoid" if activation == "softmax" and width == 1 else activation
        return PoolingPlan(
            task=task,
            width=width,
            mean=config.logit_mean or 0.0,
            sigma=config.logit_sigma or 1.0,
            activation=activation,
        )

    def _width(self, task: PoolingTask, dimensions: int) -> int:
        if task == "token_embed" and self.pooling.head == SPARSE:
            return dimensions or self._hidden_size
        if task in ("embed", "token_embed"):
            return dimensions or self.embedding_size
        return len(self.pooling.labels)

    def _pooling_type(
        self, params: PoolingParams, allowed: Iterable[str], default: str | None
    ) -> str:
        kind = params.pooling_type or default or next(iter(allowed))
        if kind not in allowed:
            raise RequestError(
                f"pooling_type {kind!r} is not possible for the task {params.task!r}, which has "
                f"the types {', '.join(allowed)}",
                parameter="pooling_type",
                value=kind,
            )
        return kind

    def _check_supported(self, task: str) -> None:
        supported = self.pooling.tasks
        if not supported:
            raise RequestError(
                "LLM.encode() is only supported for pooling models: the model is an "
                "encoder-decoder of texts, which makes no vectors, or the engine was started with "
                "runner='generate' (leave that out, or pass runner='pooling')"
            )
        if task not in supported:
            name, convert = _APIS[task]
            raise RequestError(
                f"{name} API is not supported by this model, so the task {task!r} is not possible: "
                f"its tasks are {' and '.join(map(repr, supported))}. Try converting the model: "
                f"start the engine with convert={convert!r}",
                parameter="pooling_task",
                value=task,
            )


def _completed(config: PoolerConfig, info: PoolingInfo) -> PoolerConfig:
    """The defaults of an LLM, with the model's in place of None."""
    values: dict[str, Any] = {
        "pooling_type": None,
        "seq_pooling_type": config.seq_pooling_type or info.pooling_type,
    }
    if config.logit_mean is None and info.logit_mean:
        values["logit_mean"] = info.logit_mean
    if config.use_activation is None and info.head != "classifier":
        values["use_activation"] = info.normalize
    return replace(config, **values)


def _check_columns(columns: Iterable[int], width: int) -> None:
    if wrong := [each for each in columns if each >= width]:
        raise RequestError(
            f"returned_token_ids has {wrong[0]}; the model returns {width} components, with "
            f"indices from 0 to {width - 1}",
            parameter="returned_token_ids",
            value=wrong[0],
        )
