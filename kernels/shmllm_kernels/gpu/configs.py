"""Sizes of tiles and numbers of warps, by device and shape: plain tables, no search.

Autotuning can run neither in Triton's interpreter nor while a graph is captured. Entries
are to be replaced by measured ones; those without a note are estimates from the size of
shared memory and registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

MAX_SPLITS = 32
DETERMINISTIC_SPLITS = 8
"""Splits of every decode that has to give the same bits beside any other requests."""

_SM_COUNT_UNKNOWN = 108


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """
    Attributes:
        block_m: rows of a program, query tokens times the heads that share a kv head; at
            least 16, a power of two.
        tile: keys of one iteration; at least 16, a power of two, whatever the block size.
        num_warps: of a program.
        num_stages: iterations whose loads are in flight.
    """

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


_DECODE = {
    # head_dim up to: config
    "sm90": {64: (16, 128, 4, 3), 128: (16, 64, 4, 3), 256: (16, 32, 4, 3)},
    "any": {64: (16, 64, 4, 3), 128: (16, 64, 4, 2), 256: (16, 32, 4, 2)},
}
_PREFILL = {
    "sm90": {64: (128, 64, 4, 3), 128: (128, 64, 8, 3), 256: (64, 32, 8, 2)},
    "any": {64: (64, 64, 4, 2), 128: (64, 32, 4, 2), 256: (64, 32, 8, 1)},
}


def device_key(device: torch.device) -> str:
    """The tables' name of a device, "any" where they have none of its own."""
    if device.type != "cuda":
        return "any"
    major, _ = _capability(device.index or 0)
    return "sm90" if major == 9 else "any"


@lru_cache(maxsize=16)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@lru_cache(maxsize=16)
def _num_multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def attention_config(
    device: torch.device, head_dim: int, heads_per_kv: int, max_query_len: int, dtype: torch.dtype
) -> AttentionConfig:
    """The entry for a launch whose longest query has ``max_query_len`` tokens.

    Args:
        device: where it runs.
        head_dim: at most 256.
        heads_per_kv: query heads that share a kv head.
        max_query_len: 1 for a batch of decodes. A number that the host knows at capture.
        dtype: of query and cache; float32 takes twice the room and no tensor core: small tiles.
    """
    table = _DECODE if max_query_len == 1 else _PREFILL
    by_size = table[device_key(device)]
    block_m, tile, num_warps, num_stages = by_size[
        min(size for size in by_size if size >= head_dim)
    ]
    block_m = max(block_m, next_power_of_two(heads_per_kv))
    if dtype is torch.float32:
        block_m, tile = max(block_m // 4, 16, next_power_of_two(heads_per_kv)), max(tile // 4, 16)
    return AttentionConfig(block_m, tile, num_warps, num_stages)


def num_splits(
    device: torch.device, num_requests: int, num_kv_heads: int, deterministic: bool = False
) -> int:
    """Into how many parts the context of each decode is cut: so many that two programs come to
    each multiprocessor, and a power of two.

    Args:
        num_requests: of the launch, padding included, so that a captured graph and a launch at
            its size agree.
    """
    if deterministic:
        return DETERMINISTIC_SPLITS
    known = device.type == "cuda"
    processors = _num_multiprocessors(device.index or 0) if known else _SM_COUNT_UNKNOWN
    wanted = 2 * processors // max(num_requests * num_kv_heads, 1)
    return min(next_power_of_two(wanted + 1) // 2, MAX_SPLITS) if wanted > 1 else 1


def row_warps(dim: int) -> int:
    """Warps of a program that holds one row of ``dim`` elements in registers."""
    return min(max(next_power_of_two(dim) // 512, 1), 16)


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``."""
    return 1 << max(value - 1, 0).bit_length()


def sampling_chunk(vocab_size: int) -> int:
    """Entries of a row that one program of the sampler takes: 16 to 32 of them a row."""
    return min(max(next_power_of_two(vocab_size) // 32, 512), 8192)
