"""Chooses tile sizes and numbers of warps, by device and shape, from the table tiles.json.

There is no autotuning: it can run neither in Triton's interpreter nor during the capture of a
graph. Each entry of the table says whether it was measured, and on which card, or estimated from
the sizes of shared memory and register files. `tools/gpu_check` measures candidates in its parts
"tune...", and `tools/gpu_check --write-tiles` replaces the entries that are slower.

A further row of the table is a line here or in `row_configs`, `TABLE.of(name, dataclass)`, a
function that chooses by `best`, lines in tiles.json, and its candidates in one of the modules
`tools/gpu/tune...`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from shmllm_kernels.gpu.tiles import ANY, DEVICES, TileTable

DEVICE_KEYS = DEVICES
TILES_JSON = Path(__file__).with_name("tiles.json")
TABLE = TileTable.read(TILES_JSON)
"""The whole table."""

MAX_SPLITS = 32
PROGRAMS_PER_PROCESSOR = 4
VERIFY_ELEMENTS = 64 * 256
"""The most elements of the sums of a program of several tokens: 64 registers of 8 warps."""

INTERPRETED = 2
"""The number of multiprocessors of a CPU, where the interpreter runs the programs of a launch one
after another."""


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
        max_registers: the most registers of a thread, so that more programs fit on a
            multiprocessor; 0: the compiler's choice.
    """

    block_m: int
    tile: int
    num_warps: int
    num_stages: int
    max_registers: int = 0

    @property
    def launch_options(self) -> dict[str, int]:
        """The options of a launch that do not change its code's structure."""
        found = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return found | ({"maxnreg": self.max_registers} if self.max_registers else {})


# Shared memory: 227 KiB for a multiprocessor at 9.0, and 99 KiB at 8.6, 8.9 and 12.0.
# Decodes wait for memory: 4.3 TB/s times a latency of 1.5 us are 48 KiB in flight for each of 132
# multiprocessors. On an H200 many programs with few buffers have them in flight better than few
# programs with many: 256 decodes of heads of 128 take 281 us with (16, 64, 4, 3), 0.95 of the time
# of a copy, and 300 and 340 us with 5 and 7 stages. Three programs fit with its 153 registers, so
# 2,048 are 5.2 waves; four fit with 128, for which the code before the loop spills 56 bytes.
# With heads of 512 a program that holds a first tile before it waits needs 8 warps: with 4 its loop
# spills 44 to 64 times.
# Prompts read tiles from the L2 cache: at 600 TFLOP/s, programs of 128 rows read 4.7 TB/s, and
# programs of 64 rows would read more than the cache delivers.
DECODE = TABLE.of("decode", AttentionConfig)
"""Decodes, by head_dim."""
SPLIT_DECODE = TABLE.of("split_decode", AttentionConfig)
"""Decodes so few that their contexts are split, where it counts how long one program takes."""
PREFILL = TABLE.of("prefill", AttentionConfig)
"""Prompts and chunks of them, by head_dim."""


@dataclass(frozen=True, slots=True)
class CacheOrderConfig:
    """What lies side by side in a block of keys, and of values.

    Attributes:
        heads_first: the tokens of a head, 1, or the heads of a token, 0.
    """

    heads_first: int


# A program reads a head. On an H200 256 decodes read 3.7 TB/s in pieces of 128 bytes and 3.8 in
# pieces of 256, where a large dot product reads 4.5: a block of 16 tokens of a head, in one piece,
# is 2 or 4 KiB.
CACHE_ORDER = TABLE.of("cache_order", CacheOrderConfig)
"""The order in blocks of the KV cache, by head_dim."""

# Latents of 512 elements and key parts of 64: a tile of 32 keys takes 36 KiB. The sums of a program
# take 2 KiB of registers for each row, and its queries 1.1 KiB of shared memory.
LATENT = TABLE.of("latent", AttentionConfig)
"""Latent attention, by the rows of a program."""
LATENT_FLOAT32 = TABLE.of("latent_float32", AttentionConfig)


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


# Few rows wait for the weights (docs/kernels.md, "Experts in decodes"): at 9.0 a program of 16 rows
# has two tiles of 16 KiB in flight in 40 KiB of shared memory: a multiprocessor has five of them.
# Many rows are bound by the tensor cores, and their tiles are those of usual products.
PRODUCT = TABLE.of("product", ProductConfig)
"""Products with experts, by the rows of an expert."""
PRODUCT_FLOAT32 = TABLE.of("product_float32", ProductConfig)

# A run of 64 weights of 4 bits has 32 bytes: few rows read four runs of each row at once, which are
# a line of memory. Weights pass through registers, so that the tiles of many rows are smaller; at
# 8.0 even more, where some packings spill a few registers in the loop.
PACKED_PRODUCT = TABLE.of("packed_product", ProductConfig)
"""Products with packed weights, by rows; with experts, as PRODUCT."""
PACKED_PRODUCT_FLOAT32 = TABLE.of("packed_product_float32", ProductConfig)


ROWS_OF_PRODUCTS = (1, 17, 65)
"""The smallest number of rows with each entry of these tables."""
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 128
"""Their smallest and their largest number of rows of a program."""


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
    return (PRODUCT_FLOAT32 if dtype is torch.float32 else PRODUCT).best(key, rows)


def packed_config(device: torch.device, rows: int, dtype: torch.dtype) -> ProductConfig:
    """Returns the `packed_entry` of a device."""
    return packed_entry(device_key(device), rows, dtype)


def packed_entry(key: str, rows: int, dtype: torch.dtype) -> ProductConfig:
    """Returns the tile sizes of a product with packed weights.

    Args:
        key: one of DEVICE_KEYS.
        rows: the number of rows; with experts, that of an expert, were the tokens spread evenly.
        dtype: the dtype of the rows. float32 uses no tensor cores.
    """
    table = PACKED_PRODUCT_FLOAT32 if dtype is torch.float32 else PACKED_PRODUCT
    return table.best(key, rows)


def has_dependent_launches(device: torch.device) -> bool:
    """Returns whether a launch on the device can begin before the one before it has ended."""
    return device.type == "cuda" and _capability(device.index or 0)[0] >= 9


def device_key(device: torch.device) -> str:
    """Returns the key of a device in the table: its own where programs of all such devices have the
    same shared memory, otherwise "any"."""
    if device.type != "cuda":
        return ANY
    major, minor = _capability(device.index or 0)
    if major == 8 and minor:  # 99 KiB of shared memory, and 163 KiB at 8.0
        return ANY
    key = f"sm{major}0"
    return key if key in DEVICES else ANY


@lru_cache(maxsize=16)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def num_multiprocessors(device: torch.device) -> int:
    """Returns the number of a device's multiprocessors."""
    return _num_multiprocessors(device.index or 0) if device.type == "cuda" else INTERPRETED


@lru_cache(maxsize=16)
def _num_multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def has_heads_first(device: torch.device, head_dim: int) -> bool:
    """Returns whether the tokens of a head lie side by side in a block of the KV cache."""
    return bool(CACHE_ORDER.best(device_key(device), head_dim).heads_first)


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
    table = PREFILL
    if max_query_len == 1:
        table = SPLIT_DECODE if is_split else DECODE
    found, heads = table.best(key, head_dim), next_power_of_two(heads_per_kv)
    if dtype is torch.float32:
        rows, tile = max(found.block_m // 4, 16), max(found.tile // 4, 16)
        found = replace(found, block_m=rows, tile=tile, max_registers=0)
    if heads > found.block_m:
        found = replace(found, block_m=heads, max_registers=0)
    return found


def verify_config(
    device: torch.device,
    head_dim: int,
    heads_per_kv: int,
    max_tokens: int,
    dtype: torch.dtype,
    is_split: bool = False,
) -> AttentionConfig | None:
    """Returns the `verify_entry` of a device."""
    return verify_entry(device_key(device), head_dim, heads_per_kv, max_tokens, dtype, is_split)


def verify_entry(
    key: str,
    head_dim: int,
    heads_per_kv: int,
    max_tokens: int,
    dtype: torch.dtype,
    is_split: bool = False,
) -> AttentionConfig | None:
    """Returns the tile sizes of `decode_attention` for requests with several tokens; None: the
    sums of a program would not fit into its registers.

    They are those of decodes, with a row for each head of each token, and with more warps.

    Args:
        max_tokens: the largest number of tokens of a request.
        key, head_dim, heads_per_kv, dtype, is_split: see `table_entry`.
    """
    config = table_entry(key, head_dim, heads_per_kv, 1, dtype, is_split)
    block_m = max(next_power_of_two(heads_per_kv * max_tokens), 16)
    elements = block_m * max(next_power_of_two(head_dim), 16)
    if elements > VERIFY_ELEMENTS:
        return None
    num_warps = min(max(elements // 1024, config.num_warps), 8)
    tile = min(config.tile, 64)
    return replace(config, block_m=block_m, tile=tile, num_warps=num_warps, max_registers=0)


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
    table = LATENT_FLOAT32 if dtype is torch.float32 else LATENT
    return table.best(key, num_heads if max_query_len == 1 else max(table.sizes(key)))


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
    wanted = PROGRAMS_PER_PROCESSOR * num_multiprocessors(device) // max(programs, 1)
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
