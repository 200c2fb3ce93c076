"""Groups of layers: what their rules keep, the division of layers, and the blocks of a request."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.kv_groups import (
    ChunkedLocal,
    FullAttention,
    RecurrentState,
    SlidingWindow,
    buffers_per_block,
    group_layers,
    most_blocks,
    most_states,
)
from shmllm.core.request import Request
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams

FULL = FullAttention()


def read_by(rule, position):
    """The positions before `position` that a token there reads, by the definition of each rule."""
    before = range(position)
    if isinstance(rule, SlidingWindow):
        return [p for p in before if position - p < rule.window]
    if isinstance(rule, ChunkedLocal):
        return [p for p in before if p // rule.size == position // rule.size]
    return list(before[-1:]) if isinstance(rule, RecurrentState) else list(before)


RULES = [
    FULL,
    *map(SlidingWindow, (1, 2, 7, 16)),
    *map(ChunkedLocal, (1, 4, 10)),
    RecurrentState(8),
]


RULES_OF_LAYERS = [*((rule,) for rule in RULES), *((rule, RULES[-1]) for rule in RULES[:-1])]
"""Those of layers with keys and values, with a state, or with both."""


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_keeps_what_tokens_still_read(rule):
    for length in range(50):
        wanted = [p for later in range(length, 100) for p in read_by(rule, later) if p < length]
        assert rule.first_kept(length) == min(wanted, default=length)
        if rule.most_kept is not None:
            assert length - rule.first_kept(length) <= rule.most_kept


def groups_of(rules, layer_bytes=None):
    """The groups of layers with one rule each, or with none."""
    return group_layers([() if rule is None else (rule,) for rule in rules], layer_bytes)


def counts(*rules):
    return [(group.rule, len(group.layers)) for group in groups_of(rules)]


def test_a_group_has_as_many_layers_as_the_rarest_rule():
    window = SlidingWindow(1024)
    gemma = [FULL if (layer + 1) % 6 == 0 else window for layer in range(62)]
    assert counts(*gemma) == [(FULL, 10), *[(window, 10)] * 5, (window, 2)]
    groups = groups_of(gemma)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(62))
    assert all(gemma[layer] == group.rule for group in groups for layer in group.layers)
    assert buffers_per_block(groups) == 10


def test_rules_of_similar_numbers_have_one_group_each():
    window = SlidingWindow(128)
    assert counts(*[window, FULL] * 12) == [(FULL, 12), (window, 12)]
    assert counts(*[window] * 3, FULL, FULL) == [(FULL, 2), (window, 3)]
    assert counts(*[window] * 4, FULL, FULL) == [(FULL, 2), (window, 2), (window, 2)]
    assert counts(window, window) == [(window, 2)]


def blocks_held(groups, num_tokens, chunk, block_size):
    """Compute a request in chunks, then token by token. Returns the most blocks and the most states
    that it held."""
    num_blocks = 1 + len(groups) * -(-num_tokens // block_size)
    manager = KVCacheManager(num_blocks, block_size, True, groups, num_blocks)

    def held():
        return tuple(pool.num_usable - pool.num_free for pool in (manager.pool, manager.states))

    half = max(num_tokens // 2, 1)
    params = SamplingParams(max_tokens=num_tokens - half + 1)
    submitted = EngineCoreRequest(0, [1] * half, params)
    request = Request(0, submitted, seed=0, max_model_len=num_tokens + 1)
    assert manager.admit(request, manager.longest_hit(request), min(chunk, half))
    request.num_computed_tokens = min(chunk, half)
    samples = [held()]
    while request.num_computed_tokens < num_tokens:
        start = request.num_computed_tokens
        if start == request.num_tokens:
            request.append(1)
        end = min(start + chunk, request.num_tokens)
        assert manager.extend(request, end) is not None
        request.num_computed_tokens = end
        manager.register_full_blocks(request)
        samples.append(held())
    manager.release(request)
    manager.check_integrity()
    assert not manager.has_used_blocks
    return tuple(map(max, zip(*samples, strict=True)))


@settings(max_examples=150, deadline=None)
@given(
    rules=st.lists(st.sampled_from(RULES_OF_LAYERS), min_size=1, max_size=5),
    num_tokens=st.integers(1, 120),
    chunk=st.integers(1, 40),
    block_size=st.sampled_from([1, 4, 8]),
)
def test_a_request_never_holds_more_than_the_formula_says(rules, num_tokens, chunk, block_size):
    groups = group_layers(rules)
    held, states_held = blocks_held(groups, num_tokens, chunk, block_size)
    limit = most_blocks(groups, num_tokens, chunk, block_size)
    assert held <= limit
    assert states_held <= most_states(groups, num_tokens, chunk)
    assert limit <= len(groups) * -(-num_tokens // block_size)
    assert limit <= most_blocks(groups, num_tokens + 1, chunk, block_size)


def test_states_are_a_group_of_their_own_behind_the_others():
    state, window = RecurrentState(512), SlidingWindow(128)
    assert counts(*[state, state, state, FULL] * 6) == [(FULL, 6), (state, 18)]
    assert counts(*[state, window, FULL] * 2) == [(FULL, 2), (window, 2), (state, 2)]
    assert buffers_per_block(groups_of([state, state, FULL])) == 1
    assert counts(state, state) == [(state, 2)]


def test_a_layer_with_keys_and_values_beside_a_state_is_in_both_groups():
    state, window = RecurrentState(512), SlidingWindow(128)
    groups = group_layers([(FULL, state), (window, state), (state,), ()], [1, 1, 0, 0])
    layers = [(group.rule, group.layers) for group in groups]
    assert layers == [(FULL, (0,)), (window, (1,)), (state, (0, 1, 2))]
    assert buffers_per_block(groups) == 1


def test_layers_with_smaller_heads_share_a_buffer():
    window = SlidingWindow(64)
    rules = [window, window, FULL, FULL, window, FULL, None]
    groups = groups_of(rules, [100, 100, 50, 50, 100, 30, 0])
    layers = [(group.layers, group.per_buffer, group.num_buffers) for group in groups]
    assert layers == [((2, 3), 2, 1), ((5,), 3, 1), ((0,), 1, 1), ((1,), 1, 1), ((4,), 1, 1)]
    assert buffers_per_block(groups) == 1


def test_layers_that_read_slots_of_the_one_before_are_in_its_group():
    """As those of GLM-5 beside one layer of a model that drafts."""
    groups = group_layers([(FULL,)] * 8, [60] * 7 + [40], followers={1, 2, 4, 6})
    assert [group.layers for group in groups] == [(0, 1, 2), (3, 4), (5, 6), (7,)]
    groups = group_layers([(FULL,)] * 8, [60] * 7 + [20], followers={1, 4})
    assert [group.layers for group in groups] == [(0, 1), (2,), (3, 4), (5, 6), (7,)]
    groups = group_layers([(FULL,)] * 5, [30] * 4 + [60], followers={1, 2})
    assert [(group.layers, group.per_buffer) for group in groups] == [((0, 1, 2, 3), 2), ((4,), 1)]


def test_a_long_request_of_a_gemma_3_27b_needs_a_fifth_of_the_memory():
    """62 layers, of which every sixth is full, and 131,072 tokens in chunks of 2,048."""
    window = SlidingWindow(1024)
    rules = [FULL if (layer + 1) % 6 == 0 else window for layer in range(62)]
    groups = groups_of(rules)
    held = blocks_held(groups, 131_072, 2048, 16)[0] * buffers_per_block(groups)
    of_one_group = 131_072 // 16 * 62
    assert held * 5 < of_one_group
