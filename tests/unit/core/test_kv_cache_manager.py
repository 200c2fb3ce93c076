"""KVCacheManager: the allocation of blocks, and prefix-cache hits."""

from __future__ import annotations

import pytest

from shmllm.core.block_table import BlockTable
from shmllm.core.kv_cache_manager import KVCacheManager, PrefixHit
from shmllm.core.kv_groups import FullAttention, KVGroup, RecurrentState
from shmllm.core.request import Request
from shmllm.engine.encoder_text import item_of_text
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams

BLOCK_SIZE = 16


def make_request(tokens, salt=""):
    params = SamplingParams(max_tokens=8)
    return Request(
        0, EngineCoreRequest(0, tokens, params, cache_salt=salt), seed=0, max_model_len=1024
    )


def make_manager(num_blocks=11, enable_prefix_caching=True):
    return KVCacheManager(num_blocks, BLOCK_SIZE, enable_prefix_caching)


def compute(manager, request):
    """Admit a request and compute all its tokens. Returns the number of cached prompt tokens."""
    hit = manager.longest_hit(request)
    assert manager.admit(request, hit, request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    manager.register_full_blocks(request)
    manager.check_integrity()
    return hit.num_blocks * BLOCK_SIZE


def run(manager, tokens, salt=""):
    """Run a whole request. Returns the number of its cached tokens, and its block ids."""
    request = make_request(tokens, salt)
    cached = compute(manager, request)
    block_ids = [block.block_id for block in request.block_tables[0].blocks]
    manager.release(request)
    manager.check_integrity()
    return cached, block_ids


def cached_tokens(manager, tokens, salt=""):
    return manager.longest_hit(make_request(tokens, salt)).num_blocks * BLOCK_SIZE


PROMPT = list(range(48))


def test_a_repeated_prompt_hits_all_blocks_but_the_last():
    manager = make_manager()
    assert run(manager, PROMPT)[0] == 0
    assert run(manager, PROMPT)[0] == 32


@pytest.mark.parametrize(("length", "cached"), [(16, 0), (17, 16), (32, 16), (33, 32), (49, 48)])
def test_the_last_token_is_always_computed(length, cached):
    manager = make_manager()
    run(manager, list(range(64)))
    assert cached_tokens(manager, list(range(length))) == cached


def test_a_hit_consists_of_the_same_blocks():
    manager = make_manager()
    first = run(manager, PROMPT)[1]
    assert run(manager, [*PROMPT, 99])[1][:3] == first


@pytest.mark.parametrize(("left", "right"), [("", "a"), ("a", "b"), ("b", "")])
def test_different_salts_share_no_blocks(left, right):
    manager = make_manager()
    run(manager, PROMPT, left)
    assert cached_tokens(manager, PROMPT, right) == 0
    assert cached_tokens(manager, PROMPT, left) == 32


def test_disabled_caching_never_hits():
    manager = make_manager(enable_prefix_caching=False)
    run(manager, PROMPT)
    assert run(manager, PROMPT)[0] == 0
    assert len(manager.prefix_cache) == 0


def test_a_prefix_stays_cached_longer_than_its_continuation():
    manager = make_manager(num_blocks=5)
    run(manager, list(range(64)))
    run(manager, list(range(500, 516)))
    assert cached_tokens(manager, list(range(64))) == 48
    run(manager, list(range(600, 616)))
    assert cached_tokens(manager, list(range(64))) == 32


def test_the_least_recently_used_prefix_is_reused_first():
    manager = make_manager(num_blocks=5)
    old, recent = [1] * 17, [2] * 17
    run(manager, old)
    run(manager, recent)
    assert run(manager, old)[0] == 16
    run(manager, [3] * 33)
    assert (cached_tokens(manager, old), cached_tokens(manager, recent)) == (16, 0)


def test_hit_blocks_that_are_free_are_not_reused_for_the_same_request():
    manager = make_manager(num_blocks=5)
    prefix = run(manager, list(range(33)))[1][:2]
    # Both other blocks are needed, so the reuse of a block of the hit would be noticed.
    cached, block_ids = run(manager, list(range(64)))
    assert cached == 32
    assert block_ids[:2] == prefix
    assert len(set(block_ids)) == 4


def test_free_blocks_of_the_hit_do_not_count_as_free():
    manager = make_manager(num_blocks=5)
    run(manager, list(range(33)))
    holder = make_request([7] * 16)
    compute(manager, holder)
    request = make_request(list(range(64)))
    hit = manager.longest_hit(request)
    assert hit.num_blocks == 2
    assert not manager.admit(request, hit, 64)
    assert manager.admit(request, hit, 48)
    manager.check_integrity()


def test_a_refused_admission_changes_nothing():
    manager = make_manager(num_blocks=4)
    run(manager, list(range(17)))
    before = [block.block_id for block in manager.pool._free]
    request = make_request(list(range(80)))
    assert not manager.admit(request, manager.longest_hit(request), 80)
    assert [block.block_id for block in manager.pool._free] == before
    assert request.block_tables == []
    assert manager.num_used_blocks == 0


def test_hit_blocks_in_use_are_shared_and_need_no_free_block():
    manager = make_manager(num_blocks=5)
    first = make_request(list(range(48)))
    compute(manager, first)
    second = make_request([*range(48), 99])
    compute(manager, second)
    assert second.block_tables[0].blocks[:3] == first.block_tables[0].blocks
    assert manager.num_used_blocks == 4
    manager.release(first)
    assert manager.num_used_blocks == 4
    manager.check_integrity()


def test_the_second_of_two_equal_blocks_is_never_found():
    manager = make_manager()
    first, second = make_request(PROMPT), make_request(PROMPT)
    compute(manager, first)
    compute(manager, second)
    assert second.block_tables[0].blocks[2] is not first.block_tables[0].blocks[2]
    found = manager.longest_hit(make_request([*PROMPT, 1]))
    assert found.tables[0].blocks == first.block_tables[0].blocks


def test_a_prefix_can_be_cached_again_after_its_block_was_reused():
    manager = make_manager(num_blocks=6)
    first, second = make_request([1] * 16), make_request([1] * 16)
    compute(manager, first)
    compute(manager, second)
    manager.release(first)
    for _ in range(4):
        run(manager, [9] * 60)
    assert cached_tokens(manager, [1] * 17) == 0
    manager.release(second)
    run(manager, [1] * 16)
    assert cached_tokens(manager, [1] * 17) == 16
    manager.check_integrity()


def test_partly_computed_blocks_are_not_cached():
    manager = make_manager()
    request = make_request(PROMPT)
    manager.admit(request, manager.longest_hit(request), 48)
    request.num_computed_tokens = 31
    manager.register_full_blocks(request)
    assert cached_tokens(manager, PROMPT) == 16


def test_output_tokens_extend_the_cached_prefix():
    manager = make_manager()
    request = make_request(list(range(15)))
    compute(manager, request)
    request.append(77)
    request.append(78)
    assert manager.extend(request, 17) is not None
    request.num_computed_tokens = 17
    manager.register_full_blocks(request)
    assert cached_tokens(manager, [*range(15), 77, 5]) == 16
    assert cached_tokens(manager, [*range(15), 76, 5]) == 0


@pytest.mark.parametrize(("tokens", "appended"), [(20, 0), (32, 0), (33, 1), (49, 2)])
def test_extending_appends_only_the_missing_blocks(tokens, appended):
    manager = make_manager()
    request = make_request(list(range(20)))
    compute(manager, request)
    before = list(request.block_tables[0].blocks)
    assert sum(map(len, manager.extend(request, tokens))) == appended
    assert request.block_tables[0].blocks[:2] == before
    assert len(request.block_tables[0].blocks) == 2 + appended


def test_a_refused_extension_changes_nothing():
    manager = make_manager(num_blocks=4)
    request = make_request(list(range(20)))
    compute(manager, request)
    assert manager.extend(request, 65) is None
    assert len(request.block_tables[0].blocks) == 2
    assert manager.pool.num_free == 1


def test_a_reset_forgets_prefixes_and_keeps_the_blocks_of_requests():
    manager = make_manager()
    run(manager, [5] * 20)
    running = make_request(PROMPT)
    compute(manager, running)
    manager.reset_prefix_cache()
    assert cached_tokens(manager, PROMPT) == 0
    assert cached_tokens(manager, [5] * 20) == 0
    assert manager.num_used_blocks == 3
    manager.check_integrity()
    manager.release(running)
    assert manager.num_used_blocks == 0


def test_a_running_request_does_not_register_its_first_blocks_again_after_a_reset():
    manager = make_manager()
    running = make_request(list(range(31)))
    compute(manager, running)
    manager.reset_prefix_cache()
    running.append(31)
    running.num_computed_tokens = 32
    manager.register_full_blocks(running)
    assert cached_tokens(manager, list(range(33))) == 0
    manager.check_integrity()


def test_the_integrity_check_finds_a_hash_without_an_entry():
    manager = make_manager()
    run(manager, PROMPT)
    manager.check_integrity()
    manager.pool.allocate(1)[0].block_hash = b"stray"
    with pytest.raises(AssertionError, match="disagree"):
        manager.check_integrity()


class TestStates:
    """A state of 32 tokens is behind each second block."""

    GROUPS = KVGroup(FullAttention()), KVGroup(RecurrentState(32))

    def manager(self, num_states=9):
        return KVCacheManager(33, BLOCK_SIZE, True, self.GROUPS, num_states)

    def advance(self, manager, request, num_tokens):
        assert manager.extend(request, num_tokens) is not None
        request.num_computed_tokens = num_tokens
        manager.register_full_blocks(request)
        manager.check_integrity()

    def test_a_hit_ends_at_a_state(self):
        manager = self.manager()
        run(manager, list(range(100)))
        for length, cached in [(32, 0), (33, 32), (64, 32), (65, 64), (97, 96), (100, 96)]:
            assert cached_tokens(manager, list(range(length))) == cached

    def test_a_state_is_not_found_in_the_step_that_computes_it(self):
        manager = self.manager()
        request = make_request(list(range(100)))
        assert manager.admit(request, manager.longest_hit(request), 64)
        request.num_computed_tokens = 64
        manager.register_full_blocks(request)
        assert cached_tokens(manager, list(range(100))) == 0
        self.advance(manager, request, 90)
        assert cached_tokens(manager, list(range(100))) == 32
        self.advance(manager, request, 100)
        assert cached_tokens(manager, list(range(100))) == 64

    def test_a_state_of_a_hit_is_never_written(self):
        manager = self.manager()
        run(manager, list(range(100)))
        first, second = make_request(list(range(80))), make_request(list(range(80)))
        compute(manager, first)
        compute(manager, second)
        shared, own = (first.block_tables[1].blocks[index] for index in (1, 2))
        assert second.block_tables[1].blocks[1] is shared
        assert second.block_tables[1].blocks[2] is not own
        assert (shared.ref_count, own.ref_count) == (2, 1)

    def test_a_decode_holds_one_state_and_two_at_a_boundary(self):
        manager = self.manager()
        request = make_request(list(range(8)))
        compute(manager, request)
        for length in range(9, 120):
            request.append(7)
            self.advance(manager, request, length)
            table = request.block_tables[1]
            assert len(table.kept) == (2 if length % 32 == 1 else 1), length

    def test_states_that_nobody_can_ask_for_are_reused_first(self):
        manager = self.manager(num_states=4)
        run(manager, list(range(40)))
        for salt in "abcdef":
            run(manager, [1] * 20, salt)
            assert cached_tokens(manager, list(range(40))) == 32

    def test_no_state_is_free(self):
        manager = self.manager(num_states=3)
        first = make_request(list(range(60)))
        compute(manager, first)
        second = make_request([5] * 10)
        assert not manager.admit(second, manager.longest_hit(second), 10)
        assert manager.pool.num_free == 32 - 4
        manager.release(first)
        assert manager.admit(second, manager.longest_hit(second), 10)


class TestStatesAlone:
    """No layer has attention; a state is behind each second block."""

    def manager(self, num_states=6):
        return KVCacheManager(1, BLOCK_SIZE, True, (KVGroup(RecurrentState(32)),), num_states)

    def test_a_hit_ends_at_a_state_and_states_are_counted(self):
        manager = self.manager()
        first, second = make_request(list(range(70))), make_request(list(range(70)))
        compute(manager, first)
        assert manager.num_used_blocks == 3
        assert manager.extend(first, 71) == []  # it drops what it has passed
        assert manager.num_used_blocks == 1
        assert compute(manager, second) == 64
        assert manager.num_used_blocks == 3
        manager.release(first)
        manager.release(second)
        assert manager.num_used_blocks == 0
        assert not manager.has_used_blocks

    def test_too_few_states_admit_nothing(self):
        manager = self.manager(num_states=3)
        request = make_request(list(range(70)))
        hit = manager.longest_hit(request)
        assert not manager.admit(request, hit, 70)
        assert manager.admit(request, hit, 64)
        request.num_computed_tokens = 63
        assert manager.extend(request, 70) is not None
        manager.check_integrity()


class TestUnreadBlocks:
    """A request begins with what an encoder computes; its text is behind the longest of these."""

    BEGIN = 128
    NUM_BLOCKS = BEGIN // BLOCK_SIZE

    def ask(self, text: int, tokens):
        item = item_of_text(range(text))
        submitted = EngineCoreRequest(0, tokens, SamplingParams(max_tokens=8), items=(item,))
        return Request(0, submitted, seed=0, max_model_len=1024, num_encoded=self.BEGIN)

    @pytest.mark.parametrize(("text", "own"), [(1, 1), (16, 1), (17, 2), (127, 8), (128, 8)])
    def test_a_request_has_none_of_its_own_there(self, text, own):
        manager = make_manager(num_blocks=12)
        request = self.ask(text, [5, 6])
        compute(manager, request)
        (table,) = request.block_tables
        assert len(table.blocks) == self.NUM_BLOCKS + 1
        assert table.blocks[own : self.NUM_BLOCKS] == [manager.pool.padding] * (
            self.NUM_BLOCKS - own
        )
        assert len(table.kept) == manager.num_used_blocks == own + 1
        manager.extend(request, self.BEGIN + 33)
        assert manager.num_used_blocks == own + 3
        manager.release(request)
        manager.check_integrity()
        assert not manager.num_used_blocks

    def test_a_hit_passes_over_them(self):
        manager = make_manager(num_blocks=20)
        tokens = list(range(40))
        first = self.ask(20, tokens)
        assert compute(manager, first) == 0
        second = self.ask(20, tokens)
        assert compute(manager, second) == self.BEGIN + 32
        assert second.block_tables[0].kept[:4] == first.block_tables[0].kept[:4]
        assert manager.num_used_blocks == 2 + 3 + 1
        for request in (first, second):
            manager.release(request)
        manager.check_integrity()

    def test_a_hit_may_end_before_them(self):
        """Another text of the decoder: only what the encoder has computed is there."""
        manager = make_manager(num_blocks=20)
        compute(manager, self.ask(20, list(range(40))))
        other = self.ask(20, list(range(7, 47)))
        assert compute(manager, other) == 32
        assert manager.num_used_blocks == 2 + 3 + 3
        longer = self.ask(36, list(range(40)))
        assert compute(manager, longer) == 0

    def test_too_few_blocks_change_nothing(self):
        manager = make_manager(num_blocks=4)
        request = self.ask(33, [5])
        assert not manager.admit(request, manager.longest_hit(request), self.BEGIN + 1)
        assert not manager.num_used_blocks
        assert manager.admit(self.ask(32, [5]), PrefixHit(0, [BlockTable()]), self.BEGIN + 1)
