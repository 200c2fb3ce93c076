"""EngineCore with a fake runner: accepted and rejected requests, and the output columns."""

from __future__ import annotations

from time import monotonic_ns, perf_counter_ns

import pytest
from support.fakes import FakeRunner, expected_tokens, info

from shmllm.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from shmllm.config.load import LoadConfig
from shmllm.config.pooling import PoolingInfo
from shmllm.core.pausing import PauseMode
from shmllm.engine.core import EngineCore
from shmllm.outputs.columns import FinishReason
from shmllm.params.pooling import Pooling, PoolingType
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams

STEP_PHASES = ("schedule", "prepare", "execute", "sample", "apply")


def make_core(*, seed=0, caching=True, budget=64, num_seqs=8, **changes):
    config = EngineConfig(
        LoadConfig("nowhere", seed=seed),
        CacheConfig(enable_prefix_caching=caching),
        SchedulerConfig(num_seqs, budget, scheduler_reserve_full_isl=False),
    )
    facts = info(enable_prefix_caching=caching, **changes)
    return EngineCore(config, FakeRunner(facts))


def run(core, clients=(0,)):
    """Step until all requests have ended. Returns {(client, number): (tokens, [finish texts])}."""
    results = {}
    for _ in range(500):
        if not core.scheduler.has_unfinished():
            return results
        for client, columns in core.step().items():
            assert client in clients
            offset = 0
            for number, count, finish in zip(
                columns.numbers, columns.counts, columns.finishes, strict=True
            ):
                tokens, ends = results.setdefault((client, number), ([], []))
                tokens += columns.token_ids[offset : offset + count]
                offset += count
                ends += [FinishReason(finish).text] if finish else []
    raise AssertionError("requests never ended")


def admitted_seeds(core):
    return [a.seed for plan in core.runner.plans for a in plan.new_requests]


def test_a_request_runs_to_its_end():
    core = make_core()
    assert core.add(0, EngineCoreRequest(5, [1, 2, 3], SamplingParams(max_tokens=4))) is None
    assert run(core) == {(0, 5): (expected_tokens([1, 2, 3], 4), ["length"])}


def test_each_client_gets_its_own_columns():
    core = make_core()
    core.add(1, EngineCoreRequest(0, [1, 2], SamplingParams(max_tokens=1)))
    core.add(2, EngineCoreRequest(0, [3], SamplingParams(max_tokens=1)))
    outputs = core.step()
    assert {client: columns.numbers for client, columns in outputs.items()} == {1: [0], 2: [0]}
    assert outputs[2].token_ids == expected_tokens([3], 1)
    assert outputs[1].finishes == [FinishReason.LENGTH]


def test_columns_carry_the_number_of_their_step():
    core = make_core()
    core.add(0, EngineCoreRequest(0, [1], SamplingParams(max_tokens=3)))
    assert [core.step()[0].step for _ in range(3)] == [0, 1, 2]


def test_a_step_that_samples_nothing_has_no_columns():
    core = make_core(budget=4)
    core.add(0, EngineCoreRequest(0, [1] * 10, SamplingParams()))
    assert [core.step() for _ in range(2)] == [{}, {}]
    assert core.step()[0].numbers == [0]


def test_an_idle_step_does_not_run_the_model():
    core = make_core()
    assert core.step() == {}
    assert core.runner.plans == []


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "0 tokens does not fit max_model_len 64"),
        ([1] * 64, "64 tokens does not fit max_model_len 64"),
        ([1] * 1500, "1,500 tokens"),
        ([1, 50], "outside the vocabulary of 50"),
        ([-1, 1], "outside the vocabulary of 50"),
    ],
    ids=["empty", "as long as the model", "longer", "id too high", "id negative"],
)
def test_an_invalid_request_is_rejected_and_not_queued(prompt, words):
    core = make_core()
    rejected = core.add(0, EngineCoreRequest(0, prompt, SamplingParams()))
    assert rejected is not None
    assert words in rejected.message
    assert not core.scheduler.has_unfinished()


def test_what_needs_a_part_that_the_model_lacks_is_refused():
    core = make_core(pooling=PoolingInfo(generates=False))
    for params, words in [
        (SamplingParams(), "generates no tokens"),
        (Pooling(uses_head=True), "neither a projection nor a classifier"),
        (Pooling(PoolingType.MAX), "computes no sparse vectors"),
        (Pooling(second_segment=1), "no second segment"),
    ]:
        rejected = core.add(0, EngineCoreRequest(0, [1], params))
        assert rejected is not None
        assert words in rejected.message
    assert core.add(0, EngineCoreRequest(0, [1], Pooling())) is None


@pytest.mark.parametrize(
    "info",
    [
        PoolingInfo(head="sparse"),  # a prompt may take several steps
        PoolingInfo(head="projection", both_ways=True),
    ],
)
def test_sparse_vectors_need_a_head_for_them_and_whole_prompts(info: PoolingInfo):
    core = make_core(pooling=info)
    rejected = core.add(0, EngineCoreRequest(0, [1], Pooling(PoolingType.MAX, uses_head=True)))
    assert rejected is not None
    assert "computes no sparse vectors" in rejected.message


@pytest.mark.parametrize(("num_rows", "start"), [(2, 0), (4, 0), (3, 1), (1, 1)])
def test_a_table_of_scored_tokens_has_a_row_for_each(num_rows: int, start: int):
    core = make_core()
    params = SamplingParams(
        prompt_logprob_token_ids=[[1]] * num_rows, prompt_logprob_start=start, max_tokens=1
    )
    rejected = core.add(0, EngineCoreRequest(0, [1, 2, 3, 4], params))
    assert rejected is not None
    assert f"{num_rows} rows, which do not suit the prompt" in rejected.message


def test_a_rejection_does_not_affect_other_requests():
    core = make_core()
    core.add(0, EngineCoreRequest(0, [1, 2], SamplingParams(max_tokens=3)))
    core.step()
    assert core.add(0, EngineCoreRequest(1, [99], SamplingParams())) is not None
    assert run(core)[0, 0][1] == ["length"]


def test_the_longest_prompt_gets_one_token():
    core = make_core()
    core.add(0, EngineCoreRequest(0, [1] * 63, SamplingParams(max_tokens=50)))
    tokens, ends = run(core)[0, 0]
    assert (len(tokens), ends) == (1, ["length"])


def test_the_largest_request_fits_the_smallest_cache():
    core = make_core(num_blocks=16, block_size=4, max_model_len=64)
    core.add(0, EngineCoreRequest(0, [3] * 30, SamplingParams(max_tokens=None)))
    core.add(0, EngineCoreRequest(1, [4] * 30, SamplingParams(max_tokens=None)))
    results = run(core)
    assert [len(results[0, n][0]) for n in range(2)] == [34, 34]
    assert results[0, 1][0] == expected_tokens([4] * 30, 34)


def test_the_models_end_of_sequence_token_ends_a_request():
    tokens = expected_tokens([1, 2, 3], 10)
    core = make_core(eos_token_ids=(tokens[4],))
    core.add(0, EngineCoreRequest(0, [1, 2, 3], SamplingParams(max_tokens=10)))
    end = tokens.index(tokens[4]) + 1
    assert run(core) == {(0, 0): (tokens[:end], ["stop"])}


def test_an_aborted_request_gets_a_last_row_without_a_token():
    core = make_core()
    for number in range(3):
        core.add(0, EngineCoreRequest(number, [1, 2], SamplingParams(max_tokens=5)))
    core.step()
    columns = core.abort(0, [2, 0])
    assert (columns.numbers, columns.counts, columns.token_ids) == ([2, 0], [0, 0], [])
    assert columns.finishes == [FinishReason.ABORT] * 2
    assert set(run(core)) == {(0, 1)}


def test_an_abort_of_a_waiting_request_is_reported_too():
    core = make_core(num_seqs=1)
    core.add(0, EngineCoreRequest(0, [1], SamplingParams()))
    core.add(0, EngineCoreRequest(1, [1], SamplingParams()))
    core.step()
    assert core.abort(0, [1]).numbers == [1]


@pytest.mark.parametrize("numbers", [[0], [7], [0, 7, 0]])
def test_requests_that_had_ended_are_not_reported_again(numbers):
    core = make_core()
    core.add(0, EngineCoreRequest(0, [1], SamplingParams(max_tokens=1)))
    run(core)
    assert core.abort(0, numbers).numbers == []


def test_a_number_aborted_twice_is_reported_once():
    core = make_core()
    core.add(0, EngineCoreRequest(0, [1], SamplingParams()))
    assert core.abort(0, [0, 0]).numbers == [0]


def test_a_client_can_abort_only_its_own_requests():
    core = make_core()
    core.add(1, EngineCoreRequest(0, [1], SamplingParams()))
    assert core.abort(2, [0]).numbers == []
    assert core.scheduler.has_unfinished()


def test_all_blocks_are_free_when_idle():
    core = make_core()
    core.add(0, EngineCoreRequest(0, [1] * 20, SamplingParams(max_tokens=5)))
    core.step()
    assert core.num_used_blocks == 6 or core.num_used_blocks == 5
    run(core)
    assert core.num_used_blocks == 0
    core.scheduler.check_integrity()


@pytest.mark.parametrize(("caching", "cached"), [(True, 8), (False, 0)])
def test_the_first_columns_of_a_request_report_its_cache_hit(caching, cached):
    core = make_core(caching=caching)
    for number in range(2):
        core.add(0, EngineCoreRequest(number, list(range(10)), SamplingParams(max_tokens=2)))
        columns = core.step()[0]
        last = core.step()[0]
    assert (columns.cached_rows, columns.cached_counts) == ([0], [cached])
    assert last.cached_rows == []


def cached_after_reset(core):
    core.add(0, EngineCoreRequest(1, list(range(10)), SamplingParams(max_tokens=1)))
    return core.step()[0].cached_counts


def test_a_reset_forgets_prefixes():
    core = make_core()
    core.add(0, EngineCoreRequest(0, list(range(10)), SamplingParams(max_tokens=1)))
    run(core)
    assert core.reset_prefix_cache() is True
    assert cached_after_reset(core) == [0]


def test_a_reset_while_requests_run_does_nothing():
    core = make_core()
    core.add(0, EngineCoreRequest(0, list(range(10)), SamplingParams(max_tokens=3)))
    core.step()
    assert core.reset_prefix_cache() is False
    run(core)
    assert cached_after_reset(core) == [8]


def test_different_cache_salts_share_no_prefix():
    core = make_core()
    core.add(0, EngineCoreRequest(0, list(range(10)), SamplingParams(max_tokens=1), cache_salt="a"))
    run(core)
    core.add(0, EngineCoreRequest(1, list(range(10)), SamplingParams(max_tokens=1), cache_salt="b"))
    assert core.step()[0].cached_counts == [0]


@pytest.mark.parametrize("seed", [0, 7, -(2**63), 2**63 - 1])
def test_the_seed_of_a_request_is_used_unchanged(seed):
    core = make_core()
    core.add(0, EngineCoreRequest(0, [1], SamplingParams(max_tokens=1), seed=seed))
    run(core)
    assert admitted_seeds(core) == [seed]


def test_a_preempted_request_keeps_its_seed():
    core = make_core(num_blocks=6, max_model_len=24, caching=False)
    for number in range(3):
        core.add(0, EngineCoreRequest(number, [number + 1] * 8, SamplingParams(max_tokens=8)))
    run(core)
    by_prompt = {}
    for plan in core.runner.plans:
        for admission in plan.new_requests:
            by_prompt.setdefault(admission.token_ids[0], []).append(admission.seed)
    assert max(map(len, by_prompt.values())) > 1
    assert all(len(set(seeds)) == 1 for seeds in by_prompt.values())


def test_a_frozen_engine_runs_no_step_and_then_continues_with_the_same_tokens():
    core = make_core()
    core.add(0, EngineCoreRequest(1, [1, 2, 3], SamplingParams(max_tokens=9)))
    core.step()
    core.step()
    assert core.pause(0, PauseMode.KEEP) == 1
    core.add(0, EngineCoreRequest(2, [4, 5], SamplingParams(max_tokens=3)))
    assert [core.step() for _ in range(3)] == [{}] * 3
    assert core.resume(0)
    results = run(core)
    assert results[0, 1][0] == expected_tokens([1, 2, 3], 9)[2:]
    assert results[0, 2][0] == expected_tokens([4, 5], 3)


def test_a_pause_with_mode_abort_sends_last_rows_to_every_front_end():
    core = make_core(num_seqs=1)
    core.add(0, EngineCoreRequest(1, [1], SamplingParams(max_tokens=9)))
    core.add(2, EngineCoreRequest(1, [2], SamplingParams(max_tokens=9)))
    core.step()
    assert core.pause(0, PauseMode.ABORT) == 0
    ended = core.take_outputs()
    assert [(place, c.numbers, c.finishes) for place, c in ended] == [
        (0, [1], [FinishReason.ABORT]),
        (2, [1], [FinishReason.ABORT]),
    ]
    assert core.take_outputs() == []
    core.add(0, EngineCoreRequest(1, [1], SamplingParams(max_tokens=2)))
    assert core.step() == {}
    core.resume(0)
    assert run(core) == {(0, 1): (expected_tokens([1], 2), ["length"])}


def test_a_pause_with_mode_wait_finishes_requests_and_rejects_new_ones():
    core = make_core(num_seqs=1)
    core.add(0, EngineCoreRequest(1, [1], SamplingParams(max_tokens=3)))
    core.add(0, EngineCoreRequest(2, [2], SamplingParams(max_tokens=3)))
    assert core.pause(5, PauseMode.WAIT) == 2
    rejected = core.add(0, EngineCoreRequest(3, [3], SamplingParams(max_tokens=3)))
    assert rejected is not None
    assert rejected.is_retryable
    assert "try again" in rejected.message
    assert len(run(core, clients=(0,))) == 2
    assert core.pause(5, PauseMode.WAIT) == 0
    rejected = core.add(0, EngineCoreRequest(3, [3], SamplingParams(max_tokens=3)))
    assert rejected is not None
    assert rejected.is_retryable
    assert core.resume(5)
    assert core.add(0, EngineCoreRequest(3, [3], SamplingParams(max_tokens=3))) is None


def test_an_engine_continues_when_the_last_pause_ends():
    core = make_core()
    core.pause(0, PauseMode.KEEP)
    core.pause(1, PauseMode.KEEP)
    assert not core.resume(0)
    assert core.resume(1)


def test_a_reset_can_preempt_running_requests_which_are_recomputed():
    core = make_core(num_seqs=2)
    prompts = {1: [1, 2, 3, 4, 5, 6], 2: [7, 8, 9], 3: [4, 4]}
    for number, prompt in prompts.items():
        core.add(0, EngineCoreRequest(number, prompt, SamplingParams(max_tokens=9)))
    for _ in range(3):
        core.step()
    assert not core.reset_prefix_cache()
    assert core.reset_prefix_cache(preempt_running=True)
    core.scheduler.check_integrity()
    results = run(core)
    for number, prompt in prompts.items():
        expected = expected_tokens(prompt, 9)
        tokens, ends = results[0, number]
        assert tokens == expected[len(expected) - len(tokens) :]
        assert ends == ["length"]
    first = next(plan for plan in core.runner.plans[3:])
    assert first.starts == [0] * len(first.starts)


def test_a_request_that_is_aborted_during_its_step_gets_no_token():
    core = make_core()
    core.add(0, EngineCoreRequest(1, [1], SamplingParams(max_tokens=1)))
    core.add(0, EngineCoreRequest(2, [2], SamplingParams(max_tokens=1)))
    plan = core.scheduler.schedule()
    result = core.runner.execute(plan)
    columns = core.abort(0, [1])
    assert (columns.numbers, columns.finishes) == ([1], [FinishReason.ABORT])
    assert core.scheduler.apply(plan, result)[0].numbers == [2]
    assert core.abort(0, [1]).numbers == []
    core.scheduler.check_integrity()


def test_the_first_columns_of_a_request_report_when_it_was_queued_and_scheduled():
    core = make_core(num_seqs=1)
    before = monotonic_ns()
    core.add(0, EngineCoreRequest(0, [1], SamplingParams(max_tokens=2)))
    core.add(0, EngineCoreRequest(1, [2], SamplingParams(max_tokens=1)))
    added = monotonic_ns()
    columns = [core.step()[0] for _ in range(3)]
    assert columns[1].queued_ns == columns[1].scheduled_ns == []
    ((queued,), (scheduled,)), ((late_queued,), (late_scheduled,)) = (
        (columns[i].queued_ns, columns[i].scheduled_ns) for i in (0, 2)
    )
    assert before <= queued <= late_queued <= added <= scheduled < late_scheduled <= monotonic_ns()


def preempted_core():
    """A core after the first preemption of two requests that do not fit into the KV cache."""
    core = make_core(num_blocks=8, caching=True)
    for number in range(2):
        core.add(0, EngineCoreRequest(number, [number] * 8, SamplingParams(max_tokens=16)))
    outputs = []
    while not core.scheduler.stats.preemptions:
        outputs.append(core.step()[0])
    return core, outputs


def test_the_last_row_of_a_preempted_request_reports_the_number_of_preemptions():
    core, _ = preempted_core()
    found = {}
    while core.scheduler.has_unfinished():
        columns = core.step().get(0)
        if columns is not None:
            for row, count in zip(columns.preempted_rows, columns.preempted_counts, strict=True):
                assert columns.finishes[row]
                found[columns.numbers[row]] = count
    assert found == {1: core.scheduler.stats.preemptions}


def test_the_last_row_of_an_aborted_request_reports_the_number_of_preemptions():
    core, _ = preempted_core()
    columns = core.abort(0, [0, 1])
    assert (columns.preempted_rows, columns.preempted_counts) == ([1], [1])


def test_the_row_of_an_aborted_request_reports_its_drafts():
    core = make_core()
    for number in range(2):
        core.add(0, EngineCoreRequest(number, [1, 2], SamplingParams(max_tokens=16)))
    core.step()
    request = core.scheduler.requests()[1]
    request.num_draft_tokens, request.num_accepted_tokens = 5, 2
    columns = core.abort(0, [0, 1])
    assert columns.drafted_rows == [columns.numbers.index(request.number)]
    assert (columns.drafted_counts, columns.accepted_counts) == ([5], [2])


def test_recomputed_tokens_do_not_count_as_hits():
    core, _ = preempted_core()
    run(core)
    stats = core.scheduler.stats
    assert stats.preemptions > 0
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens, stats.prompt_tokens) == (16, 0, 16)


class TimingRunner(FakeRunner):
    """A fake runner that reports when it computed."""

    def execute(self, plan):
        began_ns = perf_counter_ns()
        result = super().execute(plan)
        result.computing_ns = self.computing_ns = began_ns, perf_counter_ns()
        return result


@pytest.mark.parametrize("runner", [FakeRunner, TimingRunner])
def test_the_phases_of_a_step_leave_no_gaps(runner):
    core = make_core()
    core.runner = runner(core.info)
    core.add(0, EngineCoreRequest(0, [1] * 10, SamplingParams(max_tokens=3)))
    began_ns = perf_counter_ns()
    run(core)
    timings = core.timings
    spent = [getattr(timings, f"{name}_ns") for name in STEP_PHASES]
    assert 0 < sum(spent) <= perf_counter_ns() - began_ns
    assert timings.schedule_ns > 0 < timings.apply_ns
    assert list(timings.moments_ns) == sorted(timings.moments_ns)
    if runner is TimingRunner:
        assert timings.moments_ns[2:4] == core.runner.computing_ns
        assert min(spent) > 0
    else:
        assert timings.sample_ns == 0 < timings.execute_ns
