"""Lender, and KVCacheManager with blocks that other engines share."""

from __future__ import annotations

import pytest
from support.fakes import FakeRunner, info
from support.shared_regions import FakeSharedBlocks

from shmllm.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from shmllm.config.load import LoadConfig
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.kv_groups import ONE_GROUP, FullAttention, KVGroup, RecurrentState, SlidingWindow
from shmllm.core.prefix_cache import extend_block_hashes
from shmllm.core.request import Request
from shmllm.core.shared_blocks import BlockCopy, Lender
from shmllm.engine.core import EngineCore
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams

SIZE = 4
WINDOW = (KVGroup(FullAttention()), KVGroup(SlidingWindow(9)))
STATES = (KVGroup(FullAttention()), KVGroup(RecurrentState(2 * SIZE)))


def make_request(tokens, number=0):
    submitted = EngineCoreRequest(number, tokens, SamplingParams(max_tokens=8))
    return Request(0, submitted, seed=0, max_model_len=1024)


class Bench:
    """A manager with shared blocks.

    It keeps the copies of the last plan, which `run` makes.
    """

    def __init__(self, groups=ONE_GROUP, *, num_blocks=20, num_states=1, in_place=True, room=100):
        self.groups = groups
        self.shared = FakeSharedBlocks(room)
        self.manager = KVCacheManager(num_blocks + 1, SIZE, True, groups, num_states + 1)
        self.sections = [int(group.rule.interval is not None) for group in groups]
        self.lender = Lender(self.shared, self.sections, in_place)
        self.manager.share(self.lender)

    def keys(self, tokens, group=0):
        """The section and key of each full block of a group."""
        hashes = []
        request = make_request(tokens)
        extend_block_hashes(hashes, request.token_ids, SIZE, "")
        ratio = (self.groups[group].rule.interval or SIZE) // SIZE
        return [
            (self.sections[group], h[:-1] + bytes((h[-1] ^ group,)))
            for h in hashes[ratio - 1 :: ratio]
        ]

    def put(self, tokens, group=0, which=slice(None)):
        """Let another engine have blocks. Returns their ids."""
        return [self.shared.put(*key) for key in self.keys(tokens, group)[which]]

    def admit(self, tokens, count=None):
        request = make_request(tokens)
        hit = self.manager.longest_hit(request)
        if not self.manager.admit(request, hit, count or len(tokens)):
            self.manager.drop(hit)
            return None
        request.num_computed_tokens = count or len(tokens)
        self.manager.register_full_blocks(request)
        self.manager.check_integrity()
        return request

    def run(self):
        """Take the copies of a plan, and make them."""
        loads, saves = self.manager.lenders.take_loads(), self.manager.lenders.take_saves()
        self.manager.lenders.step_submitted()
        self.manager.lenders.step_run(saves, loads)
        return loads, saves

    @property
    def lent(self):
        return sorted(block_id for _, block_id in self.shared.lent)


PROMPT = list(range(17))


def ids_of(request, group=0):
    return request.block_tables[group].block_ids


def test_a_hit_goes_on_in_shared_blocks():
    bench = Bench()
    bench.manager.release(bench.admit(PROMPT[:9]))
    other = bench.put(PROMPT, which=slice(2, 4))
    request = bench.admit(PROMPT)
    assert ids_of(request)[2:4] == other == bench.lent
    assert request.num_cached_blocks == 4
    assert bench.manager.num_used_blocks == 3, "borrowed blocks need none of the engine"
    bench.manager.release(request)
    assert bench.lent == []
    bench.manager.check_integrity()


def test_a_block_is_borrowed_once_for_all_requests():
    bench = Bench()
    other = bench.put(PROMPT)
    first, second = bench.admit(PROMPT), bench.admit(PROMPT)
    assert ids_of(first)[:4] == ids_of(second)[:4] == other
    bench.manager.release(first)
    assert bench.lent == other
    bench.manager.release(second)
    assert bench.lent == []


def test_a_lent_block_is_found_although_others_do_not_have_it_any_more():
    bench = Bench()
    other = bench.put(PROMPT)
    bench.admit(PROMPT)
    bench.shared.others.clear()
    assert ids_of(bench.admit(PROMPT))[:4] == other


@pytest.mark.parametrize("vanishing", [0, 2, 3])
def test_a_block_that_vanishes_shortens_the_hit(vanishing):
    bench = Bench()
    other = bench.put(PROMPT)
    bench.shared.vanishing.add(bench.keys(PROMPT)[vanishing])
    request = bench.admit(PROMPT)
    assert request.block_tables[0].block_ids[:vanishing] == other[:vanishing] == bench.lent
    assert request.num_cached_blocks == 4  # the rest is computed, and registered
    bench.manager.release(request)
    assert bench.lent == []


def test_blocks_that_vanish_again_and_again_are_no_hit(monkeypatch):
    bench = Bench()
    bench.put(PROMPT)
    monkeypatch.setattr(bench.shared, "borrow", lambda *_: None)
    request = make_request(PROMPT)
    assert bench.manager.longest_hit(request).num_blocks == 0
    assert bench.lent == []


@pytest.mark.parametrize("in_place", [True, False])
def test_a_hit_that_is_not_admitted_is_given_back(in_place):
    bench = Bench(num_blocks=4, in_place=in_place)
    holder = bench.admit([90 + i for i in range(12)])
    bench.put(PROMPT)
    assert bench.admit([*PROMPT, *range(30, 40)]) is None
    assert bench.lent == []
    bench.manager.release(holder)
    assert bench.admit(PROMPT[:16]) is not None


def test_a_hit_that_is_not_admitted_leaves_others_their_blocks():
    bench = Bench(num_blocks=2)
    other = bench.put(PROMPT)
    bench.admit(PROMPT)
    assert bench.admit([*PROMPT, *range(30, 40)]) is None
    assert bench.lent == other


def test_a_window_borrows_what_it_reads():
    bench = Bench(WINDOW)
    everything, window = bench.put(PROMPT), bench.put(PROMPT, 1, slice(2, 4))
    request = bench.admit(PROMPT)
    assert request.block_tables[1].first_kept == 2
    assert (ids_of(request)[:4], ids_of(request, 1)[2:4]) == (everything, window)
    assert bench.lent == sorted(everything + window)


def test_a_window_gives_back_what_it_has_passed():
    bench = Bench(WINDOW)
    everything, window = bench.put(PROMPT), bench.put(PROMPT, 1)
    request = bench.admit(PROMPT)
    request.num_computed_tokens = 20
    request.token_ids.extend(range(50, 60))
    assert bench.manager.extend(request, 21) is not None
    assert bench.lent == sorted(everything + window[3:])


def test_a_state_is_borrowed_from_its_section():
    bench = Bench(STATES, num_states=4)
    everything, states = bench.put(PROMPT), bench.put(PROMPT, 1)
    request = bench.admit(PROMPT)
    assert ids_of(request)[:4] == everything
    assert request.block_tables[1].kept[0].block_id == states[1]
    assert set(bench.shared.lent) == {(0, each) for each in everything} | {(1, states[1])}
    bench.manager.release(request)
    assert bench.lent == []


def test_without_a_state_keys_and_values_are_no_hit():
    bench = Bench(STATES, num_states=4)
    bench.put(PROMPT)
    assert bench.manager.longest_hit(make_request(PROMPT)).num_blocks == 0


def test_copies_replace_borrowed_blocks():
    bench = Bench(in_place=False)
    other = bench.put(PROMPT)
    request = bench.admit(PROMPT)
    own = ids_of(request)[:4]
    assert max(own) <= 20
    loads, saves = bench.manager.lenders.take_loads(), bench.manager.lenders.take_saves()
    assert loads == [BlockCopy(0, a, b) for a, b in zip(other, own, strict=True)]
    assert saves == [], "the others have them"
    bench.manager.lenders.step_submitted()
    assert bench.lent == other
    bench.manager.lenders.step_run(saves, loads)
    assert bench.lent == []
    assert ids_of(bench.admit(PROMPT))[:4] == own, "they are cached now"


def test_copies_need_free_blocks():
    bench = Bench(num_blocks=4, in_place=False)
    bench.put(PROMPT)
    assert bench.admit(PROMPT) is None
    assert bench.lent == []
    assert bench.admit(PROMPT[:16]) is not None


def test_a_block_that_two_steps_copy_is_given_back_after_the_second():
    bench = Bench(num_blocks=5, in_place=False)
    other = bench.put(PROMPT[:5])
    plans = []
    for _ in range(2):
        request = bench.admit(PROMPT[:5])
        plans.append((bench.manager.lenders.take_saves(), bench.manager.lenders.take_loads()))
        bench.manager.lenders.step_submitted()
        bench.manager.release(request)
        bench.manager.release(bench.admit([70] * 18))  # which reuses all blocks
    assert [len(loads) for _, loads in plans] == [1, 1]
    bench.manager.lenders.step_run(*plans[0])
    assert bench.lent == other
    bench.manager.lenders.step_run(*plans[1])
    assert bench.lent == []


def test_full_blocks_are_saved_after_the_step_that_computes_them():
    bench = Bench()
    request = bench.admit(PROMPT)
    _, saves = bench.run()
    assert [each.source for each in saves] == ids_of(request)[:4]
    assert list(bench.shared.published.values()) == bench.keys(PROMPT)
    assert bench.run() == ([], [])


def test_each_group_saves_under_keys_of_its_own():
    bench = Bench(WINDOW)
    bench.admit(PROMPT)
    bench.run()
    keys = list(bench.shared.published.values())
    assert sorted(keys) == sorted(bench.keys(PROMPT) + bench.keys(PROMPT, 1))
    assert len(set(keys)) == len(keys)


def test_a_state_is_saved_when_its_request_has_passed_it():
    bench = Bench(STATES, num_states=4)
    request = bench.admit(PROMPT[:8])
    _, saves = bench.run()
    assert {each.section for each in saves} == {0}
    bench.manager.release(request)
    assert bench.manager.lenders.has_saves
    _, saves = bench.run()
    assert [each.section for each in saves] == [1]
    assert bench.keys(PROMPT[:8], 1)[0] in bench.shared.published.values()


def test_a_block_that_is_reused_in_the_same_plan_is_not_saved():
    bench = Bench(num_blocks=5)
    bench.manager.release(bench.admit(PROMPT))
    second = bench.admit([60 + i for i in range(17)])
    _, saves = bench.run()
    assert {each.source for each in saves} <= {*ids_of(second)}
    assert list(bench.shared.published.values()) == bench.keys([60 + i for i in range(17)])


def test_without_room_nothing_is_saved_and_nothing_waits():
    bench = Bench(room=1)
    bench.admit(PROMPT)
    assert len(bench.run()[1]) == 1
    assert not bench.manager.lenders.has_saves


def test_forgotten_prefixes_are_not_saved():
    bench = Bench()
    bench.admit(PROMPT)
    bench.manager.reset_prefix_cache()
    assert not bench.manager.lenders.has_saves


def test_what_was_cached_before_is_saved_over_some_steps():
    bench = Bench(num_blocks=60)
    bench.manager.share(None)
    tokens = list(range(161))
    bench.manager.release(bench.admit(tokens))
    bench.manager.share(bench.lender)
    counts = []
    while bench.manager.lenders.has_saves:
        counts.append(len(bench.run()[1]))
    assert counts == [32, 8]
    assert set(bench.shared.published.values()) == set(bench.keys(tokens))


def test_a_block_is_given_back_when_the_submitted_steps_have_run():
    """They read it, and its owner does not wait for them."""
    bench = Bench()
    other = bench.put(PROMPT)
    request = bench.admit(PROMPT)
    bench.manager.lenders.step_submitted()
    bench.manager.lenders.step_submitted()
    bench.manager.release(request)
    for _ in range(2):
        assert bench.lent == other
        bench.manager.lenders.step_run([], [])
    assert bench.lent == []


def test_a_block_that_is_asked_for_again_stays():
    bench = Bench()
    other = bench.put(PROMPT)
    request = bench.admit(PROMPT)
    bench.manager.lenders.step_submitted()
    bench.manager.release(request)
    again = bench.admit(PROMPT)
    bench.manager.lenders.step_run([], [])
    assert bench.lent == other == ids_of(again)[:4]
    bench.manager.release(again)
    assert bench.lent == []


@pytest.mark.parametrize("has_next", [True, False])
def test_former_lenders_get_their_blocks_back(has_next):
    bench = Bench()
    other = bench.put(PROMPT)
    request = bench.admit(PROMPT)
    bench.manager.share(Lender(FakeSharedBlocks(), [0], True) if has_next else None)
    assert not bench.manager.longest_hit(make_request(PROMPT)).num_blocks
    bench.manager.lenders.step_submitted()
    bench.manager.release(request)
    assert bench.lent == other
    bench.manager.lenders.step_run([], [])
    assert bench.lent == []


class LentIds:
    """The ids that are lent at the time of asking."""

    def __init__(self, shared):
        self._shared = shared

    def __contains__(self, block_id):
        return (0, block_id) in self._shared.lent


class Engine:
    """An engine core whose fake runner overlaps steps, with shared blocks."""

    def __init__(self, lag, num_blocks=16):
        config = EngineConfig(
            LoadConfig("nowhere"),
            CacheConfig(),
            SchedulerConfig(8, 64, scheduler_reserve_full_isl=False),
        )
        self.runner = FakeRunner(info(num_blocks=num_blocks), lag)
        self.core = EngineCore(config, self.runner)
        self.shared = FakeSharedBlocks()
        self.core._kv_cache.share(Lender(self.shared, [0], True))
        self.size = self.core.info.block_size
        self.runner.lent_ids = LentIds(self.shared)

    def add(self, number, prompt, max_tokens=4):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        assert self.core.add(0, EngineCoreRequest(number, prompt, params)) is None

    def put(self, prompt):
        """Let others have the blocks of a prompt, and this engine not. Returns their ids."""
        self.add(99, prompt, max_tokens=1)
        self.drain()
        assert self.core.reset_prefix_cache()
        return sorted(self.shared.published)

    @property
    def lent(self):
        return sorted(block_id for _, block_id in self.shared.lent)

    def drain(self):
        while self.core.has_unfinished:
            self.core.step()


LAGS = {"alone": None, "at once": lambda: 0, "late": lambda: 1, "waited for": lambda: 2}


@pytest.mark.parametrize("lag", LAGS.values(), ids=LAGS)
def test_an_engine_shares_each_full_block_once_and_gives_all_back(lag):
    engine = Engine(lag)
    prompt = [i % 50 for i in range(3 * engine.size + 1)]
    engine.add(0, prompt, max_tokens=2)
    engine.drain()
    assert len(engine.shared.published) == 3
    engine.core.reset_prefix_cache()
    engine.add(1, prompt, max_tokens=1)
    engine.drain()
    assert engine.core.scheduler.stats.prefix_hit_tokens == 3 * engine.size
    assert engine.shared.lent == {}
    engine.core.scheduler.check_integrity()


@pytest.mark.parametrize("lag", [LAGS["late"], LAGS["waited for"]])
def test_an_aborted_request_gives_back_after_its_steps(lag):
    engine = Engine(lag)
    prompt = [i % 50 for i in range(2 * engine.size + 1)]
    other = engine.put(prompt)
    engine.add(0, prompt, max_tokens=20)
    engine.core.step()
    assert engine.core.is_in_flight
    engine.core.abort(0, [0])
    assert engine.lent == other, "the step in flight reads them"
    engine.drain()
    assert engine.lent == []


def test_a_preempted_request_gives_back():
    engine = Engine(None)
    prompt = [i % 50 for i in range(2 * engine.size + 1)]
    engine.put(prompt)
    engine.add(0, prompt, max_tokens=20)
    engine.core.step()
    assert len(engine.shared.lent) == 2
    engine.core.scheduler.preempt_all()
    assert engine.shared.lent == {}


def test_a_plan_may_only_save():
    """Blocks that wait when no request is left, here after they were cached before."""
    engine = Engine(None)
    engine.core._kv_cache.share(None)
    prompt = [i % 50 for i in range(2 * engine.size + 1)]
    engine.add(0, prompt, max_tokens=1)
    engine.drain()
    engine.core._kv_cache.share(Lender(engine.shared, [0], True))
    assert engine.core.has_unfinished
    assert engine.core.step() == {}
    plan = engine.runner.plans[-1]
    assert (plan.num_tokens, len(plan.saves_before), plan.saves_after) == (0, 2, [])
    assert len(engine.shared.published) == 2
    assert not engine.core.has_unfinished
