"""Block hashes and the table from hash to block."""

from __future__ import annotations

import random
from array import array
from collections import Counter

import pytest
from support.variants import slow

from shmllm.core.block_pool import KVBlock
from shmllm.core.kv_groups import ChunkedLocal, FullAttention, RecurrentState, SlidingWindow
from shmllm.core.prefix_cache import PrefixCache, extend_block_hashes
from shmllm.params.items import Item


def hashes_of(token_ids, block_size=4, salt=""):
    hashes = []
    extend_block_hashes(hashes, array("i", token_ids), block_size, salt)
    return hashes


@pytest.mark.parametrize(("length", "full"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (13, 3)])
def test_only_full_blocks_have_a_hash(length, full):
    assert len(hashes_of(range(length))) == full


def test_a_hash_does_not_depend_on_later_tokens():
    assert hashes_of([1, 2, 3, 4, 5]) == hashes_of([1, 2, 3, 4, 9])


def test_equal_tokens_after_another_parent_have_another_hash():
    left, right = hashes_of([1, 2, 3, 4, 7, 7, 7, 7]), hashes_of([1, 2, 3, 5, 7, 7, 7, 7])
    assert left[1] != right[1]


def test_equal_blocks_of_one_prompt_have_different_hashes():
    assert len(set(hashes_of([7] * 12))) == 3


@pytest.mark.parametrize(("left", "right"), [("", "a"), ("a", "b"), ("a", "a\0")])
def test_different_salts_share_no_hash(left, right):
    tokens = range(12)
    assert not set(hashes_of(tokens, salt=left)) & set(hashes_of(tokens, salt=right))


def test_the_bytes_of_token_ids_are_not_merged():
    assert hashes_of([1, 256, 0, 0]) != hashes_of([257, 0, 0, 0])


def test_a_hash_says_whether_an_item_begins_right_behind_the_block():
    """The token before it may have another place; which item it is does not matter."""

    def hashes_with(*starts, identity=b"a"):
        items = [Item(identity * 32, ((at, at + 2),), (1, 1, 2)) for at in starts]
        found = []
        extend_block_hashes(found, array("i", range(12)), 4, "", items)
        return found

    assert hashes_with(4)[0] == hashes_with(4, identity=b"b")[0] != hashes_of(range(12))[0]
    assert hashes_with(5)[0] == hashes_of(range(12))[0]
    assert hashes_with(2, 8)[1] != hashes_with(2)[1] != hashes_of(range(12))[1]
    assert hashes_with(12)[2] != hashes_of(range(12))[2]


def test_extending_gives_the_same_as_hashing_at_once():
    grown = []
    for length in range(14):
        extend_block_hashes(grown, array("i", range(length)), 4, "salt")
    assert grown == hashes_of(range(13), salt="salt")


def test_extending_keeps_existing_hashes():
    hashes = hashes_of(range(8))
    extend_block_hashes(hashes, array("i", range(4)), 4, "")
    assert hashes == hashes_of(range(8))


@pytest.fixture
def filled():
    hashes, cache = hashes_of(range(12)), PrefixCache([FullAttention()], 4)
    blocks = [KVBlock(i) for i in (1, 2, 3)]
    for block, block_hash in zip(blocks, hashes, strict=True):
        cache.register(block, block_hash, 0)
    return cache, blocks, hashes


def hit(cache, hashes, most):
    return cache.blocks(0, hashes, cache.longest_hit(hashes, most))[1]


@pytest.mark.parametrize("most", [0, 1, 2, 3, 9])
def test_a_hit_is_cut_at_the_limit(filled, most):
    cache, blocks, hashes = filled
    assert hit(cache, hashes, most) == blocks[:most]


def test_a_hit_ends_where_the_prefix_differs(filled):
    cache, blocks, _ = filled
    assert hit(cache, hashes_of([0, 1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11]), 3) == blocks[:1]


def test_a_missing_block_ends_the_hit(filled):
    cache, blocks, hashes = filled
    cache.forget(blocks[1])
    assert hit(cache, hashes, 3) == blocks[:1]


def test_a_forgotten_block_has_no_hash(filled):
    cache, blocks, _ = filled
    cache.forget(blocks[2])
    assert blocks[2].block_hash is None
    assert len(cache) == 2


def test_a_duplicate_is_not_registered(filled):
    cache, blocks, hashes = filled
    duplicate = KVBlock(9)
    cache.register(duplicate, hashes[0], 0)
    assert duplicate.block_hash is None
    assert hit(cache, hashes, 1) == blocks[:1]


def test_clearing_forgets_every_block(filled):
    cache, blocks, hashes = filled
    cache.clear()
    assert len(cache) == 0
    assert hit(cache, hashes, 3) == []
    assert [block.block_hash for block in blocks] == [None] * 3


def random_rule(rng):
    kind = rng.randrange(4)
    if kind == 0:
        return FullAttention()
    if kind == 1:
        return SlidingWindow(rng.randrange(1, 40))
    return ChunkedLocal(rng.choice([3, 4, 8, 16])) if kind == 2 else RecurrentState(8)


def longest_by_definition(rules, registered, block_size, most):
    """Try all lengths: a prefix is a hit if each group has every block with a position that a
    token behind the prefix reads."""
    for length in range(most, -1, -1):
        end = length * block_size
        read = [range(rule.first_kept(end), end) for rule in rules]
        if all({p // block_size for p in read[g]} <= registered[g] for g in range(len(rules))) and (
            end % 8 == 0 or not any(isinstance(rule, RecurrentState) for rule in rules)
        ):
            return length
    raise AssertionError("the empty prefix is always a hit")


@pytest.mark.parametrize("states", [3_000, slow(100_000)])
def test_a_hit_is_the_longest_by_definition(states):
    rng = random.Random(20)
    hashes = hashes_of(range(24 * 8), 8)
    lengths = Counter()
    for _ in range(states):
        rules, size = [random_rule(rng) for _ in range(rng.randrange(1, 5))], rng.choice([1, 4, 8])
        cache, most = PrefixCache(rules, size), rng.randrange(1, 25)
        density = rng.choice([0.3, 0.7, 0.9, 0.98])
        registered = [{i for i in range(24) if rng.random() < density} for _ in rules]
        for group, indices in enumerate(registered):
            for index in indices:
                cache.register(KVBlock(0), hashes[index], group)
        expected = longest_by_definition(rules, registered, size, most)
        assert cache.longest_hit(hashes, most) == expected, (rules, size, registered, most)
        lengths[expected] += 1
    assert len(lengths) == 25, "the states do not vary"
