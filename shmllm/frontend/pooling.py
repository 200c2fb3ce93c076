"""Pooling: vectors and similarity scores of prompts, for `LLM.encode`, `embed` and `score`.

Any model that generates tokens can pool. The same engine computes vectors and tokens, in the same
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shmllm.config.info import EngineInfo
from shmllm.errors import RequestError
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.input_processor import PreparedRequest, Prompt, match_params
from shmllm.frontend.model_files import read_json_object
from shmllm.frontend.request_state import RequestState
from shmllm.outputs.pooling import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from shmllm.params.pooling import TASKS, PoolerConfig, Pooling, PoolingParams, PoolingType
from shmllm.params.sampling import SamplingParams

SMALLEST_NORM = 1e-8
"""The smallest norm that a cosine divides by, as in torch's cosine_similarity."""

ABORTED = "the engine was stopped, paused or put to sleep and aborted the request"


def check_task(pooling_task: str | None) -> None:
    """Raise RequestError unless this is a pooling task."""
    if pooling_task not in (None, *TASKS):
        raise RequestError(f"pooling_task must be None or 'embed', got {pooling_task!r}")


def prepare(
    front_end: FrontEnd,
    prompts: Sequence[Prompt],
    pooling_params: PoolingParams | Sequence[PoolingParams] | None,
    pooler_config: PoolerConfig,
) -> list[PreparedRequest]:
    """Check and tokenize prompts whose hidden states the engine pools.

    Args:
        front_end: of the engine.
        prompts: one or more prompts.
        pooling_params: one for all or one for each.
        pooler_config: the values of parameters that are None.

    Raises:
        RequestError: a prompt or a parameter is wrong.
    """
    matched = match_params(pooling_params, len(prompts), PoolingParams(), "pooling_params")
    poolings = [_pooling(each, pooler_config, front_end.info) for each in matched]
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    front_end.dispatcher.check_open()
    requests = front_end.inputs.prepare(prompts, [params] * len(prompts), min_room=0)
    for request, each in zip(requests, poolings, strict=True):
        request.submitted.params = each
    return requests


def run(
    front_end: FrontEnd, requests: list[PreparedRequest], show_progress: bool
) -> list[PoolingRequestOutput[PoolingOutput]]:
    """Run pooling requests. Returns their outputs, in their order."""
    ended = front_end.run_each(requests, show_progress)
    outputs = {state.index: pooling_output(state) for state in ended}
    return [outputs[index] for index in sorted(outputs)]


def pooling_output(state: RequestState) -> PoolingRequestOutput[PoolingOutput]:
    """The output of a pooling request that has ended."""
    is_aborted = state.error is None and not state.vector
    return PoolingRequestOutput(
        state.parent.request_id,
        PoolingOutput(np.frombuffer(state.vector, np.float32)),
        state.request.prompt_token_ids,
        state.num_cached_tokens,
        error=ABORTED if is_aborted else state.error,
        prompt=state.request.prompt,
        is_aborted=is_aborted,
    )


def as_embedding(output: PoolingRequestOutput[PoolingOutput]) -> EmbeddingRequestOutput:
    """The same vector as an embedding."""
    return EmbeddingRequestOutput(
        output.request_id,
        EmbeddingOutput(output.outputs.array),
        output.prompt_token_ids,
        output.num_cached_tokens,
        error=output.error,
        is_aborted=output.is_aborted,
    )


def similarity(
    one: PoolingRequestOutput[PoolingOutput], other: PoolingRequestOutput[PoolingOutput]
) -> ScoringRequestOutput:
    """The cosine between two vectors, from -1 to 1."""
    error = one.error or other.error
    score = 0.0
    if error is None:
        a, b = (each.outputs.array.astype(np.float64) for each in (one, other))
        norms = [max(float(np.linalg.norm(each)), SMALLEST_NORM) for each in (a, b)]
        score = min(max(float(a @ b) / (norms[0] * norms[1]), -1.0), 1.0)
    return ScoringRequestOutput(
        f"{one.request_id}_{other.request_id}",
        ScoringOutput(score),
        one.prompt_token_ids + other.prompt_token_ids,
        one.num_cached_tokens + other.num_cached_tokens,
        error=error,
        is_aborted=one.is_aborted or other.is_aborted,
    )


def _pooling(params: PoolingParams, pooler_config: PoolerConfig, info: EngineInfo) -> Pooling:
    params = pooler_config.complete(params)
    if params.dimensions is not None:
        _check_dimensions(params.dimensions, info)
    return Pooling(
        PoolingType[str(params.pooling_type)],
        params.dimensions or 0,
        bool(params.use_activation),
        not params.skip_reading_prefix_cache,
    )


def _check_dimensions(dimensions: int, info: EngineInfo) -> None:
    """Allow truncated embeddings only for models that were trained for them. For other models they
    would be silently wrong."""
    config = read_json_object(Path(info.model_directory) / "config.json")
    allowed = config.get("matryoshka_dimensions")
    if not (config.get("is_matryoshka") or allowed):
        raise RequestError(
            "dimensions must be None for this model: its config.json has neither is_matryoshka "
            f"nor matryoshka_dimensions; got {dimensions}"
        )
    if allowed and dimensions not in allowed:
        raise RequestError(f"dimensions must be one of {allowed} for this model, got {dimensions}")
    if dimensions > info.hidden_size:
        raise RequestError(f"dimensions must be at most {info.hidden_size}, got {dimensions}")
