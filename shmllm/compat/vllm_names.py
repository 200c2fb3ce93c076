"""Small functions of vLLM's, and what `LLM` and `AsyncLLM` share: options without an effect, and
prompts and priorities as clients pass them.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from shmllm.errors import RequestError
from shmllm.frontend.prompts import as_list
from shmllm.params.template_kwargs import chat_options, with_template_kwargs

logger = logging.getLogger(__name__)

# Options of vLLM that shmllm does not have, with the value that describes shmllm's behaviour.
_NEUTRAL = {
    "chat_template_content_format": "auto",
    "data_parallel_rank": 0,
    "priority": 0,
    "tokenization_kwargs": {},
}


_MASK = "prompt_is_token_ids"
NUM_PRINTED = 4
"""How many numbers `print_embeddings` prints."""

OF_ENGINES = ("sleep", "wake_up", "add_lora", "remove_lora", "list_loras", "pin_lora")
"""Methods of vLLM's workers that are methods of `LLM` here, which `collective_rpc` calls."""


def is_of_engine(method: Any, facts: Any) -> bool:
    """Whether a method for workers is one of `OF_ENGINES`, and not of the engine's extension."""
    return method in OF_ENGINES and method not in facts.extension_methods


def supported_tasks(facts: Any) -> tuple[str, ...]:
    """What an engine with these facts does, as vLLM's `supported_tasks`."""
    return (*(("generate",) if facts.pooling.generates else ()), *facts.pooling.tasks)


def get_open_port() -> int:
    """A port of this machine that no program listens on now, for servers of the caller's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def hf_api() -> Any:
    """A client of the Hugging Face hub, by which programs download models and adapters."""
    from huggingface_hub import HfApi

    return HfApi()


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Prints the first numbers of a vector, and how many it has."""
    first = ", ".join(map(str, embeds[:NUM_PRINTED]))
    rest = ", ..." if len(embeds) > NUM_PRINTED else ""
    print(f"{prefix}: [{first}{rest}] (size={len(embeds)})")


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
        given = {k: v for k, v in items if not (v is None or (isinstance(v, Mapping) and not v))}
        return _without_mask(given) if _MASK in given else given
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, str)
    if is_list and prompts and isinstance(prompts[0], Mapping):
        return [without_nones(prompt) for prompt in prompts]
    return prompts


def _without_mask(prompt: dict[str, Any]) -> dict[str, Any]:
    """A prompt of embeddings without the mask that says so of each position, and the placeholders.

    Raises:
        RequestError: the mask says that a position is a token.
    """
    mask, others = prompt[_MASK], prompt.keys() - {_MASK, "prompt_token_ids"}
    if "prompt_embeds" not in others or len(mask) != len(prompt["prompt_embeds"]) or any(mask):
        raise RequestError(
            f"{_MASK} must be False for each row of 'prompt_embeds': a prompt has embeddings at "
            "all positions, or token ids"
        )
    return {name: prompt[name] for name in others}


def with_processor_kwargs(prompts: Any, mm_processor_kwargs: Any) -> Any:
    """Prompts with `mm_processor_kwargs` in place of their own; unchanged if these are None."""
    if mm_processor_kwargs is None:
        return prompts
    extra = {"mm_processor_kwargs": mm_processor_kwargs}
    return [_as_mapping(prompt) | extra for prompt in as_list(prompts)]


def _as_mapping(prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, Mapping):
        return dict(prompt)
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}


def conversation_options(
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    tools: Any = None,
    tool_choice: Any = None,
    chat_template_content_format: str = "auto",
    chat_template_kwargs: Any = None,
    mm_processor_kwargs: Any = None,
) -> dict[str, Any]:
    """The options of `FrontEnd.chat_prompts` from the arguments of vLLM's `LLM.chat`."""
    variables = with_template_kwargs(
        {
            "chat_template_content_format": chat_template_content_format,
            "mm_processor_kwargs": mm_processor_kwargs,
        },
        chat_template_kwargs,
    )
    own = add_generation_prompt, continue_final_message, chat_template, tools, tool_choice
    return chat_options(*own, variables)


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

    from shmllm.frontend.model_files import Hub, loadable_name, resolve_model

    name = str(tokenizer_name)
    directory = resolve_model(name, Hub(revision, download_dir=download_dir))
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
