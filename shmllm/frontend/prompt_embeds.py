"""Prompts given as embeddings: `{"prompt_embeds": tensor}`.

Owns what such a tensor may be, and what stands for it where others look at a prompt: token id
0 in each place, and a digest in the cache salt, since two prompts of the same placeholders
share nothing. torch is not imported: who has a tensor has it.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np

from shmllm.errors import RequestError
from shmllm.params.sampling import SamplingParams

PLACEHOLDER = 0
LARGEST = 1e15
"""The engine adds up squares in float32."""


def read_embeds(name: str, value: Any, hidden_size: int) -> Any:
    """The embeddings as (tokens, hidden) in CPU memory.

    Args:
        name: of the prompt, for messages.
        value: torch tensor or numpy array, (tokens, hidden) or (1, tokens, hidden).
        hidden_size: of the model.

    Raises:
        RequestError: it is something else, or has values that cannot be computed with.
    """
    if not hasattr(value, "ndim") or not hasattr(value, "dtype"):
        raise RequestError(
            f"{name}: 'prompt_embeds' must be a torch tensor or a numpy array, got "
            f"{type(value).__name__}"
        )
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    if value.ndim == 3 and value.shape[0] == 1:
        value = value[0]
    if value.ndim != 2 or value.shape[1] != hidden_size or "float" not in str(value.dtype):
        raise RequestError(
            f"{name}: 'prompt_embeds' must be floating numbers of shape [tokens, {hidden_size}], "
            f"got {value.dtype} of shape {list(value.shape)}"
        )
    if len(value) and not np.abs(_as_float32(value)).max() < LARGEST:
        raise RequestError(f"{name}: 'prompt_embeds' has values that are not finite, or too large")
    return value


def salt_with(embeds: Any, cache_salt: str) -> str:
    """A cache salt that only prompts with the same embeddings have."""
    digest = sha256(np.ascontiguousarray(_as_float32(embeds)).data).hexdigest()
    return f"{cache_salt}\0prompt_embeds {digest}"


def check_params(name: str, params: SamplingParams) -> None:
    """Raise RequestError for what needs the prompt's tokens."""
    if params.prompt_logprobs is not None:
        raise RequestError(f"{name}: prompt_logprobs needs token ids, not prompt_embeds")
    if params.repetition_penalty != 1:
        raise RequestError(f"{name}: repetition_penalty needs token ids, not prompt_embeds")


def _as_float32(value: Any) -> Any:
    array = value.float().numpy() if hasattr(value, "detach") else value
    return np.asarray(array, np.float32)
