"""Tables of tile sizes and numbers of warps, by device and shape.

There is no autotuning: it can run neither in Triton's interpreter nor during the capture of a
graph. The entries for decodes and for single rows at 9.0 were measured on an H200
(docs/results/gpu-h200-tiles.json). The others are estimates from the sizes of shared memory and
register files, to be replaced by measured ones (`tools/gpu_check --only tune`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

DEVICE_KEYS = ("sm90", "any")
"""The keys of the tables: compute capability 9.0, and all others from 8.0."""

MAX_SPLITS = 32
PROGRAMS_PER_PROCESSOR = 4

_INTERPRETED_PROCESSORS = 2
"""The number for a CPU, where Triton's interpreter runs a launch's programs one after another."""


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The tile sizes of paged attention.

    Attributes:
        block_m: the number of rows of a program: query tokens times the heads that share a kv
            head; a power of two, at least 16.
        tile: the number of keys in one iteration; a power of two, at least 16, independent of the
            block size.
        num_warps: the number of warps of a program.
        num_stages: the stages of the compiler's pipeline. Keys and values get (num_stages - 1) // 2
            buffers, since their addresses come from a load of the block table; with fewer than two,
            no load of a program is in flight while it computes a tile, but those of others are.
    """

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


# Shared memory: 227 KiB for a multiprocessor at 9.0, and 99 KiB at 8.6, 8.9 and 12.0.
# Decodes wait for memory: 4.3 TB/s times a latency of 1.5 us are 48 KiB in flight for each of 132
# multiprocessors. On an H200 many programs with few buffers have them in flight better than few
# programs with many: 256 decodes of heads of 128 take 281 us with (16, 64, 4, 3), 0.95 of the time
# of a copy, and 300 and 340 us with 5 and 7 stages.
# Prompts read tiles from the L2 cache: at 600 TFLOP/s, programs of 128 rows read 4.7 TB/s, and
# programs of 64 rows would read more than the cache delivers.
_DECODE = {
    # head_dim up to: config
    "sm90": {64: (16, 64, 2, 5), 128: (16, 64, 4, 3), 256: (16, 32, 4, 5), 512: (16, 16, 4, 5)},
    "any": {64: (16, 64, 4, 5), 128: (16, 32, 4, 5), 256: (16, 16, 4, 5), 512: (16, 16, 4, 5)},
}
# Decodes so few that their contexts are split: what counts is how long one program takes.
_SPLIT_DECODE = {
    "sm90": _DECODE["sm90"] | {64: (16, 64, 2, 3), 128: (16, 128, 4, 5)},
    "any": _DECODE["any"],
}
_PREFILL = {
    "sm90": {64: (128, 64, 8, 5), 128: (128, 64, 8, 5), 256: (128, 32, 8, 5), 512: (64, 16, 8, 5)},
    "any": {64: (64, 64, 4, 5), 128: (128, 32, 8, 5), 256: (64, 16, 8, 5), 512: (16, 16, 4, 5)},
}


# Latents of 512 elements and key parts of 64: a tile of 32 keys takes 36 KiB. The sums of a program
# take 2 KiB of registers for each row, and its queries 1.1 KiB of shared memory.
_LATENT = {
    # rows up to: config
    "sm90": {16: (16, 32, 4, 5), 32: (32, 32, 8, 5), 64: (64, 32, 8, 5)},
    "any": {16: (16, 16, 4, 5), 32: (32, 16, 8, 5)},
}


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """The tile sizes of a product of some rows with each expert's weights.

    Attributes:
        block_m: the number of rows of a program; a power of two, at least 16.
        block_n: the number of columns, likewise.
        block_k: the number of elements of a row in one iteration, likewise.
        num_warps: the number of warps of a program.
        num_stages: the stages of the compiler's pipeline: num_stages - 1 tiles are in flight.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# Few rows wait for the weights: a program of 16 rows has three tiles of 16 KiB in flight. Many rows
# are bound by the tensor cores, and their tiles are those of usual products.
_PRODUCT = {
    # rows of an expert up to: config
    "sm90": {16: (16, 64, 128, 4, 4), 64: (64, 128, 64, 4, 4), 128: (128, 128, 64, 8, 4)},
    "any": {16: (16, 64, 64, 4, 4), 64: (64, 64, 64, 4, 4), 128: (128, 128, 32, 8, 4)},
}
_FLOAT32_PRODUCT = {16: (16, 32, 32, 4, 3), 64: (32, 64, 32, 4, 3)}

# A run of 64 weights of 4 bits has 32 bytes: few rows read four runs of each row at once, which are
# a line of memory. Weights pass through registers, so that the tiles of many rows are smaller.
_PACKED_PRODUCT = {16: (16, 32, 256, 4, 4), 64: (64, 64, 128, 4, 3), 128: (128, 64, 64, 8, 3)}
_FLOAT32_PACKED_PRODUCT = {16: (16, 32, 64, 4, 3), 64: (32, 64, 64, 4, 3)}


@dataclass(frozen=True, slots=True)
class SingleRowConfig:
    """The tile of a program of the product of one row.

    Attributes:
        block_n: the number of columns of a program, of both halves of a gated product together; a
            power of two.
        block_k: the number of elements of a row in one iteration, likewise.
        num_warps: the number of warps of a program.
    """

    block_n: int
    block_k: int
    num_warps: int


_SINGLE_ROW = {
    # elements of a row up to: config
    2048: (4, 1024, 2), 4096: (4, 512, 4), 8192: (4, 1024, 8), 16_384: (2, 1024, 4),
}  # fmt: skip
_TALL = 65_536
_SINGLE_ROW_TALL = (4, 1024, 2)  # a matrix of at least _TALL rows

ROWS_OF_PRODUCTS = (1, 17, 65)
"""The smallest number of rows with each entry of these tables."""


def product_config(device: torch.device, rows: int, dtype: torch.dtype) -> ProductConfig:
    """Returns the `product_entry` of a device."""
    return product_entry(device_key(device), rows, dtype)


def product_entry(key: str, rows: int, dtype: torch.dtype) -> ProductConfig:
    """Returns the tile sizes of a product with experts.

    Args:
        key: one of DEVICE_KEYS.
        rows: the number of rows of an expert, were the tokens spread evenly.
        dtype: the dtype of rows and weights. float32 uses no tensor cores.
    """
    return _entry(_FLOAT32_PRODUCT if dtype is torch.float32 else _PRODUCT[key], rows)


def packed_config(rows: int, dtype: torch.dtype) -> ProductConfig:
    """Returns the tile sizes of a product with packed weights.

    Args:
        rows: the number of rows; with experts, that of an expert, were the tokens spread evenly.
        dtype: the dtype of the rows. float32 uses no tensor cores.
    """
    return _entry(_FLOAT32_PACKED_PRODUCT if dtype is torch.float32 else _PACKED_PRODUCT, rows)


def single_row_config(n: int, k: int) -> SingleRowConfig:
    """Returns the tile of the product of one row with a matrix of n rows of k elements."""
    if n >= _TALL:
        return SingleRowConfig(*_SINGLE_ROW_TALL)
    fitting = [most for most in _SINGLE_ROW if most >= k]
    return SingleRowConfig(*_SINGLE_ROW[min(fitting, default=max(_SINGLE_ROW))])


def packed_row_config() -> SingleRowConfig:
    """Returns the tile of the product of one row with a packed matrix: whole runs of 64 elements.
    It is an estimate: 64 runs of 4 bits are 2 KiB, and eight programs fit on a multiprocessor."""
    return SingleRowConfig(4, 1024, 4)


def has_dependent_launches(device: torch.device) -> bool:
    """Returns whether a launch on the device can begin before the one before it has ended."""
    return device.type == "cuda" and _capability(device.index or 0)[0] >= 9


def _entry(by_rows: dict[int, tuple[int, int, int, int, int]], rows: int) -> ProductConfig:
    fitting = [most for most in by_rows if most >= rows]
    return ProductConfig(*by_rows[min(fitting, default=max(by_rows))])


def device_key(device: torch.device) -> str:
    """Returns the key of a device in the tables; "any" if it has no entries of its own."""
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
    device: torch.device,
    head_dim: int,
    heads_per_kv: int,
    max_query_len: int,
    dtype: torch.dtype,
    is_split: bool = False,
) -> AttentionConfig:
    """Returns the `table_entry` of a device."""
    return table_entry(device_key(device), head_dim, heads_per_kv, max_query_len, dtype, is_split)


def table_entry(
    key: str,
    head_dim: int,
    heads_per_kv: int,
    max_query_len: int,
    dtype: torch.dtype,
    is_split: bool = False,
) -> AttentionConfig:
    """Returns the tile sizes of a launch whose longest query has ``max_query_len`` tokens.

    Args:
        key: one of DEVICE_KEYS.
        head_dim: the size of a head, at most 512.
        heads_per_kv: the number of query heads that share a kv head.
        max_query_len: 1 for a batch of decodes. The host must know it at capture.
        dtype: the dtype of query and cache. float32 gets smaller tiles, because it takes twice the
            memory and uses no tensor cores.
        is_split: whether contexts are split into parts.
    """
    table = _PREFILL
    if max_query_len == 1:
        table = _SPLIT_DECODE if is_split else _DECODE
    by_size = table[key]
    block_m, tile, num_warps, num_stages = by_size[
        min(size for size in by_size if size >= head_dim)
    ]
    block_m = max(block_m, next_power_of_two(heads_per_kv))
    if dtype is torch.float32:
        block_m, tile = max(block_m // 4, 16, next_power_of_two(heads_per_kv)), max(tile // 4, 16)
    return AttentionConfig(block_m, tile, num_warps, num_stages)


def latent_config(
    device: torch.device, num_heads: int, max_query_len: int, dtype: torch.dtype
) -> AttentionConfig:
    """Returns the `latent_entry` of a device."""
    return latent_entry(device_key(device), num_heads, max_query_len, dtype)


def latent_entry(
    key: str, num_heads: int, max_query_len: int, dtype: torch.dtype
) -> AttentionConfig:
    """Returns the tile sizes of a launch of latent attention.

    Args:
        key: one of DEVICE_KEYS.
        num_heads: the number of query heads.
        max_query_len: see `table_entry`.
        dtype: the dtype of queries and cache; float32 gets smaller tiles.
    """
    if dtype is torch.float32:
        return AttentionConfig(16, 16, 4, 3)
    by_rows = _LATENT[key]
    rows = num_heads if max_query_len == 1 else max(by_rows)
    return AttentionConfig(*by_rows[min((n for n in by_rows if n >= rows), default=max(by_rows))])


def num_splits(
    device: torch.device,
    config: AttentionConfig,
    num_tokens: int,
    num_requests: int,
    num_heads: int,
    num_kv_heads: int,
) -> int:
    """Returns the number of parts that attention splits each context into.

    This is the largest power of two, up to MAX_SPLITS, with which a launch has at most
    PROGRAMS_PER_PROCESSOR programs for each multiprocessor. So a launch is split if it has at most
    half as many programs. The number of programs is the smallest that a step of these sizes can
    have, because the host does not know the lengths of a captured step.

    Args:
        device: the device of the launch.
        config: the tile sizes of the launch.
        num_tokens: the number of tokens in the launch, padding included, so that a captured graph
            and a launch of the same padded size use the same number.
        num_requests: the number of requests, padding included.
        num_heads: the number of query heads.
        num_kv_heads: the number of key-value heads.
    """
    block_q = config.block_m // (num_heads // num_kv_heads)
    programs = max(-(-num_tokens // block_q), num_requests) * num_kv_heads
    known = device.type == "cuda"
    processors = _num_multiprocessors(device.index or 0) if known else _INTERPRETED_PROCESSORS
    wanted = PROGRAMS_PER_PROCESSOR * processors // max(programs, 1)
    return min(next_power_of_two(wanted + 1) // 2, MAX_SPLITS) if wanted > 1 else 1


def row_warps(dim: int) -> int:
    """Returns the number of warps of a program that keeps ``dim`` elements in registers."""
    return min(max(next_power_of_two(dim) // 512, 1), 16)


def next_power_of_two(value: int) -> int:
    """Returns the smallest power of two that is at least ``value``."""
    return 1 << max(value - 1, 0).bit_length()


def sampling_chunk(vocab_size: int) -> int:
    """Returns the number of a row's entries in one program of the sampler. A row of a usual
    vocabulary has 16 to 32 of these chunks."""
    return min(max(next_power_of_two(vocab_size) // 32, 512), 8192)
