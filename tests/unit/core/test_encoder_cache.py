"""The encoder cache: what steps encode and use, and that no order of prompts stops requests."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from support.fakes import FakeRunner, as_read, expected_tokens, info
from support.shared_regions import FakeSharedBlocks
from support.variants import slow

from shmllm.config.engine import SchedulerConfig
from shmllm.core.encoder_cache import EncoderCache
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.prefix_cache import hash_blocks
from shmllm.core.request import Request
from shmllm.core.scheduler import Scheduler
from shmllm.core.shared_blocks import Lender
from shmllm.params.items import Item
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams

PLACEHOLDER = 49


class Bench:
    """A scheduler of requests with items over a fake runner."""

    def __init__(
        self, *, capacity, budget=64, num_blocks=64, num_seqs=8, longest_span=0, longest_chunk=0
    ):
        self.cache = EncoderCache(capacity, cuts_spans=not longest_span)
        self.manager = KVCacheManager(num_blocks + 1, 4, enable_prefix_caching=True)
        config = SchedulerConfig(
            num_seqs,
            budget,
            long_prefill_token_threshold=longest_chunk,
            scheduler_reserve_full_isl=False,
        )
        self.scheduler = Scheduler(
            config, self.manager, longest_span=longest_span, encoder_cache=self.cache
        )
        self.runner = FakeRunner(info(num_blocks=num_blocks, block_size=4))
        self.requests = []
        self.num_added = 0

    def add(self, length, items=(), number=None, tokens=None, max_tokens=3):
        """Add a request with a prompt of other tokens than any other, unless they are given."""
        number = self.num_added if number is None else number
        prompt = [(number * 11 + i) % 47 for i in range(length)] if tokens is None else list(tokens)
        for item in items:
            for begin, end in item.spans:
                prompt[begin:end] = [PLACEHOLDER] * (end - begin)
        params = SamplingParams(max_tokens=max_tokens)
        self.num_added += 1
        submitted = EngineCoreRequest(self.num_added - 1, prompt, params, items=tuple(items))
        request = Request(0, submitted, seed=0, max_model_len=128)
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self):
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan.num_tokens:
            self.scheduler.apply(plan, self.runner.execute(plan))
            self.scheduler.check_integrity()
        return plan

    def abort(self, number):
        request = self.scheduler.abort(0, number)
        if request is not None:
            self.requests.remove(request)

    def run(self):
        for _ in range(3000):
            if not self.scheduler.has_unfinished():
                break
            assert self.step().num_tokens, "a step computes nothing although requests wait"
        for request in self.requests:
            prompt = list(request.token_ids[: request.num_prompt_tokens])
            expected = expected_tokens(as_read(prompt, request.items), request.max_tokens)
            assert list(request.token_ids[request.num_prompt_tokens :]) == expected


def item(name, *spans):
    return Item(bytes([name]) * 32, spans, (1, 1, 1))


def encoded(plan):
    return [each.item.identity[0] for each in plan.encodes]


def test_an_item_is_encoded_once_for_all_its_chunks():
    bench = Bench(capacity=16, budget=8)
    bench.add(24, [item(1, (4, 18))])
    plans = [bench.step() for _ in range(3)]
    assert [encoded(plan) for plan in plans] == [[1], [], []]
    assert [len(plan.item_uses) for plan in plans] == [1, 1, 1]
    bench.run()


def test_an_item_that_another_request_had_is_not_encoded_again():
    bench = Bench(capacity=16)
    bench.add(20, [item(1, (4, 18))])
    assert encoded(bench.step()) == [1]
    bench.add(21, [item(1, (3, 17))])
    plan = bench.step()
    assert (encoded(plan), len(plan.item_uses)) == ([], 1)
    assert bench.cache.num_hits == 1
    bench.run()


def test_a_hit_behind_an_item_needs_no_embeddings():
    bench = Bench(capacity=16)
    tokens = list(range(20))
    bench.add(20, [item(1, (2, 8))], tokens=tokens)
    bench.run()
    bench.cache.reset()
    bench.add(20, [item(1, (2, 8))], tokens=tokens)
    plan = bench.step()
    assert (plan.starts, encoded(plan), plan.item_uses) == ([16], [], [])
    bench.run()


def test_a_hit_that_ends_inside_an_item_needs_its_embeddings():
    bench = Bench(capacity=16)
    tokens = list(range(20))
    bench.add(20, [item(1, (2, 11))], tokens=tokens)
    bench.run()
    bench.cache.reset()
    bench.add(20, [item(1, (2, 11))], tokens=[*tokens[:13], 30, *tokens[14:]])
    plan = bench.step()
    assert (plan.starts, encoded(plan)) == ([12], [])
    bench.add(20, [item(1, (2, 11))], tokens=[*tokens[:11], 30, *tokens[12:]])
    plan = bench.step()
    assert (plan.starts[-1], encoded(plan)) == (8, [1])
    bench.run()


@pytest.mark.parametrize(
    ("other", "hit"),
    [(item(2, (4, 12)), 4), (item(1, (5, 13)), 0), (item(1, (4, 8), (9, 13)), 8)],
)
def test_a_hit_ends_where_items_differ_at_equal_placeholders(other, hit):
    bench = Bench(capacity=32)
    tokens = [PLACEHOLDER] * 16
    bench.add(16, [item(1, (4, 12))], tokens=tokens)
    bench.run()
    bench.add(16, [other], tokens=tokens)
    assert bench.step().starts == [hit]
    bench.run()


def test_two_items_that_change_places_are_no_hits():
    bench = Bench(capacity=32)
    tokens = [PLACEHOLDER] * 16
    bench.add(16, [item(1, (0, 8)), item(2, (8, 16))], tokens=tokens)
    bench.run()
    bench.add(16, [item(2, (0, 8)), item(1, (8, 16))], tokens=tokens)
    assert bench.step().starts == [0]
    bench.run()


def test_a_chunk_ends_before_an_item_without_room():
    bench = Bench(capacity=10)
    bench.add(30, [item(1, (2, 9)), item(2, (12, 20))])
    plan = bench.step()
    assert (plan.counts, encoded(plan)) == ([12], [1])
    plan = bench.step()
    assert (plan.counts, encoded(plan), plan.forgotten) == ([18], [2], [1])
    bench.run()


def test_others_go_on_while_an_item_has_no_room():
    bench = Bench(capacity=10)
    bench.add(12, [item(1, (2, 9))])
    bench.add(12, [item(2, (0, 8))])
    bench.add(12)
    bench.step()
    assert [r.num_computed_tokens for r in bench.requests] == [12, 0, 0]
    bench.step()
    assert [r.num_computed_tokens for r in bench.requests] == [13, 12, 12]
    bench.run()


def test_a_request_without_room_for_its_item_holds_no_shared_block():
    bench = Bench(capacity=10)
    shared = FakeSharedBlocks()
    bench.manager.share(Lender(shared, [0], True))
    bench.add(12, [item(1, (2, 9))])
    waiting = bench.add(12, [item(2, (4, 12))])
    hash_blocks(waiting, 4)
    shared.put(0, waiting.block_hashes[0])
    bench.step()
    assert waiting.num_computed_tokens == 0
    bench.abort(1)
    bench.run()
    bench.manager.lenders.step_submitted()
    bench.manager.lenders.step_run([], [])
    assert shared.lent == {}


def test_an_item_twice_in_a_prompt_is_encoded_once():
    bench = Bench(capacity=8)
    bench.add(24, [item(1, (2, 10)), item(1, (12, 20))])
    plan = bench.step()
    assert (plan.counts, encoded(plan), len(plan.item_uses)) == ([24], [1], 2)
    bench.run()


def test_a_span_that_must_be_whole_is_never_cut():
    bench = Bench(capacity=64, budget=10, longest_span=16, longest_chunk=5)
    assert bench.scheduler._batches.budget == 16
    bench.add(40, [item(1, (5, 21), (24, 30))])
    cuts = []
    while bench.scheduler.has_unfinished():
        plan = bench.step()
        cuts.append(plan.starts[0])
    assert not any(5 < cut < 21 or 24 < cut < 30 for cut in cuts)
    bench.run()


def test_spans_of_sounds_are_cut_where_those_of_images_are_not():
    bench = Bench(capacity=20, budget=8, longest_span=8)
    sound = Item(bytes([3]) * 32, ((2, 14),), (12, 1, 1), modality="audio")
    bench.add(16, [sound])
    (first,) = bench.step().counts
    assert first == 8
    bench.run()


def test_weights_that_change_in_the_middle_of_an_item_encode_it_again():
    bench = Bench(capacity=16, budget=8)
    bench.add(24, [item(1, (4, 18))])
    bench.step()
    bench.scheduler.forget_prefixes()
    plan = bench.step()
    assert (encoded(plan), plan.forgotten) == ([1], [1])
    bench.run()


def random_items(draw, length, most):
    """Items of a few identities at ascending places; equal identities have equal sizes."""
    cuts = sorted(draw.sample(range(1, length), min(length - 1, 2 * draw.randrange(4))))
    found = []
    for begin, end in list(pairwise(cuts))[::2]:
        name = draw.randrange(3)
        size = 1 + (name * 5 + 3) % most
        if end - begin < size + 1:
            continue
        gap = draw.randrange(size)
        spans = [(begin, begin + gap), (begin + gap + 1, begin + size + 1)]
        found.append(item(name, *(span for span in spans if span[1] > span[0])))
    return found


@pytest.mark.parametrize("count", [100, slow(10_000)])
def test_every_request_of_random_sets_ends_with_its_tokens(count):
    for seed in range(count):
        draw = random.Random(seed)
        most = draw.choice((1, 4, 9, 14))
        is_whole = draw.random() < 0.4
        bench = Bench(
            capacity=most + draw.randrange(4) * draw.randrange(8),
            budget=draw.choice((1, 3, 8, 40)),
            num_blocks=draw.choice((32, 40, 80)),
            num_seqs=draw.choice((1, 2, 5)),
            longest_span=most if is_whole else 0,
            longest_chunk=draw.choice((0, 0, 2, 7)),
        )
        for number in range(draw.randrange(1, 7)):
            length = draw.randrange(2, 60)
            bench.add(
                length,
                random_items(draw, length, most),
                number=number % 3,
                max_tokens=draw.randrange(1, 6),
            )
            if draw.random() < 0.3:
                bench.step()
            if draw.random() < 0.1:
                bench.scheduler.preempt_all()
            if draw.random() < 0.05:
                bench.abort(draw.randrange(number + 1))
        try:
            bench.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
