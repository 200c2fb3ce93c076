"""Whether an engine has room for the items of a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shmllm.config.info import EngineInfo
from shmllm.errors import RequestError
from shmllm.params.items import MOST_ITEM_BYTES, Item, Modality

if TYPE_CHECKING:
    from shmllm.frontend.items.prepared import PreparedItem

_SMALLER = "smaller, by itself or by mm_processor_kwargs"


def check_sizes(
    name: str, items: Iterable[tuple[Modality, PreparedItem]], info: EngineInfo
) -> None:
    """Raises RequestError if an item has too many embeddings, or too much data.

    Args:
        name: the prompt's name for messages.
        items: the prepared items, in the order in which they are given.
        info: what the engine says.
    """
    seen: Counter[str] = Counter()
    for modality, item in items:
        seen[modality] += 1
        for part in item.parts:
            _check_size(f"{name}: {modality} {seen[modality]}", part, info)


def _check_size(name: str, item: PreparedItem, info: EngineInfo) -> None:
    if item.num_tokens > info.items.most_embeds:
        raise RequestError(
            f"{name} has {item.num_tokens:,} embeddings, more than the "
            f"{info.items.most_embeds:,} that the engine has room for: "
            f"{_advice(item.num_tokens, info)}, or make it {_SMALLER}"
        )
    if item.data.nbytes > MOST_ITEM_BYTES:
        raise RequestError(
            f"{name} becomes {item.data.nbytes:,} bytes, more than {MOST_ITEM_BYTES:,}: make "
            f"it {_SMALLER}"
        )


def check_spans(name: str, items: Sequence[Item], info: EngineInfo) -> None:
    """Raises RequestError if a step has no room for embeddings of an item that attend to each
    other. The arguments are those of `check_sizes`."""
    seen: Counter[str] = Counter()
    for item in items:
        seen[item.modality] += 1
        longest = max((end - begin for begin, end in item.spans), default=0)
        if 0 < info.items.longest_span < longest:
            raise RequestError(
                f"{name}: {item.modality} {seen[item.modality]} has {longest:,} embeddings that "
                f"attend to each other, and a step has room for {info.items.longest_span:,}: "
                f"{_advice(longest, info)}, or make it {_SMALLER}"
            )


def _advice(num_embeds: int, info: EngineInfo) -> str:
    """What gives an item of so many embeddings room, if it is not made smaller."""
    if num_embeds <= info.max_model_len:
        return "raise max_num_batched_tokens"
    return (
        f"raise max_model_len, which is {info.max_model_len:,}, and kv_cache_memory_bytes if the "
        "KV cache bounds it"
    )
