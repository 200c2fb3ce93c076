"""The methods of `LLM` that read texts instead of generating: vectors, similarities of texts, and
log-probabilities of given tokens.

This module owns what users see of that, as `llm` does for generation.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from shmllm.config.info import EngineInfo
from shmllm.errors import RequestError
from shmllm.frontend import pooling, scoring
from shmllm.frontend.adapters import Adapters, set_adapters
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.input_processor import PreparedRequest, Prompt, as_list
from shmllm.frontend.io_processing import (
    PLUGIN_TASK,
    is_data,
    make_io_processor,
    prompts_of,
    result_of,
)
from shmllm.outputs.pooling import (
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from shmllm.params.pooling import PoolerConfig, PoolingParams
from shmllm.plugins.io_processor import IOProcessor


class ScoringCalls:
    """The methods of `LLM` that compute numbers of given texts, and what they share with those that
    generate.

    Attributes:
        front_end, facts: see `LLM`.
        model_defaults: the sampling defaults that come with the model.
        pooler_config: the defaults of vectors.
    """

    front_end: FrontEnd
    facts: EngineInfo
    model_defaults: dict[str, Any]
    pooler_config: PoolerConfig
    _io_processor: IOProcessor[Any, Any] | None
    _io_processor_name: str | None

    def get_tokenizer(self) -> Any:
        """See `LLM.get_tokenizer`."""
        raise NotImplementedError

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Compute a vector of each prompt from the hidden states after the model's final norm.

        Args:
            prompts: as for `generate`; up to `max_model_len` tokens.
            pooling_params: one for all prompts or one for each.
            use_tqdm: show a progress bar on stderr.
            pooling_task: "embed", or None, which means the same; "plugin" for {"data": ...}.

        Returns:
            One output for each prompt, in their order; `outputs.data` is the vector.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing was queued.
            EngineDeadError: the engine died.
        """
        if is_data(prompts) and pooling_task in (None, PLUGIN_TASK):
            io = self.find_io_processor()
            of_data = io.merge_pooling_params(pooling_params)  # type: ignore[arg-type]
            done = self.encode(prompts_of(io, prompts), of_data, use_tqdm=use_tqdm)
            return result_of(io, done)
        pooling.check_task(pooling_task)
        requests = pooling.prepare(
            self.front_end, as_list(prompts), pooling_params, self.pooler_config
        )
        return pooling.run(self.front_end, requests, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Like `encode`, but `outputs.embedding` is a list of floats."""
        outputs = self.encode(prompts, pooling_params, use_tqdm=use_tqdm)
        return [pooling.as_embedding(output) for output in outputs]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        /,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[ScoringRequestOutput]:
        """Compute the similarity of prompts: the cosine between their embeddings.

        Args:
            data_1: one prompt, or as many as `data_2` has.
            data_2: one prompt or several.
            use_tqdm: show a progress bar on stderr.
            pooling_params: one for all prompts.

        Returns:
            One output for each prompt of `data_2`; `outputs.score` lies between -1 and 1.
        """
        first, second = as_list(data_1), as_list(data_2)
        if not first or not second or len(first) not in (1, len(second)):
            raise RequestError(
                f"score takes one prompt and several, or two lists of equal length; got "
                f"{len(first)} and {len(second)}"
            )
        vectors = self.encode([*first, *second], pooling_params, use_tqdm=use_tqdm)
        ones = vectors[: len(first)] * (len(second) if len(first) == 1 else 1)
        return [
            pooling.similarity(one, other)
            for one, other in zip(ones, vectors[len(first) :], strict=True)
        ]

    def score_tokens(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: Sequence[Sequence[int]],
        *,
        use_tqdm: bool = False,
        lora_request: Adapters = None,
    ) -> list[list[float]]:
        """Compute the log-probabilities of given completions under the weights in force.

        Args:
            prompts: as for `generate`, but no embeddings.
            completions: the token ids of one completion for each prompt; a completion may be empty.
                Prompt i with completion i has at most `max_model_len - 1` tokens.
            use_tqdm: show a progress bar on stderr.
            lora_request: as for `generate`.

        Returns:
            A list for each prompt, in their order, with a float32 number for each token of its
            completion, given the prompt and the tokens before. They are the numbers that
            `prompt_logprobs` reports, bit for bit, so `logprobs_mode` may make logits of them.
            The temperature is 1. An update of the weights during the call may fall between two
            prompts, and between two chunks of a prompt.

        Raises:
            RequestError: a prompt or a completion is wrong, and nothing was queued; or another
                call, such as `pause_generation("abort")`, ended the scoring.
            EngineDeadError: the engine died.
        """
        requests = scoring.prepare(self.front_end, as_list(prompts), completions)
        self._set_adapters(requests, lora_request)
        with closing(self.front_end.run_each(requests, use_tqdm)) as ended:
            scores = {
                state.index: scoring.scores_of(state, len(completions[state.index]))
                for state in ended
            }
        return [scores[index] for index in sorted(scores)]

    def find_io_processor(self) -> IOProcessor[Any, Any]:
        """The IO processor, which is made at the first call.

        Raises:
            EngineStartError: there is none, or it cannot be made.
        """
        if self._io_processor is None:
            own = weakref.ref(self)  # a circle would outlive its last user
            self._io_processor = make_io_processor(
                self._io_processor_name,
                self.facts,
                self.model_defaults,
                lambda: own().get_tokenizer(),  # type: ignore[union-attr]
            )
        return self._io_processor

    def _set_adapters(self, requests: list[PreparedRequest], lora_request: Adapters) -> None:
        """Set the adapters of requests; the engine reads those that it does not know."""
        self.front_end.add_adapters(set_adapters(requests, lora_request, self.facts))
