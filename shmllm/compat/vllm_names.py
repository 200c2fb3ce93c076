"""`LLM` and some functions with vLLM's arguments; `vllm_async` has `AsyncLLM`.

This module translates arguments and calls the class of the same name in shmllm.
`shmllm.compat.vllm` lists the module of each name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import shmllm.frontend.llm
from shmllm.compat.vllm_metrics import Metric, as_metrics
from shmllm.compat.vllm_options import translate
from shmllm.compat.vllm_tokenization import of_pairs, tokenize, tokenize_for_pooling
from shmllm.outputs.pooling import PoolingOutput, PoolingRequestOutput, ScoringRequestOutput
from shmllm.outputs.request import RequestOutput
from shmllm.params.template_kwargs import with_template_kwargs

logger = logging.getLogger(__name__)

# Options of vLLM that shmllm does not have, with the value that describes shmllm's behaviour.
_NEUTRAL = {
    "chat_template_content_format": "auto",
    "data_parallel_rank": 0,
    "tokenization_kwargs": {},
}


OF_ENGINES = ("sleep", "wake_up", "add_lora", "remove_lora", "list_loras", "pin_lora")
"""Methods of vLLM's workers that are methods of `LLM` here, which `collective_rpc` calls."""


class LLM(shmllm.frontend.llm.LLM):
    """`shmllm.LLM` with vLLM's options and arguments."""

    def __init__(self, model: str = "tiny", **options: Any) -> None:
        super().__init__(**translate({"model": model, **options}))

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, use_tqdm: Any = True, **options: Any
    ) -> list[RequestOutput]:
        prepared, given = self._translate_call(prompts, **options)
        return super().generate(prepared, sampling_params, use_tqdm=bool(use_tqdm), **given)

    def enqueue(
        self, prompts: Any, sampling_params: Any = None, *, use_tqdm: Any = True, **options: Any
    ) -> list[str]:
        prepared, given = self._translate_call(prompts, **options)
        return super().enqueue(prepared, sampling_params, use_tqdm=bool(use_tqdm), **given)

    def chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        *,
        priority: Any = None,
        chat_template_content_format: Any = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        priority = usable_priority(priority, self.facts)
        given = known({"lora_request": lora_request, "priority": priority, **options})
        variables = with_template_kwargs(
            {"chat_template_content_format": chat_template_content_format}, chat_template_kwargs
        )
        return super().chat(
            messages,
            sampling_params,
            use_tqdm=bool(use_tqdm),
            chat_template_kwargs=variables,
            **given,
        )

    def encode(
        self,
        prompts: Any,
        pooling_params: Any = None,
        *,
        use_tqdm: Any = True,
        tokenization_kwargs: Any = None,
        **options: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        prepared, cut = tokenize_for_pooling(
            self.front_end, without_nones(prompts), tokenization_kwargs
        )
        given = known(options) | cut
        return super().encode(prepared, pooling_params, use_tqdm=bool(use_tqdm), **given)

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        use_tqdm: Any = True,
        tokenization_kwargs: Any = None,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        given = known(options) | of_pairs(tokenization_kwargs)
        return super().score(data_1, data_2, use_tqdm=bool(use_tqdm), **given)

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What the engine does: "generate", and pooling tasks."""
        return supported_tasks(self.facts)

    def _translate_call(
        self, prompts: Any, tokenization_kwargs: Any = None, priority: Any = None, **options: Any
    ) -> tuple[Any, dict[str, Any]]:
        prepared = self.prepare_prompts(prompts, tokenization_kwargs)
        return prepared, known(options | {"priority": usable_priority(priority, self.facts)})

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """As `shmllm.LLM.collective_rpc`. The methods in `OF_ENGINES` have one result."""
        if is_of_engine(method, self.facts):
            return [getattr(self, method)(*args, **kwargs or {})]
        return super().collective_rpc(method, timeout, args, kwargs)

    def prepare_prompts(self, prompts: Any, tokenization_kwargs: Any, min_room: int = 1) -> Any:
        given = without_nones(prompts)
        return tokenize(self.front_end, given, tokenization_kwargs, min_room=min_room)

    def get_metrics(self) -> list[Metric]:  # type: ignore[override]
        """The engine's counters and gauges that vLLM has, too."""
        return as_metrics(super().get_metrics(), self.facts.model_directory)


def is_of_engine(method: Any, facts: Any) -> bool:
    """Whether a method for workers is one of `OF_ENGINES`, and not of the engine's extension."""
    return method in OF_ENGINES and method not in facts.extension_methods


def supported_tasks(facts: Any) -> tuple[str, ...]:
    """What an engine with these facts does, as vLLM's `supported_tasks`."""
    return (*(("generate",) if facts.pooling.generates else ()), *facts.pooling.tasks)


def random_uuid() -> str:
    """A new id for a request: 32 hexadecimal digits."""
    return uuid4().hex


def known(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that have an effect: without those that are None or have a neutral value."""
    return {
        name: value
        for name, value in options.items()
        if value is not None and value != _NEUTRAL.get(name)
    }


def usable_priority(priority: Any, facts: Any) -> Any:
    """The priorities, or zeros with a warning if the engine does not schedule by them."""
    values = list(priority) if isinstance(priority, list | tuple) else [priority]
    if facts.scheduling_policy == "priority" or not any(values):
        return priority
    logger.warning(
        "priority has no effect: this engine schedules first come, first served; start it "
        "with scheduling_policy='priority'"
    )
    return [0] * len(values) if isinstance(priority, list | tuple) else 0


def without_nones(prompts: Any) -> Any:
    """Removes the keys whose value is None or an empty mapping, such as the `multi_modal_data` of a
    prompt without images, from prompts that are mappings."""
    if isinstance(prompts, Mapping):
        items = prompts.items()
        return {k: v for k, v in items if not (v is None or (isinstance(v, Mapping) and not v))}
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, str)
    if is_list and prompts and isinstance(prompts[0], Mapping):
        return [without_nones(prompt) for prompt in prompts]
    return prompts


def get_tokenizer(
    tokenizer_name: str,
    *,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    **options: Any,
) -> Any:
    """Loads the transformers tokenizer of a model; `options` are passed to transformers."""
    from transformers import AutoTokenizer

    from shmllm.frontend.model_files import loadable_name, resolve_model

    name = str(tokenizer_name)
    directory = resolve_model(name, revision=revision)
    tokenizer = AutoTokenizer.from_pretrained(directory, **options)
    tokenizer.name_or_path = loadable_name(name, directory)
    return tokenizer


def resolve_chat_template(
    tokenizer: Any, chat_template: str | None, tools: Any, *, model_config: Any = None
) -> str | None:
    """The source of the chat template; None if the tokenizer has none."""
    try:
        return str(tokenizer.get_chat_template(chat_template, tools=tools))
    except ValueError:
        return None


class RayPrometheusStatLogger:
    """Accepted without effect: Ray gets no metrics; use `AsyncLLM.get_metrics`."""
