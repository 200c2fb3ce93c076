"""The methods of LLM that make vectors of prompts: `encode`, `embed`, `score`.

Owns the parameters' way to the engine, and cosines. Any model that generates can be asked;
vectors and tokens come from the same engine, in the same steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from shmllm.config.info import EngineInfo
from shmllm.errors import RequestError
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.input_processor import PreparedRequest, Prompt, as_list
from shmllm.frontend.model_files import read_json_object
from shmllm.frontend.progress import BatchProgress
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
"""As torch's cosine_similarity has it."""


class PoolingMethods:
    """What LLM inherits."""

    facts: EngineInfo
    pooler_config: PoolerConfig
    _front_end: FrontEnd

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Make a vector of each prompt, from the hidden states after the model's final norm.

        Args:
            prompts: as for `generate`; up to `max_model_len` tokens.
            pooling_params: one for all or one for each.
            use_tqdm: show a progress bar on stderr.
            pooling_task: "embed", or None.

        Returns:
            One output per prompt, in their order; `outputs.data` is the vector.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing was queued.
            EngineDeadError: the engine died.
        """
        if pooling_task not in (None, *TASKS):
            raise RequestError(f"pooling_task must be None or 'embed', got {pooling_task!r}")
        requests = self.prepare_pooling(as_list(prompts), pooling_params)
        return [pooling_output(state) for state in self._run_pooling(requests, use_tqdm)]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """As `encode`; `outputs.embedding` is a list of floats."""
        return [
            EmbeddingRequestOutput(
                output.request_id,
                EmbeddingOutput(output.outputs.array),
                output.prompt_token_ids,
                output.num_cached_tokens,
                error=output.error,
            )
            for output in self.encode(prompts, pooling_params, use_tqdm=use_tqdm)
        ]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        /,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[ScoringRequestOutput]:
        """How similar prompts are: the cosine between their embeddings.

        Args:
            data_1: one prompt, or as many as `data_2` has.
            data_2: one prompt or several.
            use_tqdm: show a progress bar on stderr.
            pooling_params: for all.

        Returns:
            One output for each of `data_2`; `outputs.score` is from -1 to 1.
        """
        first, second = as_list(data_1), as_list(data_2)
        if not first or not second or len(first) not in (1, len(second)):
            raise RequestError(
                f"score takes one prompt and some, or as many and as many; got {len(first)} "
                f"and {len(second)}"
            )
        vectors = self.encode([*first, *second], pooling_params, use_tqdm=use_tqdm)
        ones = vectors[: len(first)] * (len(second) if len(first) == 1 else 1)
        return [_score(one, other) for one, other in zip(ones, vectors[len(first) :], strict=True)]

    def prepare_pooling(
        self,
        prompts: Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
    ) -> list[PreparedRequest]:
        """Check and tokenize prompts. Internal."""
        poolings = [self._pooling(p) for p in _match(pooling_params, len(prompts))]
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        self._front_end.dispatcher.check_open()
        requests = self._front_end.inputs.prepare(prompts, [params] * len(prompts), min_room=0)
        for request, pooling in zip(requests, poolings, strict=True):
            request.pooling = pooling
        return requests

    def _pooling(self, params: PoolingParams) -> Pooling:
        params.check()
        params = self.pooler_config.complete(params)
        if params.dimensions is not None:
            _check_dimensions(params.dimensions, self.facts)
        return Pooling(
            PoolingType[str(params.pooling_type)],
            params.dimensions or 0,
            bool(params.use_activation),
            not params.skip_reading_prefix_cache,
        )

    def _run_pooling(self, requests: list[PreparedRequest], use_tqdm: bool) -> list[RequestState]:
        ended: dict[int, RequestState] = {}
        with BatchProgress(len(requests), use_tqdm and bool(requests)) as progress:
            for changed in self._front_end.serve(requests, streaming=False, time_tokens=False):
                progress.update(changed)
                for state in changed:
                    if state.is_retryable:
                        state.raise_error()
                    ended[state.index] = state
        return [ended[index] for index in range(len(requests))]


def pooling_output(state: RequestState) -> PoolingRequestOutput[PoolingOutput]:
    """A pooling request that has ended, in the form that users get."""
    return PoolingRequestOutput(
        state.family.request_id,
        PoolingOutput(np.frombuffer(state.vector, np.float32)),
        state.request.prompt_token_ids,
        state.num_cached_tokens,
        error=state.error,
        prompt=state.request.prompt,
    )


def _match(
    params: PoolingParams | Sequence[PoolingParams] | None, num_prompts: int
) -> Sequence[PoolingParams]:
    if params is None or isinstance(params, PoolingParams):
        return [params or PoolingParams()] * num_prompts
    if isinstance(params, str | Mapping) or not isinstance(params, Sequence):
        raise RequestError(
            f"pooling_params must be a PoolingParams or a list of them, got {type(params).__name__}"
        )
    if len(params) != num_prompts:
        raise RequestError(
            f"{num_prompts} prompts and {len(params)} pooling_params: give one PoolingParams for "
            "all prompts, or one for each"
        )
    for index, each in enumerate(params):
        if not isinstance(each, PoolingParams):
            raise RequestError(
                f"pooling_params[{index}] is a {type(each).__name__}, not a PoolingParams"
            )
    return params


def _check_dimensions(dimensions: int, facts: EngineInfo) -> None:
    """A cut embedding of a model that was not trained for that is silently a bad one."""
    config = read_json_object(Path(facts.model_directory) / "config.json")
    allowed = config.get("matryoshka_dimensions")
    if not (config.get("is_matryoshka") or allowed):
        raise RequestError(
            "dimensions must be None for this model: its config.json has neither is_matryoshka "
            f"nor matryoshka_dimensions; got {dimensions}"
        )
    if allowed and dimensions not in allowed:
        raise RequestError(f"dimensions must be one of {allowed} for this model, got {dimensions}")
    if dimensions > facts.hidden_size:
        raise RequestError(f"dimensions must be at most {facts.hidden_size}, got {dimensions}")


def _score(
    one: PoolingRequestOutput[PoolingOutput], other: PoolingRequestOutput[PoolingOutput]
) -> ScoringRequestOutput:
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
    )
