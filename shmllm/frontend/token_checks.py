"""Checks of the token ids of prompts."""

from __future__ import annotations

from collections.abc import Sequence

from shmllm.config.info import EngineInfo
from shmllm.errors import RequestError
from shmllm.params.sampling import SamplingParams


def check_token_ids(name: str, ids: list[int], info: EngineInfo, min_room: int) -> None:
    """Check the number and the range of a prompt's token ids.

    Args:
        name: what errors call the prompt.
        ids: its token ids, placeholders included.
        info: the limits of the engine.
        min_room: tokens that have to be left for the output.

    Raises:
        RequestError: there are none or too many, or one is out of the vocabulary.
    """
    if not ids:
        raise RequestError(
            f"{name} is empty: the model needs at least one token, so the decoder prompt "
            "cannot be empty"
        )
    most = info.max_model_len
    if len(ids) > most - min_room:
        raise RequestError(
            f"{name} has {len(ids):,} tokens; max_model_len is {most:,}, so a prompt may have "
            f"at most {most - min_room:,}: the maximum context length is {most} tokens of "
            "prompt and output together. Please reduce the length of the prompt"
            f"{'' if min_room else ', or pass truncate_prompt_tokens'}",
            parameter="input_tokens",
            value=len(ids),
        )
    check_known(name, ids, info)


def check_known(name: str, ids: Sequence[int], info: EngineInfo) -> None:
    """Raise RequestError if a token id of a prompt is out of the vocabulary.

    Args:
        name: what errors call the prompt.
        ids: at least one.
        info: has the size of the vocabulary.
    """
    vocab_size = info.vocab_size
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise RequestError(
            f"{name} has token id {wrong}; the vocabulary has ids from 0 to {vocab_size - 1}, "
            "so it is out of vocabulary",
            parameter="prompt_token_ids",
            value=wrong,
        )


def check_starts(name: str, ids: list[int], params: SamplingParams) -> None:
    """Raise RequestError if what parameters say of a prompt's tokens does not suit their number."""
    start = params.routed_experts_prompt_start
    if start > len(ids):
        raise RequestError(
            f"{name} has {len(ids):,} tokens, fewer than routed_experts_prompt_start {start:,}",
            parameter="routed_experts_prompt_start",
            value=start,
        )
    table, start = params.prompt_logprob_token_ids, params.prompt_logprob_start or 0
    if table is not None and len(table) != max(len(ids) - 1 - start, 0):
        raise RequestError(
            f"{name} has {len(ids):,} tokens, so prompt_logprob_token_ids must have "
            f"{max(len(ids) - 1 - start, 0):,} rows with prompt_logprob_start {start:,}, and has "
            f"{len(table):,}",
            parameter="prompt_logprob_token_ids",
            value=len(table),
        )
