"""BlockPool and FreeBlockQueue: the order of reuse, reference counts, and links."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmllm.core.block_pool import BlockPool, FreeBlockQueue, KVBlock


def ids(blocks):
    return [block.block_id for block in blocks]


@pytest.fixture
def pool():
    return BlockPool(6, on_reuse=lambda block: None)


@pytest.fixture
def queued():
    """A queue without blocks that nobody has used, and the four blocks in it."""
    blocks = [KVBlock(i) for i in range(4)]
    queue = FreeBlockQueue(0, make=lambda: pytest.fail("there is no unused block"))
    for block in blocks:
        queue.append(block)
    return queue, blocks


def test_the_padding_block_is_never_allocated(pool):
    assert pool.num_usable == 5
    assert sorted(ids(pool.allocate(5))) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0


def test_allocating_more_blocks_than_are_free_raises(pool):
    with pytest.raises(IndexError):
        pool.allocate(6)


def hashed(blocks):
    """Give blocks hashes, as the prefix cache does."""
    for block in blocks:
        block.block_hash = bytes([block.block_id])
    return blocks


def test_blocks_released_first_are_reused_first(pool):
    blocks = hashed(pool.allocate(5))
    pool.release([blocks[3], blocks[0], blocks[4]])
    assert ids(pool.allocate(3)) == [4, 1, 5]


def test_released_blocks_are_reused_after_unused_ones(pool):
    first = hashed(pool.allocate(2))
    pool.release(first)
    assert ids(pool.allocate(5)) == [3, 4, 5, 1, 2]


def test_a_block_has_no_object_before_it_is_used():
    pool = BlockPool(10**9, on_reuse=lambda block: None)
    pool.release(hashed(pool.allocate(2)))
    assert ids(pool.allocate(2)) == [3, 4]
    assert len(pool.blocks) == 5
    assert pool.num_free == pool.num_usable - 2 == 10**9 - 3
    pool.check_integrity()


def test_blocks_without_a_hash_are_reused_before_all_others(pool):
    blocks = pool.allocate(4)
    hashed(blocks[:2])
    pool.release(blocks)
    assert ids(pool.allocate(5)) == [4, 3, 5, 1, 2]


def test_a_shared_block_is_freed_by_its_last_user(pool):
    (block,) = pool.allocate(1)
    pool.touch([block])
    pool.release([block])
    assert pool.num_free == 4
    pool.release([block])
    assert pool.num_free == 5


def test_touching_a_free_block_removes_it_from_the_queue(pool):
    blocks = hashed(pool.allocate(3))
    pool.release(blocks)
    pool.touch([blocks[1]])
    assert ids(pool.allocate(4)) == [4, 5, 1, 3]


def test_only_blocks_with_a_hash_are_reported_before_reuse():
    reported = []
    pool = BlockPool(4, on_reuse=lambda block: reported.append((block.block_id, block.ref_count)))
    blocks = pool.allocate(3)
    blocks[1].block_hash = b"x"
    pool.release(blocks)
    pool.allocate(3)
    assert reported == [(2, 0)]


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: setattr(pool.blocks[2], "ref_count", 1),
        lambda pool: setattr(pool.blocks[2], "ref_count", -1),
        lambda pool: setattr(pool.allocate(1)[0], "ref_count", 0),
        lambda pool: pool._free.append(pool.blocks[0]),
        lambda pool: pool.blocks.pop(),
    ],
    ids=["referenced but free", "negative", "neither", "padding", "missing"],
)
def test_the_integrity_check_finds_damage(pool, damage):
    pool.release(pool.allocate(3))
    pool.check_integrity()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity()


@pytest.mark.parametrize("index", [0, 1, 3], ids=["first", "middle", "last"])
def test_any_block_can_be_removed_from_the_queue(queued, index):
    queue, blocks = queued
    queue.remove(blocks[index])
    assert ids(queue) == [i for i in range(4) if i != index]
    assert len(queue) == 3


def test_a_removed_block_is_appended_at_the_end(queued):
    queue, blocks = queued
    queue.remove(blocks[1])
    queue.append(blocks[1])
    assert ids(queue) == [0, 2, 3, 1]


def test_removing_a_block_twice_raises(queued):
    queue, blocks = queued
    queue.remove(blocks[1])
    with pytest.raises(AssertionError, match="not in the queue"):
        queue.remove(blocks[1])
    assert len(queue) == 3


def test_an_empty_queue_raises_and_can_be_refilled(queued):
    queue, blocks = queued
    assert [queue.pop_first() for _ in blocks] == blocks
    with pytest.raises(IndexError):
        queue.pop_first()
    queue.append(blocks[2])
    assert queue.pop_first() is blocks[2]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "share", "hash", "drop"]), st.integers(0, 20))))
def test_the_pool_agrees_with_a_model_made_of_lists(operations):
    pool = BlockPool(7, on_reuse=lambda block: setattr(block, "block_hash", None))
    free, references = list(range(1, 7)), []
    for operation, choice in operations:
        if operation == "take":
            count = choice % (len(free) + 1)
            assert ids(pool.allocate(count)) == free[:count]
            references += free[:count]
            del free[:count]
        elif operation == "share" and len(pool.blocks) > 1:
            block_id = choice % (len(pool.blocks) - 1) + 1
            pool.touch([pool.blocks[block_id]])
            references.append(block_id)
            free = [i for i in free if i != block_id]
        elif operation == "hash" and references:
            hashed([pool.blocks[references[choice % len(references)]]])
        elif references:
            block_id = references.pop(choice % len(references))
            pool.release([pool.blocks[block_id]])
            if block_id not in references:
                is_hashed = pool.blocks[block_id].block_hash is not None
                free.insert(len(free) if is_hashed else 0, block_id)
        pool.check_integrity()
        assert pool.num_free == len(free)
    assert ids(pool.allocate(len(free))) == free
