"""Prompts that are given as embeddings: `{"prompt_embeds": tensor}`.

This module checks the tensor. In the request, the prompt has token id 0 at each position, and the
cache salt contains a digest of the tensor: otherwise all prompts of equal length would share
prefix-cache entries. The module does not import torch: a caller with a torch tensor has imported
it.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np

from shmllm.errors import RequestError
from shmllm.params.sampling import SamplingParams

PLACEHOLDER = 0
LARGEST = 1e15
"""The largest magnitude of a value: the engine sums squares of the values in float32."""


def read_embeds(name: str, value: Any, hidden_size: int, what: str = "'prompt_embeds'") -> Any:
    """Check the embeddings of a prompt, or of an item, and move them to CPU memory.

    Args:
        name: the name of the prompt, for error messages.
        value: a torch tensor or numpy array of shape (tokens, hidden) or (1, tokens, hidden).
        hidden_size: the hidden size of the model.
        what: what error messages call the embeddings.

    Returns:
        The tensor or array, of shape (tokens, hidden).

    Raises:
        RequestError: `value` has a wrong type, shape or dtype, or contains values that are not
            finite or too large.
    """
    if not hasattr(value, "ndim") or not hasattr(value, "dtype"):
        raise RequestError(
            f"{name}: {what} must be a torch tensor or a numpy array, got {type(value).__name__}"
        )
    if hasattr(value, "detach"):
        if value.is_meta or value.is_sparse:
            raise RequestError(f"{name}: {what} is a tensor without a value in each place")
        value = value.detach().cpu()
    else:
        value = np.ascontiguousarray(value)
    if value.ndim == 3 and value.shape[0] == 1:
        value = value[0]
    is_float = "float" in str(value.dtype) and value.dtype.itemsize <= np.float64().itemsize
    if value.ndim != 2 or value.shape[1] != hidden_size or not is_float:
        raise RequestError(
            f"{name}: {what} must be floating numbers of shape [tokens, {hidden_size}], "
            f"got {value.dtype} of shape {list(value.shape)}"
        )
    if len(value) and not np.abs(as_float32(value)).max() < LARGEST:
        raise RequestError(f"{name}: {what} has values that are not finite, or too large")
    return value


def salt_with(embeds: Any, cache_salt: str) -> str:
    """A cache salt that only prompts with the same embeddings and `cache_salt` have. No caller's
    salt has its NUL character."""
    digest = sha256(np.ascontiguousarray(as_float32(embeds)).data).hexdigest()
    return f"{cache_salt}\0prompt_embeds {digest}"


def check_params(name: str, params: SamplingParams) -> None:
    """Raise RequestError for parameters that need the token ids of the prompt."""
    if params.scores_prompt:
        raise RequestError(f"{name}: prompt_logprobs needs token ids, not prompt_embeds")
    if params.repetition_penalty != 1:
        raise RequestError(f"{name}: repetition_penalty needs token ids, not prompt_embeds")


def as_float32(value: Any) -> Any:
    """Embeddings as a numpy array."""
    array = value.float().numpy() if hasattr(value, "detach") else value
    return np.asarray(array, np.float32)
