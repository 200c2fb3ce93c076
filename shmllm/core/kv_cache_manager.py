"""Allocates and frees the KV blocks of requests, and finds their prefix-cache hits.

This module owns the pools of blocks, one of keys and values and one of states, and the prefix
cache. A running request has a block table for each group of layers. The tables of attention layers
have the same length. Tables only grow; blocks that the layers of a group no longer read go back to
their pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shmllm.core.block_pool import BlockPool, KVBlock
from shmllm.core.block_table import BlockTable
from shmllm.core.kv_groups import ONE_GROUP, KVGroup, most_held
from shmllm.core.lenders import Lenders
from shmllm.core.prefix_cache import PrefixCache, hash_blocks
from shmllm.core.request import Request
from shmllm.core.shared_blocks import Lender

LOOKUPS = 3
"""How often a prefix is looked up if blocks of other engines vanish meanwhile."""
NO_MORE_BLOCKS = 2**62
"""A value of `Request.num_cached_blocks` that no number of full blocks exceeds."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached blocks of a request's longest known prefix.

    Attributes:
        num_blocks: the length of the prefix, in blocks of `block_size` tokens.
        tables: the block table of each group, with the blocks that its layers still read.
        num_shared_tokens: how many tokens of the prefix only blocks of other engines have.
    """

    num_blocks: int
    tables: list[BlockTable]
    num_shared_tokens: int = 0


class KVCacheManager:
    """
    Args:
        num_blocks: the number of blocks of keys and values, including the padding block.
        block_size: the number of tokens in such a block.
        enable_prefix_caching: whether requests reuse the blocks of equal prefixes.
        groups: the groups of layers.
        num_states: the number of blocks of states, including the padding block.

    Attributes:
        lenders: who lends blocks of other engines, and takes the engine's own.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        groups: Sequence[KVGroup] = ONE_GROUP,
        num_states: int = 1,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._rules = [group.rule for group in groups]
        self._sizes = [rule.interval or block_size for rule in self._rules]
        self._shortest = self._sizes.index(min(self._sizes))
        self._has_passed_blocks = any(rule.most_kept is not None for rule in self._rules)
        self.prefix_cache = PrefixCache(self._rules, block_size)
        self.pool = BlockPool(num_blocks, on_reuse=self.prefix_cache.forget)
        self.states = BlockPool(num_states, on_reuse=self.prefix_cache.forget)
        self.lenders = Lenders()
        self._has_states = [rule.interval is not None for rule in self._rules]
        self._attention = Counter(rule for rule in self._rules if rule.interval is None)
        self._pools = [self.states if states else self.pool for states in self._has_states]

    @property
    def num_used_blocks(self) -> int:
        """The blocks of keys and values that requests hold; those of states, if no layer has
        others."""
        pool = self.states if all(self._has_states) else self.pool
        return pool.num_usable - pool.num_free

    @property
    def has_used_blocks(self) -> bool:
        """Whether a request holds a block."""
        return any(pool.num_free < pool.num_usable for pool in (self.pool, self.states))

    def longest_hit(self, request: Request) -> PrefixHit:
        """The cached blocks of the request's longest known prefix. The prefix excludes the
        request's last token, which must be computed because its logits choose the next token."""
        if self.enable_prefix_caching and request.params.reads_prefix_cache:
            hash_blocks(request, self.block_size)
            if self.lenders.current is not None:
                self.lenders.current.refresh()
            for _ in range(LOOKUPS):
                hit = self._look_up(request)
                if hit is not None:
                    return hit
        return PrefixHit(0, [BlockTable() for _ in self._rules])

    def _look_up(self, request: Request) -> PrefixHit | None:
        """As `longest_hit`; None if a block of another engine has vanished meanwhile."""
        unread = request.unread_blocks(self.block_size)
        hashes = request.block_hashes[: unread.start] + request.block_hashes[unread.stop :]
        most = (request.num_tokens - 1) // self.block_size - len(unread)
        length = self.prefix_cache.longest_hit(hashes, most)
        tables = [BlockTable() for _ in self._rules]
        for group, table in enumerate(tables):
            if length:
                first, found = self.prefix_cache.blocks(group, hashes, length)
                kept = [block for block in found if block is not None]
                table.blocks = [self._pools[group].padding] * first + kept
                table.first_kept = first
                if len(kept) < len(found):
                    self.drop(PrefixHit(0, tables))
                    return None
        if length > unread.start:
            self._leave_out(unread, tables)
            length += len(unread)
        return PrefixHit(length, tables, self._num_shared_tokens(tables))

    def _leave_out(self, unread: range, tables: Sequence[BlockTable]) -> None:
        for table in tables:
            if unread:
                table.leave_out(unread, self.pool.padding)

    def _num_shared_tokens(self, tables: Sequence[BlockTable]) -> int:
        """The number of tokens of borrowed blocks, in the group that borrowed those of most."""
        return max(
            size * self._num_borrowed(table)
            for size, table in zip(self._sizes, tables, strict=True)
        )

    def drop(self, hit: PrefixHit) -> None:
        """Give the borrowed blocks of a hit back that nobody else refers to: its request is not
        admitted."""
        lender = self.lenders.current
        if lender is None:
            return
        for table in hit.tables:
            for block in table.kept:
                if block.ref_count == 0 and block.home is lender:
                    lender.append(block)

    def num_allocated_tokens(self, request: Request) -> int:
        """For how many tokens a running request has blocks of keys and values."""
        return len(request.block_tables[0].blocks) * self._sizes[0]

    def num_growing(self, begin: int, end: int, max_step_tokens: int) -> int:
        """The number of blocks of keys and values that a request with those of `begin` tokens lacks
        for `end` tokens, if it gives back those that no token reads any more.

        Args:
            begin: the number of tokens whose blocks it has got.
            end: the number of tokens.
            max_step_tokens: the most of its tokens that a step computes until then.
        """
        num_got = -(-begin // self.block_size)
        most = (
            (most_held(rule, end, max_step_tokens, self.block_size), count)
            for rule, count in self._attention.items()
        )
        return sum(max(num_held - num_got, 0) * count for num_held, count in most)

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int, spare: int = 0) -> bool:
        """Give a request that has no blocks the blocks for its first `num_tokens` tokens.

        Args:
            request: the request.
            hit: the result of `longest_hit`.
            num_tokens: the number of tokens, including those of the hit.
            spare: the number of blocks of keys and values that have to stay free.

        Returns:
            False, without any change, if there are too few free blocks; then the hit has to be
            dropped.
        """
        assert not request.block_tables
        unread = request.unread_blocks(self.block_size)
        if hit.num_blocks > unread.start:
            unread = range(0)  # the tables of the hit have left them out
        counts = self._num_missing(hit.tables, num_tokens - len(unread) * self.block_size)
        taken = [
            pool.count_free(table.kept) + self._num_loaded(table)
            for pool, table in zip(self._pools, hit.tables, strict=True)
        ]
        if not self._are_free([a + b for a, b in zip(counts, taken, strict=True)], spare):
            return False
        for pool, table in zip(self._pools, hit.tables, strict=True):
            pool.touch(table.kept)  # of all groups, before `allocate` could reuse a free one
        request.block_tables = hit.tables
        self._load(hit.tables)
        self._allocate(hit.tables, counts)
        self._leave_out(unread, hit.tables)
        request.num_cached_blocks = hit.num_blocks
        return True

    def _num_loaded(self, table: BlockTable) -> int:
        """The number of blocks of a hit that are going to be copied."""
        if self.lenders.current is None or self.lenders.current.is_in_place:
            return 0
        return self._num_borrowed(table)

    def _num_borrowed(self, table: BlockTable) -> int:
        """The number of blocks of a hit that other engines share."""
        if self.lenders.current is None:
            return 0
        return sum(block.home is self.lenders.current for block in table.kept)

    def _load(self, tables: Sequence[BlockTable]) -> None:
        """Replace borrowed blocks by own ones, into which the step that is being planned copies
        them, unless they are read in place."""
        lender = self.lenders.current
        if lender is None or lender.is_in_place:
            return
        for group, table in enumerate(tables):
            pool = self._pools[group]
            for index in range(table.first_kept, len(table.blocks)):
                borrowed = table.blocks[index]
                if borrowed.home is lender:
                    assert borrowed.block_hash is not None
                    (own,) = pool.allocate(1)
                    self.prefix_cache.register(own, borrowed.block_hash, group)
                    lender.load(borrowed, own)
                    table.blocks[index] = own

    def can_extend(self, requests: Iterable[Request]) -> bool:
        """Whether there are free blocks for one more token of each request, even if none of them
        gives any back."""
        total = [0] * len(self._rules)
        for request in requests:
            missing = self._num_missing(request.block_tables, request.num_computed_tokens + 1)
            total = [a + b for a, b in zip(total, missing, strict=True)]
        return self._are_free(total)

    def extend(self, request: Request, num_tokens: int) -> list[list[KVBlock]] | None:
        """Append the blocks that the request's first `num_tokens` tokens still need, after freeing
        those that no token from `num_computed_tokens` on reads.

        Steps run in the order in which they are planned. A freed block may therefore be written in
        the step that is being planned, or later, and read before that.

        Returns:
            The appended blocks of each group; [] if none are needed; None, without appending any,
            if there are too few free blocks.
        """
        if self._has_passed_blocks:
            self._release_passed(request)
        tables = request.block_tables
        if num_tokens <= len(tables[self._shortest].blocks) * self._sizes[self._shortest]:
            return []  # longer blocks end where shorter ones end
        counts = self._num_missing(tables, num_tokens)
        return self._allocate(tables, counts) if self._are_free(counts) else None

    def _num_missing(self, tables: Sequence[BlockTable], num_tokens: int) -> list[int]:
        """The number of blocks of each group that its table lacks for `num_tokens` tokens."""
        return [
            max(-(-num_tokens // size) - len(table.blocks), 0)
            for size, table in zip(self._sizes, tables, strict=True)
        ]

    def _are_free(self, counts: Sequence[int], spare: int = 0) -> bool:
        """Whether so many blocks of each group are free, and others of keys and values."""
        num_states = sum(
            n for n, has_states in zip(counts, self._has_states, strict=True) if has_states
        )
        num_blocks = sum(counts) - num_states
        return num_states <= self.states.num_free and num_blocks + spare <= self.pool.num_free

    def _allocate(self, tables: Sequence[BlockTable], counts: Sequence[int]) -> list[list[KVBlock]]:
        """Append so many new blocks to each table, and return them."""
        appended = [pool.allocate(n) for pool, n in zip(self._pools, counts, strict=True)]
        for table, blocks in zip(tables, appended, strict=True):
            table.blocks += blocks
        return appended

    def _release_passed(self, request: Request) -> None:
        for group, table in enumerate(request.block_tables):
            pool = self._pools[group]
            first = self._rules[group].first_kept(request.num_computed_tokens) // self._sizes[group]
            if first > table.first_kept:
                passed = slice(table.first_kept, min(first, len(table.blocks)))
                if self._has_states[group]:
                    self._register(request, group, passed.start, passed.stop)
                pool.release(table.blocks[passed])
                table.blocks[passed] = [pool.padding] * (passed.stop - passed.start)
                table.first_kept = passed.stop

    def register_full_blocks(self, request: Request) -> None:
        """Add the request's full blocks of keys and values to the prefix cache.

        A block counts as full as soon as a step that computes its last token is planned. Requests
        that are planned later may read the block in a later step or in the same step, because
        each layer writes all keys and values before it reads any. A block is not registered
        before its last token is known, because the block's hash depends on that token.

        A state must have been written by an earlier step than the one that reads it. It is
        registered when its request no longer needs it.
        """
        if not self.enable_prefix_caching:
            return
        if request.num_computed_tokens // self.block_size <= request.num_cached_blocks:
            return
        num_full = self._num_known(request) // self.block_size
        for group in range(len(self._rules)):
            if not self._has_states[group]:
                self._register(request, group, request.num_cached_blocks, num_full)
        request.num_cached_blocks = num_full

    def _num_known(self, request: Request) -> int:
        """The number of computed tokens whose values are known."""
        return min(request.num_computed_tokens, request.num_tokens)

    def _register(self, request: Request, group: int, first: int, end: int) -> None:
        """Add the blocks from `first` to `end` that the request still has and whose tokens are
        known."""
        if not self.enable_prefix_caching or request.num_cached_blocks == NO_MORE_BLOCKS:
            return
        size, table = self._sizes[group], request.block_tables[group]
        hash_blocks(request, self.block_size)
        for index in range(
            max(first, table.first_kept), min(end, self._num_known(request) // size)
        ):
            block_hash = request.block_hashes[(index + 1) * size // self.block_size - 1]
            if table.has(index):
                self.prefix_cache.register(table.blocks[index], block_hash, group)

    def release(self, request: Request) -> None:
        """Free all blocks of the request. The last block is reused first, so a prefix stays
        cached longer than its continuations."""
        tables = request.block_tables
        self.pool.release(
            table.blocks[index]
            for index in reversed(range(max(len(table.blocks) for table in tables)))
            for table, has_states in zip(tables, self._has_states, strict=True)
            if not has_states and table.has(index)
        )
        for group, table in enumerate(tables):
            if self._has_states[group]:
                self._release_states(request, group, table)
        request.block_tables = []
        request.num_cached_blocks = 0

    def _release_states(self, request: Request, group: int, table: BlockTable) -> None:
        self._register(request, group, table.first_kept, len(table.blocks))
        for block in reversed(table.kept):
            if block.block_hash is None and block.ref_count == 1:
                self.states.discard(block)  # nobody can ask for it: cached states stay longer
            else:
                self.states.release([block])

    @property
    def has_states(self) -> bool:
        """Whether layers have recurrent states."""
        return any(self._has_states)

    def state_blocks(self, request: Request) -> list[KVBlock]:
        """The blocks, of each group of states, with the state after the request's first
        `num_computed_tokens` tokens, which are at least one."""
        last = request.num_computed_tokens - 1
        return [
            table.blocks[last // size]
            for table, size, has_states in zip(
                request.block_tables, self._sizes, self._has_states, strict=True
            )
            if has_states
        ]

    def spare_states(self) -> list[KVBlock]:
        """Allocate a block for each group of states, outside of any table; [] unless as many stay
        free: a request that is alone needs no more for its next tokens."""
        count = sum(self._has_states)
        return self.states.allocate(count) if self.states.num_free >= 2 * count else []

    def share(self, lender: Lender | None) -> None:
        """Use the blocks that other engines share, and share the own ones, from now on; None ends
        that. Running requests keep the blocks that they have borrowed.

        No submitted step may have copies to make: see `Lenders.step_run`."""
        self.lenders.use(lender)
        self.prefix_cache.share(lender)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Running requests keep their blocks."""
        self.prefix_cache.clear()

    def stop_registering(self, request: Request) -> None:
        """Add no more blocks of this request to the prefix cache, until it is preempted."""
        request.num_cached_blocks = NO_MORE_BLOCKS

    def check_integrity(self) -> None:
        """Raise AssertionError if the pools and the prefix cache are inconsistent."""
        hashed = 0
        for pool in (self.pool, self.states):
            pool.check_integrity()
            hashed += sum(block.block_hash is not None for block in pool.blocks)
        assert hashed == len(self.prefix_cache), "a cached block and the tables disagree"
