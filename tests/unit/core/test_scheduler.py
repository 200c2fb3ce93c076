"""Scheduler: the contents of steps, admission and preemption, which do not affect the tokens."""

from __future__ import annotations

import itertools
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fakes import VOCAB_SIZE, FakeRunner, expected_tokens, info

from shmllm.config.engine import SchedulerConfig
from shmllm.core.block_pool import PADDING_BLOCK_ID
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.kv_groups import (
    ONE_GROUP,
    ChunkedLocal,
    FullAttention,
    KVGroup,
    RecurrentState,
    SlidingWindow,
    most_blocks,
    most_states,
)
from shmllm.core.plan import StepResult
from shmllm.core.request import Request, RequestStatus
from shmllm.core.scheduler import Scheduler
from shmllm.outputs.columns import FinishReason
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams


class Bench:
    """A scheduler with a fake runner. It records the outputs of each request.

    Each draft has as many right tokens as `draws` says, and a wrong one; None drafts nothing.
    """

    def __init__(
        self,
        *,
        num_blocks=32,
        block_size=4,
        num_seqs=8,
        budget=64,
        caching=True,
        max_model_len=64,
        longest_chunk=0,
        groups=ONE_GROUP,
        num_states=0,
        max_drafts=0,
        draws=None,
        num_batches=1,
        reserves=False,
        watermark=0.0,
    ):
        self.budget = budget
        self.num_seqs = num_seqs
        self.draws = draws
        self.max_model_len = max_model_len
        self.manager = KVCacheManager(num_blocks + 1, block_size, caching, groups, num_states + 1)
        config = SchedulerConfig(
            num_seqs,
            budget,
            long_prefill_token_threshold=longest_chunk,
            scheduler_reserve_full_isl=reserves,
            watermark=watermark,
        )
        self.scheduler = Scheduler(
            config, self.manager, max_drafts=max_drafts, num_batches=num_batches
        )
        self.num_batches = num_batches
        self.in_flight = deque()
        facts = info(num_blocks=num_blocks, block_size=block_size, num_states=num_states)
        self.runner = FakeRunner(facts, groups=groups)
        self.groups = groups
        self.longest_chunk = longest_chunk or budget
        self.requests = {}
        self.tokens = {}
        self.ends = {}
        self.cached = {}
        self.drafted = {}
        self.max_drafts = max_drafts
        self.ends_planned = {}
        self.without_stops = {}

    def add(self, number, prompt, *, client=0, salt="", eos=(), **options):
        """Add a request. If `prompt` is a length, no two numbers have equal prefixes."""
        if isinstance(prompt, int):
            prompt = [(number * 7 + i) % 50 for i in range(prompt)]
        params = SamplingParams(**{"max_tokens": 4} | options)
        request = Request(
            client,
            EngineCoreRequest(number, prompt, params, cache_salt=salt),
            seed=number,
            max_model_len=self.max_model_len,
            eos_token_ids=eos,
        )
        self.requests[client, number] = request
        self.tokens[client, number] = []
        self.ends[client, number] = []
        self.scheduler.add(request)
        return request

    def draft(self):
        drafts = {}
        for request in self.scheduler.running:
            if self.draws is not None and request.num_output_tokens and request.pooling is None:
                endless = self.endless(request)
                begin = request.num_output_tokens
                end = min(begin + self.draws(), len(endless) - 1)
                drafts[request] = [*endless[begin:end], (endless[end] + 1) % VOCAB_SIZE]
        self.scheduler.offer_drafts(drafts)

    def endless(self, request):
        """What a request gets if only its length ends it."""
        key = request.client, request.number
        if key not in self.without_stops:
            prompt = list(request.token_ids[: request.num_prompt_tokens])
            found = expected_tokens(prompt, request.max_tokens + 1, groups=self.groups)
            self.without_stops[key] = found
        return self.without_stops[key]

    def step(self):
        self.draft()
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan.num_tokens:
            self.in_flight.append((plan, self.runner.execute(plan)))
        self.apply_first(plan)
        return plan

    def apply_first(self, plan):
        """Apply the first of the steps in flight if they are as many as there are batches, or if
        there was nothing to plan."""
        if self.in_flight and (len(self.in_flight) == self.num_batches or not plan.num_tokens):
            self.take(self.scheduler.apply(*self.in_flight.popleft()))
            self.scheduler.check_integrity()

    def take(self, outputs):
        for client, columns in outputs.items():
            offset = 0
            for row, count in zip(columns.cached_rows, columns.cached_counts, strict=True):
                assert (client, columns.numbers[row]) not in self.cached
                self.cached[client, columns.numbers[row]] = count
            for row, *counts in zip(
                columns.drafted_rows, columns.drafted_counts, columns.accepted_counts, strict=True
            ):
                assert columns.finishes[row], "the counts come with the end of a request"
                assert (client, columns.numbers[row]) not in self.drafted
                self.drafted[client, columns.numbers[row]] = counts
            for number, count, finish in zip(
                columns.numbers, columns.counts, columns.finishes, strict=True
            ):
                self.tokens[client, number] += columns.token_ids[offset : offset + count]
                offset += count
                if finish:
                    self.ends[client, number].append(FinishReason(finish).text)
            assert offset == len(columns.token_ids)

    def abort(self, number, client=0):
        request = self.scheduler.abort(client, number)
        if request is not None:
            self.ends[client, number].append("abort")
        self.scheduler.check_integrity()
        return request

    def run(self, most=1000):
        for _ in range(most):
            if not self.scheduler.has_unfinished():
                return
            self.step()
        raise AssertionError("requests never ended")

    def expected(self, number, client=0):
        request = self.requests[client, number]
        prompt = list(request.token_ids[: request.num_prompt_tokens])
        return expected_tokens(
            prompt,
            request.max_tokens,
            stop_ids=request.stop_ids,
            min_tokens=request.params.min_tokens,
            groups=self.groups,
        )


def columns(plan):
    """The columns of a plan as [(number, start, count)]."""
    numbers = [request.number for request in plan.requests]
    return list(zip(numbers, plan.starts, plan.counts, strict=True))


def columns_of_rows(plan):
    return zip(plan.requests, plan.rows, strict=True)


def sampling(plan):
    return [plan.requests[index] for index in plan.samples]


def sampled(plan):
    return [request.number for request in sampling(plan)]


def test_a_long_prompt_leaves_room_in_each_step():
    bench = Bench(budget=20, longest_chunk=6)
    bench.add(1, 30, max_tokens=1)
    bench.add(2, 5, max_tokens=2)
    counts = [
        dict(zip([r.number for r in plan.requests], plan.counts, strict=True))
        for plan in (bench.step() for _ in range(5))
    ]
    assert counts == [{1: 6, 2: 5}, {1: 6, 2: 1}, {1: 6}, {1: 6}, {1: 6}]


def test_a_prompt_that_fits_is_computed_in_one_step():
    bench = Bench()
    bench.add(0, 10)
    plan = bench.step()
    assert columns(plan) == [(0, 0, 10)]
    assert sampled(plan) == [0]


def test_a_long_prompt_is_computed_in_chunks_of_the_budget():
    bench = Bench(budget=8)
    bench.add(0, 20)
    plans = [bench.step() for _ in range(4)]
    assert [columns(plan) for plan in plans] == [
        [(0, 0, 8)],
        [(0, 8, 8)],
        [(0, 16, 4)],
        [(0, 20, 1)],
    ]


def test_only_the_last_chunk_samples():
    bench = Bench(budget=8)
    bench.add(0, 20)
    assert [sampled(bench.step()) for _ in range(3)] == [[], [], [0]]
    assert len(bench.tokens[0, 0]) == 1


def test_decodes_come_before_prompts_and_a_prompt_gets_the_remaining_budget():
    bench = Bench(budget=8)
    bench.add(0, 3)
    bench.step()
    bench.add(1, 20)
    assert columns(bench.step()) == [(0, 3, 1), (1, 0, 7)]


def test_a_started_prompt_continues_before_a_waiting_one_starts():
    bench = Bench(budget=8)
    bench.add(0, 10)
    bench.add(1, 10)
    bench.step()
    assert columns(bench.step()) == [(0, 8, 2), (1, 0, 6)]


def test_requests_are_admitted_in_the_order_of_their_arrival():
    bench = Bench(num_seqs=2, budget=100)
    for number in (3, 1, 2, 0):
        bench.add(number, 5, max_tokens=1)
    assert [number for number, _, _ in columns(bench.step())] == [3, 1]
    assert [number for number, _, _ in columns(bench.step())] == [2, 0]


def test_a_small_request_does_not_overtake_one_that_waits_for_blocks():
    bench = Bench(num_blocks=5, caching=False)
    bench.add(0, 12, max_tokens=2)
    bench.step()
    bench.add(1, 16, max_tokens=1)
    bench.add(2, 1, max_tokens=1)
    assert columns(bench.step()) == [(0, 12, 1)]
    assert [number for number, _, _ in columns(bench.step())] == [1, 2]


def test_no_more_requests_run_than_there_are_rows():
    bench = Bench(num_seqs=3)
    for number in range(5):
        bench.add(number, 2, max_tokens=2)
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (3, 2)


def test_rows_of_running_requests_differ_and_are_used_again():
    bench = Bench(num_seqs=2)
    for number in range(6):
        bench.add(number, 2, max_tokens=1 + number % 3)
    rows = set()
    while bench.scheduler.has_unfinished():
        plan = bench.step()
        assert len(set(plan.rows)) == len(plan.rows)
        rows.update(plan.rows)
    assert rows == {0, 1}


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 16])
def test_no_step_exceeds_the_budget(budget):
    bench = Bench(budget=budget)
    for number in range(6):
        bench.add(number, 1 + 5 * number, max_tokens=3)
    totals = []
    while bench.scheduler.has_unfinished():
        plan = bench.step()
        assert plan.num_tokens == sum(plan.counts) <= budget
        totals.append(plan.num_tokens)
    assert max(totals) == budget
    assert all(bench.tokens[0, n] == bench.expected(n) for n in range(6))


def test_an_idle_scheduler_returns_an_empty_plan_and_counts_no_step():
    bench = Bench()
    plan = bench.scheduler.schedule()
    assert (plan.num_tokens, plan.requests) == (0, [])
    assert bench.scheduler.stats.steps == 0


def tight_bench():
    """Three requests fill all six blocks, and each needs another block for its next token."""
    bench = Bench(num_blocks=6, caching=False)
    for number in range(3):
        bench.add(number, 8, max_tokens=8)
    bench.step()
    assert bench.manager.pool.num_free == 0
    return bench


def test_a_request_is_admitted_beside_others_if_its_whole_prompt_fits():
    bench = Bench(num_blocks=10, caching=False, budget=8, reserves=True)
    bench.add(0, 8, max_tokens=9)  # four blocks until its end, of which it has two
    bench.add(1, 28, max_tokens=1)  # seven
    bench.step()
    for _ in range(8):
        assert columns(bench.step()) == [(0, bench.requests[0, 0].num_tokens - 2, 1)]
    assert [number for number, _, _ in columns(bench.step())] == [1]
    assert bench.scheduler.stats.preemptions == 0


@pytest.mark.parametrize(
    "groups", [ONE_GROUP, (KVGroup(FullAttention()), KVGroup(SlidingWindow(41)))]
)
def test_the_next_tokens_of_all_have_room(groups):
    """Also in windows that are not full."""
    bench = Bench(
        num_blocks=30 * len(groups), caching=False, max_model_len=200, groups=groups, reserves=True
    )
    for number in range(5):
        bench.add(number, 8, max_tokens=100)
    bench.step()
    # Each has two blocks of each group, and eight for the next 32 tokens.
    assert bench.scheduler.num_running == 3
    for _ in range(32):
        bench.step()
    assert bench.scheduler.num_running == 3
    assert bench.scheduler.stats.preemptions == 0


def test_a_request_near_its_end_needs_little_room():
    bench = Bench(num_blocks=30, caching=False, reserves=True)
    for number in range(8):
        bench.add(number, 8, max_tokens=5)
    bench.step()
    assert bench.scheduler.num_running == 8
    bench.run()
    assert bench.scheduler.stats.preemptions == 0


def test_full_windows_need_no_more_room():
    bench = Bench(num_blocks=12, caching=False, groups=(KVGroup(SlidingWindow(8)),), reserves=True)
    for number in range(3):
        bench.add(number, 16, max_tokens=40)
    bench.step()
    assert bench.scheduler.num_running == 3
    bench.run()
    assert bench.scheduler.stats.preemptions == 0


def test_windows_have_room_for_the_next_chunk_of_a_prompt():
    groups = (KVGroup(SlidingWindow(9)),)
    bench = Bench(num_blocks=9, caching=False, longest_chunk=16, groups=groups, reserves=True)
    bench.add(0, 40, max_tokens=1)  # has four blocks, and needs two more beside its second chunk
    bench.add(1, 16, max_tokens=2)  # four
    bench.step()
    assert bench.scheduler.num_running == 1
    bench.run()
    assert bench.scheduler.stats.preemptions == 0


def test_prompts_that_are_computed_in_chunks_keep_room_for_their_rest():
    bench = Bench(num_blocks=16, caching=False, budget=20, longest_chunk=8, reserves=True)
    bench.add(0, 40, max_tokens=1)
    bench.add(1, 28, max_tokens=1)  # seven blocks: one more than the other one leaves
    bench.step()
    assert bench.scheduler.num_running == 1
    bench.add(2, 24, max_tokens=1)
    bench.abort(1)
    bench.step()
    assert bench.scheduler.num_running == 2


def test_the_watermark_stays_free_unless_a_request_is_alone():
    bench = Bench(num_blocks=16, caching=False, watermark=0.5)
    bench.add(0, 40, max_tokens=1)
    bench.add(1, 4, max_tokens=1)
    assert [number for number, _, _ in columns(bench.step())] == [0]
    bench.add(2, 16, max_tokens=1)
    assert [number for number, _, _ in columns(bench.step())] == [1, 2]


def test_the_requests_of_a_front_end_that_does_not_read_keep_no_room():
    bench = Bench(num_blocks=16, caching=False, max_model_len=200, reserves=True)
    bench.add(0, 20, max_tokens=100, client=1)
    bench.step()
    bench.scheduler.pause_client(1)
    bench.add(1, 20, max_tokens=10)
    bench.step()
    assert bench.scheduler.num_running == 2


def test_the_request_admitted_last_is_preempted():
    bench = tight_bench()
    bench.step()
    statuses = [bench.requests[0, n].status for n in range(3)]
    assert statuses == [RequestStatus.RUNNING] * 2 + [RequestStatus.WAITING]
    assert bench.scheduler.stats.preemptions == 1


def test_a_preempted_request_is_not_in_the_plan_of_that_step():
    bench = tight_bench()
    plan = bench.step()
    assert [number for number, _, _ in columns(plan)] == [0, 1]
    assert plan.new_requests == []


def test_a_preempted_request_loses_its_blocks_and_its_row():
    bench = tight_bench()
    bench.step()
    preempted = bench.requests[0, 2]
    assert preempted.block_tables == []
    assert (preempted.num_computed_tokens, preempted.num_preemptions) == (0, 1)
    assert bench.manager.num_used_blocks == 6


def test_a_preempted_request_waits_ahead_of_all_others():
    bench = tight_bench()
    bench.add(3, 4)
    bench.step()
    bench.abort(0)
    bench.abort(1)
    assert [number for number, _, _ in columns(bench.step())] == [2, 3]


def test_several_preempted_requests_keep_their_order():
    bench = Bench(num_blocks=6, caching=False, budget=8)
    for number, length in enumerate((15, 4, 4)):
        bench.add(number, length, max_tokens=8)
    while bench.scheduler.num_running < 3:
        bench.step()
    preempted = []
    while bench.scheduler.stats.preemptions < 2:
        bench.step()
        preempted.append([request.number for request in bench.scheduler._waiting])
    assert preempted[-1] == [1, 2]


def test_the_last_running_request_preempts_itself():
    bench = Bench(num_blocks=4, caching=False)
    bench.add(0, 7, max_tokens=9)
    bench.add(1, 8, max_tokens=2)
    bench.step()
    plan = bench.step()
    assert columns(plan) == [(0, 7, 1)]
    assert bench.requests[0, 1].status is RequestStatus.WAITING


def test_a_recomputed_request_computes_its_output_too_and_samples_once():
    bench = tight_bench()
    bench.step()
    given = list(bench.tokens[0, 2])
    bench.abort(0)
    bench.abort(1)
    plan = bench.step()
    assert columns(plan) == [(2, 0, 9)]
    assert list(plan.new_requests[0].token_ids)[:9] == [*bench.requests[0, 2].token_ids[:8], *given]
    assert len(bench.tokens[0, 2]) == len(given) + 1


@pytest.mark.parametrize("caching", [False, True])
def test_preempted_requests_get_the_tokens_of_a_solo_run(caching):
    bench = Bench(num_blocks=6, caching=caching, budget=9)
    for number in range(5):
        bench.add(number, 5 + number, max_tokens=10)
    bench.run()
    assert bench.scheduler.stats.preemptions > 0
    for number in range(5):
        assert bench.tokens[0, number] == bench.expected(number)


def test_a_recomputed_request_reports_its_first_cache_hit_only():
    bench = Bench(num_blocks=6)
    bench.add(0, 8, max_tokens=8)
    bench.add(1, 8, max_tokens=8)
    bench.add(2, 8, max_tokens=8)
    bench.run()
    assert bench.requests[0, 2].num_preemptions > 0
    assert bench.cached == {(0, 0): 0, (0, 1): 0, (0, 2): 0}


def test_a_repeated_prompt_reports_its_cache_hit():
    bench = Bench()
    prompt = list(range(12))
    bench.add(0, prompt, max_tokens=1)
    bench.run()
    bench.add(1, prompt, max_tokens=1)
    assert columns(bench.step()) == [(1, 8, 4)]
    assert bench.cached == {(0, 0): 0, (0, 1): 8}
    assert bench.tokens[0, 1] == bench.tokens[0, 0]


def test_equal_prompts_in_one_step_share_blocks():
    bench = Bench()
    prompt = list(range(11))
    bench.add(0, prompt, max_tokens=3)
    bench.add(1, prompt, max_tokens=3)
    plan = bench.step()
    assert columns(plan) == [(0, 0, 11), (1, 8, 3)]
    bench.run()
    assert bench.tokens[0, 1] == bench.tokens[0, 0] == bench.expected(0)


def test_hits_do_not_use_the_budget():
    bench = Bench(budget=8)
    prompt = list(range(20))
    bench.add(0, prompt, max_tokens=1)
    bench.run()
    bench.add(1, [*prompt, 1, 2, 3], max_tokens=1)
    assert columns(bench.step()) == [(1, 20, 3)]


def test_aborting_a_waiting_request_removes_it_from_the_queue():
    bench = Bench(num_seqs=1)
    bench.add(0, 4)
    bench.add(1, 4)
    bench.step()
    assert bench.abort(1) is bench.requests[0, 1]
    bench.run()
    assert bench.tokens[0, 1] == []
    assert bench.ends[0, 1] == ["abort"]


def test_aborting_a_running_request_frees_its_blocks_and_its_row():
    bench = Bench(num_seqs=1)
    bench.add(0, 9)
    bench.step()
    bench.abort(0)
    assert bench.manager.num_used_blocks == 0
    assert not bench.scheduler.has_unfinished()
    bench.add(1, 9)
    assert columns(bench.step()) == [(1, 0, 9)]


def test_aborting_between_chunks_ends_a_prompt():
    bench = Bench(budget=4)
    bench.add(0, 10)
    bench.step()
    bench.abort(0)
    assert bench.step().num_tokens == 0
    assert bench.manager.num_used_blocks == 0


def test_aborting_a_preempted_request_ends_it():
    bench = tight_bench()
    bench.step()
    assert bench.abort(2) is bench.requests[0, 2]
    bench.run()
    assert bench.ends == {(0, 0): ["length"], (0, 1): ["length"], (0, 2): ["abort"]}


def test_aborting_during_a_step_drops_the_sampled_token():
    bench = Bench()
    bench.add(0, 4)
    bench.add(1, 4)
    plan = bench.scheduler.schedule()
    result = bench.runner.execute(plan)
    bench.abort(0)
    outputs = bench.scheduler.apply(plan, result)
    assert outputs[0].numbers == [1]
    assert outputs[0].token_ids == result.token_ids[1:]
    bench.scheduler.check_integrity()


@pytest.mark.parametrize("number", [0, 9])
def test_aborting_an_ended_or_unknown_request_does_nothing(number):
    bench = Bench()
    bench.add(0, 4, max_tokens=1)
    bench.run()
    assert bench.abort(number) is None
    assert bench.ends == {(0, 0): ["length"]}


def test_numbers_of_different_clients_are_different_requests():
    bench = Bench()
    bench.add(0, 4, client=1)
    bench.add(0, 5, client=2)
    bench.step()
    bench.abort(0, client=1)
    bench.run()
    assert bench.ends == {(1, 0): ["abort"], (2, 0): ["length"]}
    assert bench.tokens[2, 0] == bench.expected(0, client=2)


def test_aborting_a_client_ends_all_its_requests_and_no_other():
    bench = Bench(num_seqs=3)
    for number in range(4):
        bench.add(number, 4, client=number % 2)
    bench.step()
    bench.scheduler.abort_client(1)
    bench.scheduler.check_integrity()
    bench.run()
    assert bench.ends == {(0, 0): ["length"], (0, 2): ["length"], (1, 1): [], (1, 3): []}


def test_a_paused_client_gets_no_tokens_while_others_continue():
    bench = Bench()
    bench.add(0, 4, client=0)
    bench.add(1, 4, client=1)
    bench.step()
    bench.scheduler.pause_client(0)
    assert columns(bench.step()) == [(1, 4, 1)]


def test_a_paused_client_is_not_admitted_and_does_not_block_the_queue():
    bench = Bench(num_seqs=1)
    bench.scheduler.pause_client(0)
    bench.add(0, 4, client=0)
    bench.add(1, 4, client=1)
    assert [number for number, _, _ in columns(bench.step())] == [1]
    assert bench.requests[0, 0].status is RequestStatus.WAITING


def test_front_ends_are_served_round_robin_and_keep_their_order_during_a_pause():
    bench = Bench(num_seqs=1)
    bench.scheduler.pause_client(0)
    for number, client in ((0, 0), (1, 0), (2, 1), (3, 0), (4, 1)):
        bench.add(number, 4, client=client, max_tokens=1)
    assert sampled(bench.step()) == [2]
    bench.scheduler.resume_client(0)
    served = []
    while bench.scheduler.has_unfinished():
        served += sampled(bench.step())
    assert served == [0, 4, 1, 3]


def test_many_requests_of_one_front_end_do_not_delay_another():
    bench = Bench(num_seqs=1)
    for number in range(20):
        bench.add(number, 4, client=0, max_tokens=1)
    bench.add(100, 4, client=1, max_tokens=1)
    served = [sampled(bench.step())[0] for _ in range(3)]
    assert served == [0, 100, 1]


def test_shared_rows_reserve_some_for_front_ends_that_hold_none():
    bench = Bench(num_seqs=8)
    bench.scheduler.rows.share(True)
    for number in range(20):
        bench.add(number, 4, client=0, max_tokens=30)
    bench.step()
    assert bench.scheduler.num_running == 7
    bench.add(100, 4, client=1, max_tokens=1)
    bench.add(101, 4, client=1, max_tokens=1)
    assert 100 in sampled(bench.step())
    assert 101 in sampled(bench.step())
    bench.scheduler.rows.share(False)
    bench.step()
    assert bench.scheduler.num_running == 8


def test_the_plan_is_empty_if_the_only_client_is_paused():
    bench = Bench()
    bench.add(0, 4)
    bench.step()
    bench.scheduler.pause_client(0)
    assert bench.step().num_tokens == 0
    bench.scheduler.resume_client(0)
    bench.run()
    assert bench.tokens[0, 0] == bench.expected(0)


def test_a_paused_client_can_be_aborted():
    bench = Bench()
    bench.add(0, 4)
    bench.step()
    bench.scheduler.pause_client(0)
    bench.abort(0)
    assert bench.manager.num_used_blocks == 0


def test_a_paused_request_can_be_preempted():
    bench = Bench(num_blocks=4, caching=False)
    bench.add(0, 8, client=0, max_tokens=5)
    bench.add(1, 8, client=1, max_tokens=5)
    bench.step()
    bench.scheduler.pause_client(1)
    assert columns(bench.step()) == [(0, 8, 1)]
    assert bench.requests[1, 1].num_preemptions == 1
    bench.scheduler.resume_client(1)
    bench.run()
    assert bench.tokens[1, 1] == bench.expected(1, client=1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"max_tokens": 3}, "length"), ({"stop_token_ids": list(range(50))}, "stop")],
)
def test_a_request_ends_with_exactly_one_reason(options, reason):
    bench = Bench()
    bench.add(0, 4, **options)
    bench.run()
    assert bench.ends[0, 0] == [reason]
    assert bench.tokens[0, 0] == bench.expected(0)


def test_a_stop_token_is_in_the_output():
    bench = Bench()
    stop = bench.add(0, 4, max_tokens=20)
    bench.run()
    token_ids = bench.tokens[0, 0]
    bench.add(1, list(stop.token_ids[:4]), max_tokens=20, eos=[token_ids[5]])
    bench.run()
    end = token_ids.index(token_ids[5]) + 1
    assert bench.tokens[0, 1] == token_ids[:end]
    assert bench.ends[0, 1] == ["stop"]


def test_the_output_ends_at_max_model_len():
    bench = Bench(max_model_len=16, num_blocks=4)
    bench.add(0, 10, max_tokens=None)
    bench.run()
    assert len(bench.tokens[0, 0]) == 6
    assert bench.ends[0, 0] == ["length"]


def test_a_new_request_lists_the_tokens_that_must_not_end_it_yet():
    bench = Bench()
    bench.add(0, 5, min_tokens=2, eos=[7], stop_token_ids=[9])
    bench.add(1, 5, eos=[7])
    first, second = bench.scheduler.schedule().new_requests
    assert (first.min_position, sorted(first.forbidden_ids)) == (7, [7, 9])
    assert list(second.forbidden_ids) == []


def test_the_counters_count_tokens_steps_and_requests():
    bench = Bench()
    prompt = list(range(9))
    for number in range(2):
        bench.add(number, prompt, max_tokens=3)
        bench.run()
    stats = bench.scheduler.stats
    assert (stats.prompt_tokens, stats.generated_tokens, stats.requests_finished) == (18, 6, 2)
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (18, 8)
    assert stats.steps == 6


def test_recomputed_requests_do_not_count_as_prompts_again():
    bench = tight_bench()
    bench.run()
    assert bench.scheduler.stats.preemptions > 0
    assert bench.scheduler.stats.prompt_tokens == 24
    assert bench.scheduler.stats.generated_tokens == 24


def test_a_result_of_another_length_is_refused():
    bench = Bench()
    bench.add(0, 4)
    plan = bench.scheduler.schedule()
    with pytest.raises(ValueError, match="0 tokens"):
        bench.scheduler.apply(plan, StepResult([]))


class CheckedBench(Bench):
    """Checks the budget, rows, blocks and positions of every plan."""

    def step(self, aborted=None):
        """Run a step. `aborted` is the key of a request to abort while the step runs."""
        computed = {key: r.num_computed_tokens for key, r in self.requests.items()}
        preemptions = {key: r.num_preemptions for key, r in self.requests.items()}
        tables = {
            key: [table.block_ids for table in r.block_tables] for key, r in self.requests.items()
        }
        self.draft()
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        assert plan.num_drafts <= self.max_drafts
        assert sum(plan.counts) == plan.num_tokens <= self.budget
        assert len(set(plan.rows)) == len(plan.rows) <= self.num_seqs
        unknown = {id(r) for other, _ in self.in_flight for r in sampling(other)}
        if self.num_batches > 1:
            assert not unknown & {id(r) for r in plan.requests}, "its next token is not known"
            used = {row: r for other, _ in self.in_flight for r, row in columns_of_rows(other)}
            assert all(used.get(row, r) is r for r, row in columns_of_rows(plan)), "a row is used"
            assert used.keys().isdisjoint(plan.left_rows), "a row that is used was left"
        admitted = {new.row: new for new in plan.new_requests}
        appended = {append.row: append for append in plan.block_appends}
        for index, (request, row, start, count) in enumerate(
            zip(plan.requests, plan.rows, plan.starts, plan.counts, strict=True)
        ):
            key = request.client, request.number
            assert request.row == row
            assert request.status is RequestStatus.RUNNING
            assert request.client not in self.scheduler._waiting.paused
            assert request.num_preemptions == preemptions[key], "a preempted request is in the plan"
            assert count > 0
            assert start + count <= request.num_tokens + len(plan.drafts.get(index, ()))
            assert start + count < request.num_prompt_tokens + request.max_tokens
            ids = [table.block_ids for table in request.block_tables]
            if row in admitted:
                assert admitted[row].block_ids == ids
                assert start % self.manager.block_size == 0
            else:
                assert start == computed[key], "positions have a gap"
                for table, before in zip(request.block_tables, tables[key], strict=True):
                    begin = table.first_kept
                    kept = table.block_ids[begin : len(before)]
                    assert kept == before[begin:], "a block was replaced"
                    assert set(table.block_ids[:begin]) <= {PADDING_BLOCK_ID}
                given = appended[row].block_ids if row in appended else [[] for _ in ids]
                new = [table[len(old) :] for table, old in zip(ids, tables[key], strict=True)]
                assert given == new
            sizes = map(self._size, self.groups)
            lengths = [len(table) * size for table, size in zip(ids, sizes, strict=True)]
            assert min(lengths) >= start + count
            self.ends_planned[key] = max(self.ends_planned.get(key, 0), start + count)
            self._check_kept(request, start, self.ends_planned[key])
        assert admitted.keys() | appended.keys() <= set(plan.rows)
        self._check_writes(plan)
        if plan.num_tokens:
            self.in_flight.append((plan, self.runner.execute(plan)))
            if aborted is not None:
                self.abort(aborted[1], aborted[0])
        self.apply_first(plan)
        return plan

    def _check_kept(self, request, start, end):
        """Check that the request has what the step reads, and not more than the formula says."""
        size = self.manager.block_size
        held = {True: 0, False: 0}
        for group, table in zip(self.groups, request.block_tables, strict=True):
            assert table.first_kept <= group.rule.first_kept(start) // self._size(group)
            assert PADDING_BLOCK_ID not in (block.block_id for block in table.kept)
            held[group.rule.interval is not None] += len(table.kept)
        assert held[False] <= most_blocks(self.groups, end, self.longest_chunk, size)
        assert held[False] <= most_blocks(self.groups, end, max(end - start, size), size)
        assert held[True] <= most_states(self.groups, end, self.longest_chunk)

    def _size(self, group):
        return group.rule.interval or self.manager.block_size

    def _check_writes(self, plan):
        """Check that no other running request reads a slot that this step writes."""
        written = []
        for request, start, count in zip(plan.requests, plan.starts, plan.counts, strict=True):
            for group, table in zip(self.groups, request.block_tables, strict=True):
                size = self._size(group)
                written += [
                    (id(table.blocks[position // size]), position % size)
                    for position in range(start, start + count)
                ]
        assert len(set(written)) == len(written), "two requests write one slot"
        tables = [
            (request, group, table)
            for request in self.scheduler._running
            for group, table in zip(self.groups, request.block_tables, strict=True)
        ]
        owners = Counter(id(block) for _, _, table in tables for block in table.kept)
        for request, group, table in tables:
            for index, block in enumerate(table.kept, table.first_kept):
                assert block.ref_count == owners[id(block)]
                if owners[id(block)] > 1:
                    end = (index + 1) * self._size(group)
                    assert end <= request.num_computed_tokens, "shares an open block"


add_operation = st.tuples(
    st.just("add"),
    st.integers(0, 2),
    st.lists(st.integers(0, 1), min_size=1, max_size=14),
    st.integers(1, 9),
    st.sampled_from(["", "", "salt"]),
    st.sampled_from([(), (), (3,), tuple(range(25))]),
)
operation = st.one_of(
    add_operation,
    add_operation,
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("abort during step"), st.integers(0, 30)),
    st.tuples(st.just("pause"), st.integers(0, 2)),
    st.tuples(st.just("resume"), st.integers(0, 2)),
    st.tuples(st.just("reset")),
)


def apply_operation(bench, kind, arguments):
    if kind == "add":
        client, prompt, max_tokens, salt, stop_ids = arguments
        number = len(bench.requests)
        bench.add(
            number,
            prompt[: bench.max_model_len - 1],
            client=client,
            max_tokens=max_tokens,
            salt=salt,
            stop_token_ids=stop_ids,
            min_tokens=min(max_tokens, number % 3),
        )
    elif kind == "step":
        for _ in range(arguments[0]):
            bench.step()
    elif kind == "abort" and bench.requests:
        keys = list(bench.requests)
        client, number = keys[arguments[0] % len(keys)]
        ended = bool(bench.ends[client, number])
        assert (bench.abort(number, client) is None) == ended
    elif kind == "abort during step" and bench.requests:
        keys = list(bench.requests)
        bench.step(aborted=keys[arguments[0] % len(keys)])
    elif kind == "pause":
        bench.scheduler.pause_client(arguments[0])
    elif kind == "resume":
        bench.scheduler.resume_client(arguments[0])
    elif kind == "reset":
        bench.manager.reset_prefix_cache()
        bench.scheduler.check_integrity()


rule = st.one_of(
    st.just(FullAttention()),
    st.builds(SlidingWindow, st.integers(1, 12)),
    st.builds(ChunkedLocal, st.sampled_from([4, 8, 12])),
    st.just(RecurrentState(4)),
)
GROUPS = st.one_of(
    st.just(ONE_GROUP),
    st.lists(st.builds(KVGroup, rule), min_size=1, max_size=3).map(tuple),
    st.tuples(st.just(KVGroup(FullAttention())), st.just(KVGroup(RecurrentState(4)))),
)


@settings(max_examples=300, deadline=None)
@given(
    groups=GROUPS,
    num_blocks=st.integers(4, 24),
    num_states=st.integers(2, 16),
    block_size=st.sampled_from([1, 2, 4]),
    num_seqs=st.integers(1, 5),
    budget=st.integers(1, 20),
    caching=st.booleans(),
    reserves=st.booleans(),
    watermark=st.sampled_from([0.0, 0.3]),
    max_drafts=st.sampled_from([0, 0, 3, 100]),
    num_batches=st.sampled_from([1, 1, 2, 3]),
    draws=st.lists(st.integers(0, 6), min_size=1, max_size=9),
    operations=st.lists(operation, min_size=5, max_size=40),
)
def test_tokens_do_not_depend_on_the_schedule(
    groups,
    num_blocks,
    num_states,
    block_size,
    num_seqs,
    budget,
    caching,
    reserves,
    watermark,
    max_drafts,
    num_batches,
    draws,
    operations,
):
    bench = CheckedBench(
        num_blocks=num_blocks,
        block_size=block_size,
        num_seqs=num_seqs,
        budget=budget,
        caching=caching,
        reserves=reserves,
        watermark=watermark,
        max_model_len=max(
            length
            for length in range(num_blocks * block_size + 1)
            if most_blocks(groups, length, budget, block_size) <= num_blocks
            and most_states(groups, length, budget) <= num_states
        ),
        groups=groups,
        num_states=num_states,
        max_drafts=max_drafts,
        draws=itertools.cycle(draws).__next__ if max_drafts else None,
        num_batches=1 if max_drafts else num_batches,
    )
    if bench.max_model_len < 2:
        return
    for kind, *arguments in operations:
        apply_operation(bench, kind, arguments)
    for client in range(3):
        bench.scheduler.resume_client(client)
    bench.run()
    for (client, number), ends in bench.ends.items():
        assert len(ends) == 1, f"request {number} ended {ends}"
        expected = bench.expected(number, client)
        got = bench.tokens[client, number]
        assert got == (expected[: len(got)] if ends == ["abort"] else expected)
    assert bench.manager.num_used_blocks == 0
    of_aborted = [
        (request.num_draft_tokens, request.num_accepted_tokens)
        for key, request in bench.requests.items()
        if bench.ends[key] == ["abort"]  # the scheduler writes no row for it
    ]
    counts = [(0, 0), *bench.drafted.values(), *of_aborted]
    stats = bench.scheduler.stats
    assert tuple(map(sum, zip(*counts, strict=True))) == (stats.draft_tokens, stats.accepted_tokens)


@pytest.mark.parametrize("num_states", [4, 5, 6])
def test_a_copy_of_states_leaves_room_for_the_next_ones(num_states):
    bench = CheckedBench(
        num_blocks=4,
        block_size=2,
        num_seqs=1,
        budget=1,
        caching=False,
        max_model_len=8,
        groups=(KVGroup(RecurrentState(4)),) * 2,
        num_states=num_states,
        max_drafts=3,
        draws=lambda: 0,
    )
    request = bench.add(0, 3, max_tokens=4)
    bench.run()
    assert bench.tokens[0, 0] == bench.expected(0)
    assert request.num_preemptions == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), min_size=1, max_size=12))
def test_requests_get_their_first_tokens_in_the_order_of_their_arrival(shapes):
    bench = Bench(budget=7, num_seqs=4, num_blocks=64)
    for number, (length, max_tokens) in enumerate(shapes):
        bench.add(number, length, max_tokens=max_tokens)
    firsts = deque()
    while bench.scheduler.has_unfinished():
        firsts += [n for n in sampled(bench.step()) if n not in firsts]
    assert list(firsts) == list(range(len(shapes)))


def test_a_preempted_request_waits_for_its_token_of_another_batch():
    bench = CheckedBench(
        num_blocks=6,
        block_size=1,
        num_seqs=1,
        budget=1,
        caching=False,
        max_model_len=3,
        groups=(KVGroup(FullAttention()),) * 2,
        num_batches=3,
    )
    for number, max_tokens in enumerate([1, 2, 1, 1]):
        bench.add(number, [0], max_tokens=max_tokens)
    bench.run()
    assert bench.scheduler.stats.preemptions > 0
    for (client, number), tokens in bench.tokens.items():
        assert tokens == bench.expected(number, client)


def test_a_batch_in_flight_keeps_the_row_of_a_request_that_was_aborted():
    bench = Bench(num_seqs=1, num_batches=2)
    for number in range(3):
        bench.add(number, 3)
    first = bench.scheduler.schedule()
    bench.abort(0)
    second, third = bench.scheduler.schedule(), bench.scheduler.schedule()
    assert (first.rows, second.rows, third.rows) == ([0], [1], [])
    assert not third.left_rows
    bench.scheduler.apply(first, bench.runner.execute(first))
    bench.scheduler.check_integrity()
    fourth = bench.scheduler.schedule()
    assert (fourth.rows, fourth.left_rows) == ([0], [0])


def test_the_batches_of_a_pipeline_have_short_chunks():
    bench = Bench(num_blocks=200, budget=1000, num_seqs=4, num_batches=2)
    bench.add(0, 300)
    plans = [bench.scheduler.schedule() for _ in range(3)]
    assert [plan.counts for plan in plans] == [[128], [128], [44]]


def test_the_batches_of_a_pipeline_share_the_requests():
    bench = Bench(num_seqs=4, num_batches=2)
    for number in range(6):
        bench.add(number, 3)
    plans = [bench.step() for _ in range(4)]
    assert [columns(plan) for plan in plans] == [
        [(number, start, count) for number in numbers]
        for numbers, start, count in (
            ((0, 1, 2), 0, 3),
            ((3, 4, 5), 0, 3),
            ((0, 1, 2), 3, 1),
            ((3, 4, 5), 3, 1),
        )
    ]


def test_each_batch_of_a_pipeline_has_its_own_limit():
    bench = Bench(num_seqs=2, num_batches=2)
    for number in range(6):
        bench.add(number, 3)
    bench.step()
    bench.step()
    assert bench.scheduler.num_running == 4
    assert bench.scheduler.num_waiting == 2
    bench.run()
    assert all(bench.tokens[0, number] == bench.expected(number) for number in range(6))


def test_a_long_prompt_goes_through_a_pipeline_chunk_by_chunk():
    bench = Bench(budget=8, num_batches=3)
    bench.add(0, 20)
    plans = [columns(bench.step()) for _ in range(4)]
    assert plans == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 4)], []]
