"""The prefix cache: hashes of full KV blocks, and the table from hash to block.

The hash of a block covers the hash of its parent block and its own token ids. Equal hashes
therefore mean that all tokens from the first one on, and the cache salt, are equal; requests with
different salts share no block. This module must not know which blocks are free.
"""

from __future__ import annotations

from array import array
from hashlib import sha256

from shmllm.core.block_pool import KVBlock


def _root_hash(cache_salt: str) -> bytes:
    """The hash that stands for the parent of every request's first block."""
    return sha256(b"shmllm prefix\0" + cache_salt.encode()).digest()


def extend_block_hashes(
    hashes: list[bytes], token_ids: array[int], block_size: int, cache_salt: str
) -> None:
    """Append to `hashes` the missing hashes of the full blocks of `token_ids`."""
    num_full = len(token_ids) // block_size
    if len(hashes) >= num_full:
        return
    parent = hashes[-1] if hashes else _root_hash(cache_salt)
    for index in range(len(hashes), num_full):
        block_ids = token_ids[index * block_size : (index + 1) * block_size]
        parent = sha256(parent + block_ids.tobytes()).digest()
        hashes.append(parent)


class PrefixCache:
    """The table from block hash to block.

    If two requests compute the same prefix at the same time, each fills its own blocks. The table
    keeps the block that was registered first.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, KVBlock] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def longest_hit(self, hashes: list[bytes], max_blocks: int) -> list[KVBlock]:
        """The cached blocks of the longest known prefix, at most `max_blocks`."""
        hit = []
        for block_hash in hashes[:max_blocks]:
            block = self._blocks.get(block_hash)
            if block is None:
                break
            hit.append(block)
        return hit

    def register(self, block: KVBlock, block_hash: bytes) -> None:
        if block_hash not in self._blocks:
            block.block_hash = block_hash
            self._blocks[block_hash] = block

    def forget(self, block: KVBlock) -> None:
        """Remove a block, because its contents will be overwritten."""
        assert block.block_hash is not None
        del self._blocks[block.block_hash]
        block.block_hash = None

    def clear(self) -> None:
        for block in self._blocks.values():
            block.block_hash = None
        self._blocks.clear()
