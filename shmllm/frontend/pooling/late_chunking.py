"""Late chunking: which tokens and characters of a text the vectors of its chunks stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shmllm.errors import RequestError
from shmllm.frontend.prompts import Prompt
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.outputs.pooling import LateChunk, LateChunkingMetadata

_KEYS = {"prompt", "cache_salt"}


def chunk_text(
    tokenizer: Tokenizer, name: str, prompt: Any, chunk_size: int
) -> tuple[Prompt, LateChunkingMetadata]:
    """Tokenize a text whose chunks get vectors.

    Args:
        tokenizer: the model's.
        name: what errors call the prompt.
        prompt: the prompt, which must be a text.
        chunk_size: the number of tokens of a chunk.

    Returns:
        The prompt with its token ids, and its chunks.

    Raises:
        RequestError: the prompt is not a text, or the tokenizer does not know offsets.
    """
    given = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
    text = given.get("prompt")
    if not isinstance(text, str) or not text or given.keys() - _KEYS:
        raise RequestError(
            f"{name}: Late chunking requires nonempty plain-text input, so that chunks have ranges "
            "of characters"
        )
    ids, offsets = tokenizer.encode_offsets(text)
    found: Any = given | {"prompt_token_ids": ids}
    return found, LateChunkingMetadata(chunk_size, len(ids), _chunks(offsets, chunk_size))


def _chunks(offsets: Sequence[tuple[int, int]], chunk_size: int) -> list[LateChunk]:
    chunks = []
    for begin in range(0, len(offsets), chunk_size):
        end = min(begin + chunk_size, len(offsets))
        ranges = [(first, last) for first, last in offsets[begin:end] if first < last]
        chars = (min(a for a, _ in ranges), max(b for _, b in ranges)) if ranges else None
        chunks.append(LateChunk((begin, end), chars))
    return chunks
