"""Scores of pairs of prompts, in the three ways in which models compute them.

A bi-encoder makes an embedding of each, and the score is the cosine between them. A cross-encoder
reads both together. With late interaction, the score is made of the embeddings of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmllm.errors import RequestError
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.pooling.late_interaction import KeptQueries, max_sim
from shmllm.frontend.pooling.pair_prompts import PairOptions, cut_texts, make_pairs
from shmllm.frontend.pooling.pooled_model import PooledModel
from shmllm.frontend.pooling.requests import (
    Output,
    PoolingRequest,
    TextOptions,
    adapt,
    pooling_output,
    prepare,
    run,
)
from shmllm.frontend.pooling.score_parts import prompts_of_parts
from shmllm.frontend.progress import Shown
from shmllm.frontend.prompts import Prompt
from shmllm.frontend.text.truncation import Truncation
from shmllm.outputs.pooling import ScoringOutput, ScoringRequestOutput
from shmllm.params.lora import LoRARequest
from shmllm.params.pooling import PoolingParams

SMALLEST_NORM = 1e-8
"""The smallest norm that a cosine divides by, as in torch's cosine_similarity."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """Computes the scores of a call.

    Attributes:
        front_end: of the engine.
        model: what it computes of prompts.
        kept: the queries of late interaction.
        show_progress: whether progress is shown.
        truncation: how prompts that are too long are cut; None refuses them.
        chat_template: see `PairOptions`.
        lora_request: the adapter that all are computed with; None: none.
    """

    front_end: FrontEnd
    model: PooledModel
    kept: KeptQueries
    show_progress: Shown
    truncation: Truncation | None = None
    chat_template: str | None = None
    lora_request: LoRARequest | None = None

    def score(
        self, queries: Sequence[Prompt], documents: Sequence[Prompt], params: PoolingParams
    ) -> list[ScoringRequestOutput]:
        """The scores of pairs.

        Args:
            queries: one prompt, or one for each document.
            documents: one or more prompts.
            params: the parameters of all.

        Raises:
            RequestError: a prompt or a parameter is wrong, or the model has no scores.
        """
        _check_counts(len(queries), len(documents))
        params = params.clone()
        params.task = task = self._task(params)
        info = self.front_end.info
        options = PairOptions.make(
            self.truncation, self.chat_template, params.extra_kwargs, info.max_model_len
        )
        params.extra_kwargs = None
        tokenizer, items = self.front_end.tokenizer, self.front_end.items
        queries = prompts_of_parts("query", queries, items)
        documents = prompts_of_parts("document", documents, items)
        queries = cut_texts(tokenizer, queries, options.max_tokens_per_query)
        documents = cut_texts(tokenizer, documents, options.max_tokens_per_doc)
        if task == "classify":
            return self._of_pairs(queries, documents, params, options)
        if self.chat_template is not None or options.template_kwargs:
            raise RequestError(
                f"a chat_template is for models that read a pair together; this one has the task "
                f"{task!r}"
            )
        if task == "embed":
            return self._of_embeddings(queries, documents, params)
        return self._of_tokens(queries, documents, params)

    def _task(self, params: PoolingParams) -> str:
        """The task whose results scores are made of."""
        task = self.model.task_for(None)
        if params.task not in (None, task):
            raise RequestError(
                f"You cannot overwrite pooling_params.task={params.task!r} with "
                f"pooling_task={task!r}!"
            )
        labels = self.model.pooling.labels
        if task == "classify" and len(labels) != 1:
            raise RequestError(
                "Scoring API is only enabled for num_labels == 1. This model has "
                f"{len(labels)} labels: {', '.join(labels)}; use LLM.classify"
            )
        if task == "token_classify":
            raise RequestError(
                f"This model does not support the Scoring API: its task is {task!r}. Name another "
                "one that it has by pooler_config={'task': ...}"
            )
        return task

    def _of_embeddings(
        self, queries: Sequence[Prompt], documents: Sequence[Prompt], params: PoolingParams
    ) -> list[ScoringRequestOutput]:
        vectors = self._pool([*queries, *documents], params, self.show_progress)
        firsts = _for_each(vectors[: len(queries)], len(documents))
        return [
            scored(first, second, cosine)
            for first, second in zip(firsts, vectors[len(queries) :], strict=True)
        ]

    def _of_tokens(
        self, queries: Sequence[Prompt], documents: Sequence[Prompt], params: PoolingParams
    ) -> list[ScoringRequestOutput]:
        """The embeddings of a document's tokens are dropped as soon as it is scored."""
        requests = self._prepare(documents, params)
        firsts = _for_each(self._pool(queries, params, False), len(documents))
        scores: dict[int, ScoringRequestOutput] = {}
        with closing(self.front_end.run_each([*requests], self.show_progress)) as ended:
            for state in ended:
                document = pooling_output(state, self.kept)
                scores[state.index] = scored(firsts[state.index], document, max_sim)
        return [scores[index] for index in sorted(scores)]

    def _of_pairs(
        self,
        queries: Sequence[Prompt],
        documents: Sequence[Prompt],
        params: PoolingParams,
        options: PairOptions,
    ) -> list[ScoringRequestOutput]:
        info = self.front_end.info
        pairs = make_pairs(
            self.front_end.tokenizer,
            info.pooling,
            _for_each(queries, len(documents)),
            documents,
            options,
            info.max_model_len,
            self.front_end.items.mark,
        )
        segments = [pair.second_segment for pair in pairs]
        requests = self._prepare([pair.prompt for pair in pairs], params, segments)
        outputs = run(self.front_end, requests, self.show_progress, self.kept)
        return [ScoringRequestOutput.from_base(output) for output in outputs]

    def _pool(
        self, prompts: Sequence[Prompt], params: PoolingParams, show_progress: Shown
    ) -> list[Output]:
        return run(self.front_end, self._prepare(prompts, params), show_progress, self.kept)

    def _prepare(
        self, prompts: Sequence[Prompt], params: PoolingParams, segments: Sequence[int] = ()
    ) -> list[PoolingRequest]:
        options = TextOptions(self.truncation)
        requests = prepare(
            self.front_end, self.model, prompts, params, None, options, segments=segments
        )
        adapt(requests, self.lora_request, self.front_end.adapters)
        self.front_end.add_adapters(requests)
        return requests


def cosine(one: Any, other: Any) -> float:
    """The cosine between two vectors, from -1 to 1."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    norms = [max(float(np.linalg.norm(each)), SMALLEST_NORM) for each in (a, b)]
    return min(max(float(a @ b) / (norms[0] * norms[1]), -1.0), 1.0)


def scored(one: Output, other: Output, score: Any) -> ScoringRequestOutput:
    """The output of two outputs and the score of their arrays."""
    error = one.error or other.error
    value = score(one.outputs.array, other.outputs.array) if error is None else 0.0
    return ScoringRequestOutput(
        f"{one.request_id}_{other.request_id}",
        ScoringOutput(value),
        one.prompt_token_ids + other.prompt_token_ids,
        one.num_cached_tokens + other.num_cached_tokens,
        error=error,
        is_aborted=one.is_aborted or other.is_aborted,
    )


def _for_each(queries: Sequence[Any], count: int) -> list[Any]:
    """A query for each document."""
    return [*queries] * (count if len(queries) == 1 else 1)


def _check_counts(queries: int, documents: int) -> None:
    if not queries or not documents or queries not in (1, documents):
        raise RequestError(
            "Input lengths must be either 1:1, 1:N or N:N: score takes one prompt and several, or "
            f"two lists of equal length; got {queries} and {documents}"
        )
