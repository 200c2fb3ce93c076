"""The choice of an engine: the formula against a plain model of it, affinity, bounds, deaths."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmllm.client.routing import (
    COMPLETION_TOKENS,
    UNCACHED_WEIGHT,
    Placement,
    Router,
    SentBlocks,
    chain_hashes,
)

SIZE = 4
MANY = 10_000


class PlainRouter:
    """The formula, word for word, with the prompts themselves in place of hashes."""

    def __init__(self, num_engines: int) -> None:
        self.prompts: list[set[tuple[int, ...]]] = [set() for _ in range(num_engines)]
        self.in_flight: list[list[Placement]] = [[] for _ in range(num_engines)]

    def cached(self, engine: int, prompt: tuple[int, ...]) -> int:
        length = 0
        while length + SIZE < len(prompt) and prompt[: length + SIZE] in self.prompts[engine]:
            length += SIZE
        return length

    def queued(self, engine: int) -> int:
        return sum(
            each.num_prompt_tokens + COMPLETION_TOKENS * each.num_completions
            for each in self.in_flight[engine]
        )

    def order(self, engine: int, prompt: tuple[int, ...]) -> tuple[int, int, int]:
        missing = len(prompt) - self.cached(engine, prompt)
        cost = self.queued(engine) + UNCACHED_WEIGHT * missing
        return cost, len(self.prompts[engine]), engine

    def send(self, placement: Placement, prompt: tuple[int, ...]) -> None:
        self.in_flight[placement.engine].append(placement)
        ends = range(SIZE, len(prompt) + 1, SIZE)
        self.prompts[placement.engine].update(prompt[:end] for end in ends)


@given(st.data())
def test_every_choice_is_the_one_of_the_plain_formula(data: st.DataObject) -> None:
    num_engines = data.draw(st.integers(1, 4))
    router, plain = Router([MANY] * num_engines, SIZE), PlainRouter(num_engines)
    actions = st.sampled_from(["choose", "choose", "choose", "begun", "ended", "forget", "clear"])
    for action in data.draw(st.lists(actions, max_size=30)):
        engine = data.draw(st.integers(0, num_engines - 1))
        placed = plain.in_flight[engine]
        if action == "choose":
            prompt = tuple(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=14)))
            alive = sorted(data.draw(st.sets(st.integers(0, num_engines - 1), min_size=1)))
            expected = min(alive, key=lambda each: plain.order(each, prompt))
            missing = len(prompt) - plain.cached(expected, prompt)
            count = data.draw(st.integers(1, 3))
            placement = choose(router, prompt, count, alive)
            assert placement == Placement(expected, missing, count)
            plain.send(placement, prompt)
        elif action == "begun" and placed:
            router.begun(placed[0])
        elif action == "ended" and placed:
            router.ended(placed[0])
            if not placed[0].num_completions:
                placed.pop(0)
        elif action == "forget":
            router.forget(engine)
            placed.clear()
            plain.prompts[engine].clear()
        elif action == "clear":
            router.clear_cached()
            plain.prompts = [set() for _ in range(num_engines)]
        assert [router.queued(k) for k in range(num_engines)] == [
            plain.queued(k) for k in range(num_engines)
        ]


def test_a_hash_covers_all_tokens_before_its_block_and_the_salt() -> None:
    prompt = list(range(3 * SIZE + 1))
    chain = chain_hashes(prompt, SIZE)
    assert len(chain) == 3
    changed = chain_hashes([99, *prompt[1:]], SIZE)
    assert not set(chain) & set(changed)
    assert not set(chain) & set(chain_hashes(prompt, SIZE, salt=("salt", 1)))
    assert chain == chain_hashes(prompt[:-1], SIZE)


def choose(
    router: Router, prompt: Sequence[int], num_completions: int, alive: Iterable[int]
) -> Placement:
    chain = chain_hashes(prompt, router.block_size)
    return router.place(chain, len(prompt), num_completions, alive)


def hits(sent: SentBlocks, chain: list[int]) -> int:
    return sent.num_hits(chain, len(chain))


def test_a_later_block_alone_is_no_hit() -> None:
    sent = SentBlocks(MANY)
    sent.add(chain_hashes([1] * SIZE + [2] * SIZE, SIZE))
    assert hits(sent, chain_hashes([2] * SIZE, SIZE)) == 0
    assert hits(sent, chain_hashes([1] * SIZE + [3] * SIZE + [2] * SIZE, SIZE)) == 1


@given(
    st.integers(0, 12),
    st.lists(st.lists(st.integers(0, 1), max_size=40), max_size=20),
)
def test_memory_is_bounded_and_hits_are_prefixes_that_were_sent(
    most: int, prompts: list[list[int]]
) -> None:
    sent, before = SentBlocks(most), set[tuple[int, ...]]()
    for prompt in prompts:
        chain = chain_hashes(prompt, SIZE)
        num_hits = hits(sent, chain)
        assert all(tuple(prompt[: SIZE * count]) in before for count in range(1, num_hits + 1))
        sent.add(chain)
        before.update(tuple(prompt[: SIZE * count]) for count in range(1, len(chain) + 1))
        assert len(sent) <= 2 * most
        assert hits(sent, chain) == min(len(chain), most)


def test_a_prompt_is_remembered_while_fewer_blocks_than_the_engine_has_were_sent_since() -> None:
    sent = SentBlocks(8)
    first = chain_hashes([7] * 4 * SIZE, SIZE)
    sent.add(first)
    sent.add(chain_hashes([8] * 4 * SIZE, SIZE))
    sent.add(chain_hashes([9] * 4 * SIZE, SIZE))
    assert hits(sent, first) == 4
    sent.add(chain_hashes([1] * 4 * SIZE, SIZE))
    sent.add(chain_hashes([2] * 4 * SIZE, SIZE))
    assert hits(sent, first) == 0


def test_a_prefix_stays_with_its_engine_while_the_queue_is_short() -> None:
    router = Router([MANY] * 4, 16)
    prefix = [1] * 512
    places = []
    for number in range(20):
        placement = choose(router, [*prefix, number], 1, range(4))
        router.begun(placement)
        router.ended(placement)
        places.append(placement.engine)
    assert len(set(places)) == 1


def test_equal_prompts_spread_when_the_queue_is_long() -> None:
    router = Router([MANY] * 4, 16)
    prompt = [1] * 256
    places = Counter(choose(router, prompt, 1, range(4)).engine for _ in range(200))
    assert sorted(places) == [0, 1, 2, 3]
    assert max(places.values()) <= 70
    first = [choose(Router([MANY] * 4, 16), prompt, 1, range(4)).engine for _ in range(8)]
    assert len(set(first)) == 1, "the first group stays together"


def test_idle_engines_share_different_prompts_that_come_one_by_one() -> None:
    router = Router([MANY] * 4, SIZE)
    places = []
    for number in range(8):
        placement = choose(router, [number] * 4 * SIZE, 1, range(4))
        router.ended(placement)
        places.append(placement.engine)
    assert places == [0, 1, 2, 3] * 2


def test_a_dead_engine_is_neither_chosen_nor_remembered() -> None:
    router = Router([MANY] * 2, SIZE)
    prompt = [1] * 8 * SIZE
    assert choose(router, prompt, 1, [0, 1]).engine == 0
    router.forget(0)
    assert router.queued(0) == 0
    placement = choose(router, prompt, 1, [1])
    assert placement.engine == 1
    router.ended(placement)
    assert choose(router, prompt, 1, [0, 1]) == Placement(1, SIZE, 1)
    with pytest.raises(ValueError, match="no engine to choose from"):
        choose(router, prompt, 1, [])


def test_a_reset_cache_leaves_the_queues() -> None:
    router = Router([MANY] * 2, SIZE)
    prompt = [1] * 8 * SIZE
    placement = choose(router, prompt, 1, [0])
    router.clear_cached()
    assert router.queued(0) == 8 * SIZE + COMPLETION_TOKENS
    assert choose(router, prompt, 1, [0]).num_prompt_tokens == 8 * SIZE
    router.ended(placement)
    assert router.queued(0) == 8 * SIZE + COMPLETION_TOKENS


@pytest.mark.parametrize("seed", range(5))
def test_queues_of_random_prompts_differ_by_at_most_one_request(seed: int) -> None:
    draw = random.Random(seed)
    router = Router([MANY] * 8, SIZE)
    longest = 100
    in_flight: list[Placement] = []
    for _ in range(500):
        prompt = draw.choices(range(1000), k=draw.randint(1, longest))
        in_flight.append(choose(router, prompt, 1, range(8)))
        queued = [router.queued(engine) for engine in range(8)]
        assert max(queued) - min(queued) <= longest + COMPLETION_TOKENS
    for placement in in_flight:
        router.ended(placement)
    assert not any(router.queued(engine) for engine in range(8))
