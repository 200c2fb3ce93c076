"""Texts that belong before texts of some use, such as "query: ", by the name of the use.

The files of sentence-transformers have them, and how many of their tokens a mean leaves out is
computed as there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shmllm.config.pooling import PoolingInfo
from shmllm.errors import RequestError
from shmllm.frontend.prompts import Prompt
from shmllm.frontend.text.tokenizer import Tokenizer


def with_prompt(text: str, prompts: Sequence[Prompt], names: Sequence[str]) -> list[Prompt]:
    """Put a text before each of these texts.

    Args:
        text: the text.
        prompts: prompts that are text.
        names: what errors call them.

    Raises:
        RequestError: a prompt is not text.
    """
    found: list[Any] = []
    for name, prompt in zip(names, prompts, strict=True):
        if isinstance(prompt, str):
            found.append(text + prompt)
        elif isinstance(prompt, Mapping) and prompt.keys() <= {"prompt", "cache_salt"}:
            found.append({**prompt, "prompt": f"{text}{prompt.get('prompt', '')}"})
        else:
            raise RequestError(f"{name}: prompt_name is for text, so that its prompt can precede")
    return found


def named_prompt(info: PoolingInfo, name: str) -> str:
    """The text with this name.

    Raises:
        RequestError: the model has none; lists the names.
    """
    if name not in info.prompts:
        known = ", ".join(map(repr, info.prompts)) or "none"
        raise RequestError(
            f"prompt_name {name!r} is not one of the model's prompts: {known}",
            parameter="prompt_name",
            value=name,
        )
    return info.prompts[name]


def num_skipped(info: PoolingInfo, tokenizer: Tokenizer, text: str, pooling_type: str) -> int:
    """How many tokens at the beginning, those of this text, a mean leaves out.

    Raises:
        RequestError: the model leaves them out of something else than a mean.
    """
    if info.include_prompt or not text or pooling_type == "LAST":
        return 0
    if pooling_type != "MEAN":
        raise RequestError(
            f"prompt_name is not possible with the pooling type {pooling_type}: the model leaves "
            "the prompt's tokens out (include_prompt), which is supported for means only; put the "
            "prompt before the texts to take them in"
        )
    ids = tokenizer.encode(text)
    return len(ids) - (ids[-1] in tokenizer.special_ids)
