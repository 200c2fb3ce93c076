"""What a model with compressed attention keeps beside the keys of its tokens. This module must not
import torch."""

from __future__ import annotations

from shmllm.models.compressed_specs import CompressedAttentionSpec
from shmllm.models.config import ModelConfig
from shmllm.models.kv_heads import KVHeads
from shmllm.models.rope_config import RopeConfig


def layer_entries(config: ModelConfig) -> tuple[KVHeads | None, ...]:
    """Returns what an entry of each layer has, see `CompressedAttentionSpec`; None: it has no
    entries; empty: no layer has any."""
    every = tuple(
        next((e.entries for e in layer.mixers if isinstance(e, CompressedAttentionSpec)), None)
        for layer in config.loaded_layers
    )
    return every if any(every) else ()


def stored_kv(config: ModelConfig) -> tuple[KVHeads | None, ...]:
    """Returns what the KV cache has: `ModelConfig.layer_kv`, and behind it entries."""
    return config.layer_kv + layer_entries(config)


def entry_ropes(config: ModelConfig) -> tuple[tuple[RopeConfig, int], ...]:
    """Returns the different rotations of entries, each with the number of tokens of one."""
    every = ((each.rope, each.compression) for each in config.compressed_attentions)
    return tuple(dict.fromkeys((rope, made.rate) for rope, made in every if made is not None))
