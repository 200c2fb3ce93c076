"""Layers that store no keys and values and read those of an earlier one, and what the others store.

This module owns which the former are, and which of them a model may have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shmllm.errors import EngineStartError
from shmllm.models.kv_heads import KVHeads
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import Encoded


def sources_of(layers: Sequence[LayerSpec]) -> dict[int, int]:
    """For each layer that reads the keys and values of another one, that layer."""
    return {
        index: layer.attention.source
        for index, layer in enumerate(layers)
        if layer.attention is not None and layer.attention.source is not None
    }


def check_sources(architecture: str, layers: Sequence[LayerSpec]) -> None:
    """Check that each of them can read what its source stores.

    Raises:
        EngineStartError: one cannot; the message says which, and why.
    """
    sources = sources_of(layers)
    for index, source in sources.items():
        if (problem := _problem_of(layers, index, sources)) is not None:
            raise EngineStartError(
                f"{architecture}: layer {index} has no keys and values and reads those of "
                f"layer {source}, which {problem}"
            )


def _problem_of(layers: Sequence[LayerSpec], index: int, sources: dict[int, int]) -> str | None:
    """Why a layer cannot read the keys and values of its source."""
    source = sources[index]
    own, other = layers[index].attention, layers[source].attention
    assert own is not None, "it has a source"
    if source >= index or other is None or source in sources:
        return "is no earlier layer with attention of its own"
    reads_same = own.window == other.window or isinstance(own.ahead, Encoded)
    is_same = own.kv == other.kv and reads_same
    return None if is_same else "has other heads or another window"


def of_one_size(stored: Iterable[KVHeads | None]) -> tuple[KVHeads | None, ...]:
    """Returns what layers store of a token, with room for the key of an indexer beside keys and
    values in all of them if some have it: so they are one group, with one block table."""
    every = tuple(stored)
    beside = [heads.index_dim for heads in every if heads is not None and heads.value_dim]
    room = max(beside, default=0)
    return tuple(
        replace(heads, index_dim=room) if heads is not None and heads.value_dim else heads
        for heads in every
    )
