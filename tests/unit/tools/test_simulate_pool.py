"""The simulated pool: a case computed by hand, conservation, and every rule and load."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner
from simulate_pool import main
from simulated_pool.engine import Engine, Job, Limits, StepCost
from simulated_pool.experiment import COSTS, Case, run
from simulated_pool.fitting import fit
from simulated_pool.loads import LOADS, Draw, Request, arrive
from simulated_pool.rules import RULES, VARIANTS
from simulated_pool.run import Simulation

from shmllm.bench.summary import percentiles

SECOND_A_STEP = StepCost(1.0, 0.0, 0.0, 0.0)
TOKENS = StepCost(0.0, 1.0, 0.0, 0.0)
SMALL = Limits(max_num_seqs=4, max_num_batched_tokens=32, num_blocks=8, block_size=4)


def request(prompt: list[int], num_outputs: int, n: int = 1) -> Request:
    return Draw(0, SMALL.block_size).request(prompt, num_outputs, n)


def simulate(requests: list[Request], cost: StepCost, limits: Limits = SMALL) -> Simulation:
    engines = [Engine(cost, limits)]
    simulation = Simulation(engines, RULES["random"](engines, limits))
    simulation.run(requests)
    return simulation


def test_a_prompt_is_computed_in_chunks_and_each_token_takes_a_step() -> None:
    outcome = simulate([request([1] * 20, 3)], SECOND_A_STEP).outcome
    assert (outcome.ttft_s, outcome.e2e_s, outcome.busy_s) == ([1.0], [3.0], 3.0)
    chunked = Limits(max_num_batched_tokens=8, num_blocks=8, block_size=4)
    outcome = simulate([request([1] * 20, 3)], SECOND_A_STEP, chunked).outcome
    assert (outcome.ttft_s, outcome.e2e_s) == ([3.0], [5.0])


def test_a_cached_prefix_is_not_computed_again() -> None:
    first, second = request([1] * 10, 1), request([1] * 10, 1)
    second.after_s = 100.0
    outcome = simulate([first, second], TOKENS).outcome
    assert outcome.ttft_s == [10.0, 2.0]  # two blocks of four of the ten tokens
    assert outcome.num_cached == 8


def test_the_context_is_what_each_token_sees_before_it() -> None:
    outcome = simulate([request([1] * 4, 2)], StepCost(0.0, 0.0, 0.0, 1.0)).outcome
    assert outcome.ttft_s == [0 + 1 + 2 + 3]
    assert outcome.e2e_s == [6 + 4]


def test_completions_of_a_group_share_the_prompt_in_one_step() -> None:
    outcome = simulate([request([1] * 9, 1, n=3)], TOKENS).outcome
    assert outcome.ttft_s == [9.0 + 1 + 1] * 3


def test_one_engine_with_one_row_is_a_queue() -> None:
    limits = Limits(max_num_seqs=1, max_num_batched_tokens=32, num_blocks=8, block_size=4)
    requests = [request([each] * 3, 4) for each in range(5)]
    outcome = simulate(requests, SECOND_A_STEP, limits).outcome
    assert outcome.e2e_s == [4.0, 8.0, 12.0, 16.0, 20.0]
    assert outcome.ttft_s == [1.0, 5.0, 9.0, 13.0, 17.0]


def test_the_last_admitted_job_gives_way_when_no_block_is_free() -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=32, num_blocks=4, block_size=4)
    engine = Engine(SECOND_A_STEP, limits)
    jobs = [Job(8, 8, range(10 * each, 10 * each + 4), 0.0) for each in range(2)]
    for job in jobs:
        engine.add(job)
    ended = []
    while engine.begin_step() is not None:
        ended += [job for job in engine.end_step() if job.num_generated == job.num_outputs]
    assert ended == jobs
    assert engine.num_preemptions == 1
    assert engine.blocks.num_used == 0


def test_a_later_turn_waits_for_the_reply_and_finds_it_cached() -> None:
    first = Draw(0, SMALL.block_size).chat([7] * 4, 2, think_s=1.0)
    assert first.next_turn is not None
    limits = Limits(max_num_batched_tokens=2048, num_blocks=200, block_size=SMALL.block_size)
    outcome = simulate([first], SECOND_A_STEP, limits).outcome
    assert outcome.end_s == pytest.approx(sum(outcome.e2e_s) + first.next_turn.after_s)
    before = len(first.prompt) + first.num_outputs - 1  # the last token is not computed
    assert outcome.num_cached == before // SMALL.block_size * SMALL.block_size


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("rule", [*RULES, *VARIANTS])
def test_nothing_is_lost(load: str, rule: str) -> None:
    case = Case(load, 4, rule, COSTS["tiny"], divisor=20)
    outcome = run(case)
    requests = LOADS[load].make(Draw(case.seed, 16), case.size, case.num_requests)
    turns = []
    for each in requests:
        turn: Request | None = each
        while turn is not None:
            turns.append(turn)
            turn = turn.next_turn
    assert sum(outcome.num_sent) == len(turns)
    assert len(outcome.ttft_s) == len(outcome.e2e_s) == sum(len(each.hashes) for each in turns)
    assert outcome.num_outputs == sum(each.num_outputs * len(each.hashes) for each in turns)
    assert outcome.num_prompt == sum(len(each.prompt) * len(each.hashes) for each in turns)
    assert 0 <= outcome.num_cached < outcome.num_prompt
    assert outcome.busy_s <= case.size * outcome.end_s
    assert min(outcome.ttft_s) > 0


def test_blocks_are_free_at_the_end() -> None:
    requests = LOADS["groups"].make(Draw(0, 16), 1, 64)
    limits = Limits(num_blocks=200)
    engines = [Engine(COSTS["tiny"], limits) for _ in range(2)]
    Simulation(engines, RULES["shmllm"](engines, limits)).run(requests)
    assert [each.blocks.num_used for each in engines] == [0, 0]
    assert all(each.num_preemptions for each in engines)


def test_arrivals_have_the_rate() -> None:
    requests = [request([1], 1) for _ in range(4000)]
    arrive(requests, 50.0, seed=0)
    assert requests[-1].after_s == pytest.approx(80, rel=0.1)


def test_affinity_is_not_bought_with_waiting() -> None:
    """What decided the rule, in small: more hits than vLLM's, a lower p99 than hashing's."""
    found = {rule: run(Case("systems", 8, rule, COSTS["tiny"], divisor=4)) for rule in RULES}
    shares = {rule: each.num_cached / each.num_prompt for rule, each in found.items()}
    slow = {rule: percentiles(each.ttft_s)["p99"] for rule, each in found.items()}
    assert shares["shmllm"] > shares["vllm"]
    assert slow["shmllm"] < min(slow["vllm"], slow["random"], slow["hashing"])


def test_a_fit_finds_the_cost_that_made_the_steps() -> None:
    cost = StepCost(4e-4, 9e-5, 3e-5, 1e-7)
    draw = random.Random(0)
    steps = [(draw.randint(1, 2000), draw.randint(1, 64), draw.uniform(0, 1e5)) for _ in range(300)]
    rows = [(*each, cost.seconds(*each)) for each in steps]
    rows += [(t, r, c, 10 * seconds) for t, r, c, seconds in rows[:10]]  # another program's
    found = fit(rows)
    assert found.cost.token_s == pytest.approx(cost.token_s, rel=0.02)
    assert found.cost.step_s == pytest.approx(cost.step_s, rel=0.1)


def test_the_command_writes_table_record_and_picture(tmp_path: Path) -> None:
    plot, record = tmp_path / "pool.svg", tmp_path / "pool.json"
    options = ["--quick", "--sizes", "2", "--workers", "1"]
    done = CliRunner().invoke(main, [*options, "--json", str(record), "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    assert len(done.output.splitlines()) == 2 + len(LOADS) * len(RULES)
    assert {each["rule"] for each in json.loads(record.read_text())["cases"]} == set(RULES)
    assert plot.read_text().startswith("<svg")
