"""Which full blocks hold which prefix.

A block's hash covers its parent's hash and its own token ids, so equal hashes mean equal
prefixes from the first token on, within one salt: tenants with different salts share
nothing. Owns hashes and the table from hash to block; knows nothing of free or used.
"""

from __future__ import annotations

from array import array
from hashlib import sha256

from shmllm.core.block_pool import KVBlock


def root_hash(cache_salt: str) -> bytes:
    """The parent of every first block."""
    return sha256(b"shmllm prefix\0" + cache_salt.encode()).digest()


def extend_block_hashes(
    hashes: list[bytes], token_ids: array[int], block_size: int, cache_salt: str
) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` lacks."""
    num_full = len(token_ids) // block_size
    if len(hashes) >= num_full:
        return
    parent = hashes[-1] if hashes else root_hash(cache_salt)
    for index in range(len(hashes), num_full):
        block_ids = token_ids[index * block_size : (index + 1) * block_size]
        parent = sha256(parent + block_ids.tobytes()).digest()
        hashes.append(parent)


class PrefixCache:
    """The table from block hash to the block that holds that prefix.

    Two requests that compute the same prefix at once fill two blocks; the first one
    registered stays in the table and the second is never found.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, KVBlock] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def longest_hit(self, hashes: list[bytes], most: int) -> list[KVBlock]:
        """The cached blocks of the longest known prefix, at most `most` of them."""
        hit = []
        for block_hash in hashes[:most]:
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
        """The block's content is about to be overwritten."""
        assert block.block_hash is not None
        del self._blocks[block.block_hash]
        block.block_hash = None

    def clear(self) -> None:
        for block in self._blocks.values():
            block.block_hash = None
        self._blocks.clear()
