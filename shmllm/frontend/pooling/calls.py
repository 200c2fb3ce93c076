"""The methods of `LLM` that make vectors, classes and scores of prompts.

This module owns what users see of that, as `llm` does for generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shmllm.errors import RequestError
from shmllm.frontend.adapters import Adapters
from shmllm.frontend.io_processing import PLUGIN_TASK, is_data, prompts_of, result_of
from shmllm.frontend.pooling.late_interaction import KeptQueries
from shmllm.frontend.pooling.pooled_model import PooledModel
from shmllm.frontend.pooling.requests import Params, TextOptions, adapt, prepare, run
from shmllm.frontend.pooling.text_scores import Scorer
from shmllm.frontend.progress import Shown
from shmllm.frontend.prompts import Prompt, as_list
from shmllm.frontend.scoring_calls import ScoringCalls
from shmllm.frontend.text.truncation import Side
from shmllm.outputs.pooling import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from shmllm.params.lora import LoRARequest
from shmllm.params.pooler_config import PoolerConfig
from shmllm.params.pooling import PoolingParams


class PoolingCalls(ScoringCalls):
    """
    Attributes:
        pooler_config: the defaults of pooling requests.
        pooled_model: what the model computes of prompts, with these defaults.
        kept_queries: the queries of late interaction.
    """

    pooler_config: PoolerConfig
    pooled_model: PooledModel
    kept_queries: KeptQueries

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        *,
        use_tqdm: Shown = True,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Side = "right",
        prompt_name: str | None = None,
        lora_request: Adapters = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Compute vectors or scores of each prompt, from the hidden states after the last layer.

        Args:
            prompts: as for `generate`; up to `max_model_len` tokens.
            pooling_params: one for all prompts or one for each.
            use_tqdm: show a progress bar on stderr, or by a function such as `tqdm`.
            pooling_task: "embed" for a vector, "token_embed" for a vector of each token,
                "classify" for scores of classes, "token_classify" for such scores of each token;
                "plugin" for {"data": ...}. None takes the `pooler_config`'s, or the model's.
                `facts.pooling.tasks` says what the model can do.
            truncate_prompt_tokens: how many tokens of a longer prompt remain, special tokens
                included; -1 means as many as fit. None refuses prompts that are too long.
            truncation_side: the side that is cut, "left" or "right".
            prompt_name: the name of a text of the model that precedes each of the prompts, such as
                "query"; `facts.pooling.prompts` has them. None precedes nothing, as in vLLM.
            lora_request: as for `generate`.

        Returns:
            One output for each prompt, in their order; `outputs.data` is a float32 tensor
            [components] or [tokens, components], and `outputs.array` the same as a numpy array.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing was queued.
            EngineDeadError: the engine died.
        """
        if is_data(prompts) and pooling_task in (None, PLUGIN_TASK):
            io = self.find_io_processor()
            of_data = io.merge_pooling_params(pooling_params)  # type: ignore[arg-type]
            done = self.encode(prompts_of(io, prompts), of_data, use_tqdm=use_tqdm)
            return result_of(io, done)
        options = TextOptions.make(truncate_prompt_tokens, truncation_side, prompt_name)
        requests = prepare(
            self.front_end,
            self.pooled_model,
            as_list(prompts),
            pooling_params,
            pooling_task,
            options,
        )
        adapt(requests, lora_request, self.front_end.adapters)
        self.front_end.add_adapters(requests)
        return run(self.front_end, requests, use_tqdm, self.kept_queries)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: Shown = True,
        pooling_params: Params = None,
        **options: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Compute an embedding of each prompt.

        Args:
            prompts, use_tqdm, pooling_params: as for `encode`.
            options: `truncate_prompt_tokens`, `truncation_side`, `prompt_name` and `lora_request`
                of `encode`.

        Returns:
            One output for each prompt, in their order; `outputs.embedding` is a list of floats.
        """
        given = {"use_tqdm": use_tqdm, "pooling_task": "embed", **options}
        outputs = self.encode(prompts, pooling_params, **given)
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: Params = None,
        use_tqdm: Shown = True,
        **options: Any,
    ) -> list[ClassificationRequestOutput]:
        """Compute scores of the classes for each prompt.

        Args:
            prompts, use_tqdm, pooling_params: as for `encode`.
            options: `truncate_prompt_tokens`, `truncation_side` and `lora_request` of `encode`.

        Returns:
            One output for each prompt, in their order; `outputs.probs` is a list of floats, in the
            order of `facts.pooling.labels`.
        """
        given = {"use_tqdm": use_tqdm, "pooling_task": "classify", **options}
        outputs = self.encode(prompts, pooling_params, **given)
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        /,
        *,
        use_tqdm: Shown = True,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Side = "right",
        chat_template: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Compute scores of pairs of prompts.

        The task of the `pooler_config`, or the model's, says how: "embed" takes the cosine between
        embeddings, "classify" the score of a cross-encoder with one label, which reads both texts
        together, and "token_embed" the MaxSim of the embeddings of all tokens.

        Args:
            data_1: one prompt, or as many as `data_2` has. A cross-encoder takes texts only, unless
                it sees images. {"content": [...]} has parts as a message has.
            data_2: one prompt or several.
            use_tqdm: show a progress bar on stderr, or by a function such as `tqdm`.
            pooling_params: one for all prompts. Its `extra_kwargs` may have "max_tokens_per_query"
                and "max_tokens_per_doc", to which texts are cut first, and "chat_template_kwargs".
            truncate_prompt_tokens, truncation_side: as for `encode`; of a pair, the longer text is
                cut first.
            chat_template: for a cross-encoder: a template, or the name of one of the model's, that
                gets messages of the roles "query" and "document".
            lora_request: the adapter that all are computed with, or None.

        Returns:
            One output for each prompt of `data_2`; `outputs.score` is a float.

        Raises:
            RequestError: a prompt or parameter is wrong, or the model has no scores.
        """
        scorer = Scorer(
            self.front_end,
            self.pooled_model,
            self.kept_queries,
            use_tqdm,
            TextOptions.make(truncate_prompt_tokens, truncation_side).truncation,
            chat_template,
            lora_request,
        )
        return scorer.score(as_list(data_1), as_list(data_2), _one(pooling_params))

    def _use_pooling(self, pooler_config: PoolerConfig) -> None:
        """Set the attributes above, when the engine is ready."""
        self.pooler_config = pooler_config
        self.pooled_model = PooledModel(self.facts, pooler_config)
        self.kept_queries = KeptQueries()


def _one(params: PoolingParams | None) -> PoolingParams:
    params = PoolingParams() if params is None else params
    if not isinstance(params, PoolingParams):
        raise RequestError(
            f"pooling_params of score must be one PoolingParams, got {type(params).__name__}"
        )
    params.check()
    return params
