"""Texts that are too long for a model: `embed` divides them, and joins the embeddings of the parts.

The joint embedding is the mean of those of the parts, weighted by the numbers of their tokens, as
in vLLM (`enable_chunked_processing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shmllm.errors import RequestError
from shmllm.frontend.given_items import has_items
from shmllm.frontend.prompts import Prompt
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.frontend.text.truncation import Truncation
from shmllm.outputs.pooling import PoolingOutput, PoolingRequestOutput
from shmllm.outputs.rows import normalized

Output = PoolingRequestOutput[PoolingOutput]

NO_LIMIT = 2**31 - 1


def tokenize(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], truncation: Truncation | None, most: int
) -> list[Any]:
    """Prompts as token ids, cut if there is a truncation. Embeddings and prompts with items stay as
    they are.

    Args:
        tokenizer: the model's.
        prompts: the prompts.
        truncation: how they are cut.
        most: the most tokens that remain then.

    Raises:
        RequestError: the truncation is not possible.
    """
    cut = {} if truncation is None else truncation.of_text(most)
    given: list[dict[str, Any]] = [_fields(prompt) for prompt in prompts]
    texts = [each["prompt"] for each in given if _is_text(each)]
    encoded = iter(tokenizer.encode_batch(texts, **cut) if texts else ())
    for each in given:
        if _is_text(each):
            each["prompt_token_ids"] = next(encoded)
        elif truncation is not None and _is_tokens(each):
            each["prompt_token_ids"] = truncation.of_tokens([*each["prompt_token_ids"]], most)
    return given


def check_can_be_cut(name: str, prompt: Any) -> None:
    """Raises RequestError for prompts of which no tokens can be left out: those with items, and
    embeddings."""
    given = _fields(prompt)
    if has_items(given):
        raise RequestError(f"{name} has images or other items, so it cannot be truncated")
    if given.get("prompt_embeds") is not None:
        raise RequestError(f"{name} consists of embeddings, which cannot be truncated")


def divide(name: str, prompt: dict[str, Any], size: int, most: int) -> list[Any]:
    """The parts of a prompt of token ids; a prompt with items is whole.

    Args:
        name: what errors call it.
        prompt: what `tokenize` returned.
        size: the most tokens of a part.
        most: the most tokens of the prompt.

    Raises:
        RequestError: it has more.
    """
    ids = prompt.get("prompt_token_ids")
    if ids is None or not _is_tokens(prompt):
        return [prompt]
    if len(ids) > most:
        raise RequestError(
            f"{name} has {len(ids):,} tokens; max_embed_len is {most:,}. Please reduce the length "
            "of the prompt, or pass truncate_prompt_tokens",
            parameter="input_tokens",
            value=len(ids),
        )
    if len(ids) <= size:
        return [prompt]
    begins = range(0, len(ids), size)
    return [prompt | {"prompt_token_ids": ids[begin : begin + size]} for begin in begins]


def join(outputs: Sequence[Output], counts: Sequence[int], normalizes: Sequence[bool]) -> list[Any]:
    """Join the outputs of the parts of prompts.

    Args:
        outputs: those of all parts, in their order.
        counts: the number of parts of each prompt.
        normalizes: whether the embeddings of each prompt have the length 1.

    Returns:
        One output for each prompt.
    """
    rest = iter(outputs)
    return [_joint(rest, *each) for each in zip(counts, normalizes, strict=True)]


def _joint(rest: Iterator[Output], count: int, normalize: bool) -> Output:
    parts = [next(rest) for _ in range(count)]
    first = parts[0]
    if count == 1:
        return first
    joint = replace(
        first,
        prompt_token_ids=[token for part in parts for token in part.prompt_token_ids],
        num_cached_tokens=sum(part.num_cached_tokens for part in parts),
    )
    failed = next((part for part in parts if part.error is not None), None)
    if failed is not None:
        return replace(
            joint, outputs=failed.outputs, error=failed.error, is_aborted=failed.is_aborted
        )
    weights = [len(part.prompt_token_ids) for part in parts]
    vectors = np.stack([part.outputs.array for part in parts]).astype(np.float64)
    mean = np.average(vectors, axis=0, weights=weights)
    vector = (normalized(mean) if normalize else mean).astype(np.float32)
    vector.flags.writeable = False
    return replace(joint, outputs=PoolingOutput(vector))


def _fields(prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, Mapping):
        return dict(prompt)
    return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}


def _is_text(prompt: Mapping[str, Any]) -> bool:
    others = (prompt.get("prompt_token_ids"), prompt.get("prompt_embeds"))
    is_text = isinstance(prompt.get("prompt"), str) and all(each is None for each in others)
    return is_text and not has_items(prompt)


def _is_tokens(prompt: Mapping[str, Any]) -> bool:
    return isinstance(prompt.get("prompt_token_ids"), Sequence) and not has_items(prompt)
