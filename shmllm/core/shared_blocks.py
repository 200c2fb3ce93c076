"""KV blocks outside of the pools: those that engines share.

`Lender` turns what it borrows into KVBlocks, which requests hold like their own, and collects the
engine's own blocks that are to be shared. Their contents are copied within steps, because only a
step knows when they are complete and not yet overwritten. This module must not know shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shmllm.core.block_pool import KVBlock

CACHED_PER_STEP = 32
"""How many of the blocks that were cached before the engine shared any are copied in a step. One of
a model with 135 million parameters in float32 takes 0.1 ms."""


class SharedBlocks(Protocol):
    """The blocks that engines share. Section 0 has keys and values, section 1 recurrent states.
    Their ids follow those of the engine's own blocks."""

    def refresh(self) -> None:
        """Look which other engines share blocks now."""

    def contains(self, section: int, key: bytes) -> bool:
        """Whether there is a block of this key now."""

    def borrow(self, section: int, key: bytes) -> int | None:
        """Return the id of the block of this key, whose contents do not change before `give_back`;
        None: there is none."""

    def give_back(self, section: int, block_id: int) -> None:
        """End that."""

    def reserve(self, wanted: list[tuple[int, bytes]]) -> list[int | None]:
        """Return ids of blocks to write for these sections and keys; None: no copy is needed, or
        there is no room. `publish` follows."""

    def publish(self, section: int, block_id: int) -> None:
        """Share a reserved block that has been written."""


@dataclass(slots=True)
class StepCounts:
    """How many steps were submitted, and how many of them have run. They run in their order."""

    submitted: int = 0
    run: int = 0


KEYS_AND_VALUES, STATE = 0, 1
"""The sections of a region."""


class BlockCopy(NamedTuple):
    """A block that a step copies.

    section: KEYS_AND_VALUES or STATE.
    source, target: the ids.
    """

    section: int
    source: int
    target: int


class Lender:
    """
    Args:
        shared: the blocks that engines share.
        sections: the section of each group of layers.
        is_in_place: whether requests read shared blocks where they lie. Else a step copies them
            into blocks of the engine.

    Attributes:
        steps: the steps of the engine.
    """

    def __init__(self, shared: SharedBlocks, sections: list[int], is_in_place: bool) -> None:
        self._shared, self._sections = shared, sections
        self.is_in_place = is_in_place
        self.steps = StepCounts()
        self._returning: dict[KVBlock, int] = {}
        self._lent: dict[tuple[int, bytes], KVBlock] = {}
        self._pending: dict[KVBlock, tuple[int, bytes]] = {}
        self._cached: dict[KVBlock, tuple[int, bytes]] = {}
        self._wanted: list[BlockCopy] = []
        self._loading: dict[tuple[int, int], KVBlock] = {}

    @property
    def has_pending(self) -> bool:
        """Whether blocks wait to be copied."""
        return bool(self._pending or self._cached)

    def refresh(self) -> None:
        """See `SharedBlocks.refresh`."""
        self._shared.refresh()

    def has(self, group: int, block_hash: bytes) -> bool:
        """Whether a block of a group of layers is lent, or can be."""
        key = _key(group, block_hash)
        return (group, key) in self._lent or self._shared.contains(self._sections[group], key)

    def borrow(self, group: int, block_hash: bytes) -> KVBlock | None:
        """Return the shared block with a hash; None: there is none any more. Somebody has to touch
        it and release it, or to call `append`."""
        key = _key(group, block_hash)
        block = self._lent.get((group, key))
        if block is None:
            section = self._sections[group]
            block_id = self._shared.borrow(section, key)
            if block_id is None:
                return None
            block = self._lent[group, key] = KVBlock(block_id, home=self)
            block.block_hash, block.group = block_hash, group
        return block

    def append(self, block: KVBlock) -> None:
        """No request refers to a borrowed block: give it back, as soon as the steps that were
        submitted have run. They may read it, and its owner does not wait for them."""
        self._returning.setdefault(block, self.steps.submitted)
        self.return_unread()

    def remove(self, block: KVBlock) -> None:
        """A request refers to a borrowed block."""
        self._returning.pop(block, None)

    def return_unread(self) -> None:
        """Give the blocks back to which no request refers, and which no step reads."""
        for block, submitted in [*self._returning.items()]:
            if submitted > self.steps.run:
                return  # those that follow came later
            del self._returning[block]
            assert block.block_hash is not None
            del self._lent[block.group, _key(block.group, block.block_hash)]
            self._shared.give_back(self._sections[block.group], block.block_id)

    @property
    def has_lent(self) -> bool:
        """Whether blocks are borrowed."""
        return bool(self._lent)

    def load(self, borrowed: KVBlock, own: KVBlock) -> None:
        """Let the step that is being planned copy a borrowed block, to which the caller refers,
        into one of the engine, which is cached already. The reference ends with the step."""
        self.withdraw(own)  # a region has it
        section = self._sections[borrowed.group]
        self._loading[section, borrowed.block_id] = borrowed
        self._wanted.append(BlockCopy(section, borrowed.block_id, own.block_id))

    def take_loads(self) -> list[BlockCopy]:
        """The copies that `load` has asked for."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def loaded(self, copies: Iterable[BlockCopy]) -> None:
        """The copies have been made."""
        for section, source, _ in copies:
            block = self._loading[section, source]  # two steps may copy the same block
            block.ref_count -= 1
            if not block.ref_count:
                del self._loading[section, source]
                self.append(block)

    def offer(self, block: KVBlock, group: int, block_hash: bytes) -> None:
        """Share a block of the engine whose contents are complete when the step that is being
        planned, or else the last one, has run."""
        self._pending[block] = self._sections[group], _key(group, block_hash)

    def offer_cached(self, block: KVBlock, group: int, block_hash: bytes) -> None:
        """As `offer`, for a block that has been cached for a while; this may take several steps."""
        self._cached[block] = self._sections[group], _key(group, block_hash)

    def withdraw(self, block: KVBlock) -> None:
        """The step that is being planned overwrites a block of the engine."""
        self._pending.pop(block, None)
        self._cached.pop(block, None)

    def take_saves(self) -> list[BlockCopy]:
        """The copies of blocks that were offered and not withdrawn."""
        for _ in range(min(CACHED_PER_STEP, len(self._cached))):
            block, key = self._cached.popitem()
            self._pending[block] = key
        if not self._pending:
            return []
        blocks, wanted = [*self._pending], [*self._pending.values()]
        self._pending.clear()
        ids = self._shared.reserve(wanted)
        return [
            BlockCopy(section, block.block_id, target)
            for block, (section, _), target in zip(blocks, wanted, ids, strict=True)
            if target is not None
        ]

    def saved(self, copies: Iterable[BlockCopy]) -> None:
        """The copies have been made: share them."""
        for section, _, target in copies:
            self._shared.publish(section, target)

    def forget(self) -> None:
        """Share none of the blocks that were offered: the engine computes something else now."""
        self._pending.clear()
        self._cached.clear()


def _key(group: int, block_hash: bytes) -> bytes:
    """The key of a block in shared memory: groups of layers have blocks of the same hash."""
    return block_hash[:-1] + bytes((block_hash[-1] ^ group,))
