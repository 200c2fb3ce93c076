"""The CPU's sampler: filters equal a simple reference, and draws follow the distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmllm.core.plan import NewRequest, StepPlan
from shmllm.params.sampling import SamplingParams
from shmllm.worker.batch import InputBatch
from shmllm.worker.cpu import filters
from shmllm.worker.cpu.filters import keep_top_k_top_p
from shmllm.worker.cpu.sampler import CpuSampler

NUM_ROWS = 8
VOCAB_SIZE = 1000


def make_sampler(*requests, vocab_size=VOCAB_SIZE):
    """Make a sampler. `requests` has for each row options of SamplingParams, and seed,
    min_position and forbidden_ids."""
    batch = InputBatch(NUM_ROWS, 16, 8, vocab_size)
    plan = StepPlan(step=0)
    for row, options in enumerate(requests):
        options = dict(options)
        seed = options.pop("seed", row)
        min_position = options.pop("min_position", 0)
        forbidden_ids = options.pop("forbidden_ids", ())
        params = SamplingParams(**options)
        plan.new_requests.append(
            NewRequest(row, [1], [[1]], params, seed, min_position, forbidden_ids)
        )
    batch.update(plan)
    return CpuSampler(batch)


def sample(sampler, logits, rows, positions):
    logits = torch.tensor(np.asarray(logits), dtype=torch.float32)
    return sampler(logits, np.asarray(rows), np.asarray(positions)).token_ids.tolist()


def draw(logits, options, count, seed=0):
    """Return `count` draws of one request, one for each position."""
    sampler = make_sampler({"seed": seed} | options)
    drawn = []
    for begin in range(0, count, 500):
        positions = np.arange(begin, min(begin + 500, count))
        rows = np.zeros(len(positions), np.int64)
        drawn += sample(sampler, np.tile(logits, (len(positions), 1)), rows, positions)
    return np.array(drawn)


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def reference_distribution(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Apply temperature, min_p, top_k and top_p, in this order, one at a time."""
    logits = np.asarray(logits, np.float64) / temperature
    kept = softmax(logits) >= min_p * softmax(logits).max()
    order = [i for i in np.argsort(-logits, kind="stable") if kept[i]]
    if top_k > 0:
        order = order[:top_k]
    probabilities = softmax(logits[order])
    nucleus, mass = [], 0.0
    for index, probability in zip(order, probabilities, strict=True):
        if nucleus and mass >= top_p:
            break
        nucleus.append(index)
        mass += probability
    result = np.zeros(len(logits))
    result[nucleus] = softmax(logits[nucleus])
    return result


def chi_square_limit(freedom):
    """Return the limit that chi-square exceeds once in 10,000 tests (the approximation of Wilson
    and Hilferty)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 3.72 * part**0.5) ** 3


def assert_drawn_from(drawn, probabilities):
    counts = np.bincount(drawn, minlength=len(probabilities))
    assert not counts[probabilities == 0].any(), "a token was drawn that the filters exclude"
    likely = probabilities * len(drawn) >= 5
    assert counts[~likely].sum() <= 20 + 3 * probabilities[~likely].sum() * len(drawn)
    expected = probabilities[likely] * len(drawn)
    statistic = ((counts[likely] - expected) ** 2 / expected).sum()
    assert statistic < chi_square_limit(max(likely.sum() - 1, 1))


LOGITS = np.array([1.5, -0.5, 2.25, 0.0, 2.0, -3.0, 1.0, 0.5, -1.0, 1.75])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": -1},
        {"top_k": 100},
        {"top_p": 0.3},
        {"top_p": 0.75},
        {"top_p": 0.01},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"top_k": 5, "top_p": 0.6},
        {"temperature": 0.7, "min_p": 0.2, "top_k": 4, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.4},
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(options):
    probabilities = reference_distribution(LOGITS, **options)
    assert_drawn_from(draw(LOGITS, options, 20_000), probabilities)


def test_draws_over_seeds_follow_the_distribution_too():
    sampler = make_sampler(*[{}] * NUM_ROWS)
    drawn = []
    for seed in range(0, 8_000, NUM_ROWS):
        sampler._batch.seeds[:] = np.arange(seed, seed + NUM_ROWS)
        drawn += sample(sampler, np.tile(LOGITS, (NUM_ROWS, 1)), range(NUM_ROWS), [3] * NUM_ROWS)
    assert_drawn_from(np.array(drawn), reference_distribution(LOGITS))


def kept(logits, top_k, top_p):
    """Return the indices that keep_top_k_top_p keeps, for each row."""
    result = keep_top_k_top_p(
        torch.tensor(logits, dtype=torch.float32),
        torch.tensor(top_k, dtype=torch.int64),
        torch.tensor(top_p, dtype=torch.float32),
    )
    return [set(row.isfinite().nonzero().ravel().tolist()) for row in result], result


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(2, 40),
    rows=st.lists(
        st.tuples(st.integers(0, 45), st.sampled_from([0.05, 0.35, 0.6, 0.9, 0.99, 1.0])),
        min_size=1,
        max_size=4,
    ),
)
def test_each_row_keeps_its_own_top_k_and_nucleus(seed, size, rows):
    logits = np.random.default_rng(seed).normal(0, 2, (len(rows), size))
    sets, result = kept(logits, [k for k, _ in rows], [p for _, p in rows])
    for index, (top_k, top_p) in enumerate(rows):
        wanted = reference_distribution(logits[index], top_k=top_k, top_p=top_p)
        if top_p == 1.0:
            assert len(sets[index]) == (min(top_k, size) if top_k else size)
        mass = np.sort(wanted[wanted > 0].cumsum())
        if not np.isclose(mass, top_p, atol=1e-5).any():
            assert sets[index] == set(np.flatnonzero(wanted).tolist())
        for token in sets[index]:
            assert float(result[index, token]) == np.float32(logits[index, token])


@pytest.mark.parametrize(
    ("top_k", "top_p", "tokens"),
    [
        (2, 1.0, {0, 1, 2}),
        (1, 1.0, {0, 1, 2}),
        (4, 1.0, {0, 1, 2, 3}),
        (0, 0.25, {0}),
        (0, 0.4, {0, 1}),
    ],
)
def test_ties_with_the_last_of_top_k_stay_and_the_nucleus_takes_them_in_order(top_k, top_p, tokens):
    sets, _ = kept([[2.0, 2.0, 2.0, 1.0, 0.0]], [top_k], [top_p])
    assert sets == [tokens]


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(2, 60),
    spread=st.sampled_from([0.0, 0.3, 3.0]),
    rows=st.lists(
        st.tuples(st.integers(0, 65), st.sampled_from([1e-9, 0.3, 0.62, 0.97, 1.0])),
        min_size=1,
        max_size=5,
    ),
    num_candidates=st.integers(1, 20),
)
def test_few_candidates_give_the_same_result_as_sorting(
    set_num_candidates, seed, size, spread, rows, num_candidates
):
    """The logits are coarse, so that many are equal, and the candidates few, so that they often
    do not suffice."""
    values = np.random.default_rng(seed).normal(0, spread, (len(rows), size)).round(1)
    logits = torch.tensor(values, dtype=torch.float32)
    top_k = torch.tensor([k for k, _ in rows])
    top_p = torch.tensor([p for _, p in rows], dtype=torch.float32)
    set_num_candidates(num_candidates)
    expected = filters._keep_by_sorting(logits, top_k, top_p).numpy()
    found = keep_top_k_top_p(logits.clone(), top_k, top_p).numpy()
    for row in np.flatnonzero((expected != found).any(axis=1)):
        # The results may differ by one entry where a sum equals top_p to the last bit.
        differing = np.flatnonzero(np.isfinite(expected[row]) != np.isfinite(found[row]))
        kept = np.sort(softmax(np.where(np.isfinite(expected[row]), values[row], -np.inf)))
        assert len(differing) == 1, (expected[row], found[row], kept)


@pytest.fixture
def set_num_candidates(monkeypatch):
    return lambda count: monkeypatch.setattr(filters, "NUM_CANDIDATES", count)


@pytest.mark.parametrize("top_p", [1e-50, 1e-9, 0.5])
def test_the_best_token_is_always_kept(top_p):
    sets, _ = kept([[0.0, 9.0, 1.0]], [0], [top_p])
    assert sets == [{1}]


def test_top_p_of_one_keeps_tokens_of_probability_zero():
    sets, _ = kept([[0.0, -200.0, 5.0]], [0], [1.0])
    assert sets == [{0, 1, 2}]


@pytest.mark.parametrize("temperature", [0.01, 1e-2 + 1e-6, 0.05])
def test_low_temperatures_stay_finite_and_give_the_best_token(temperature):
    logits = np.array([30.0, -40.0, 31.0, 29.0])
    assert set(draw(logits, {"temperature": temperature}, 200)) == {2}


def test_min_p_is_measured_after_temperature():
    logits = np.log([0.6, 0.3, 0.1])
    assert set(draw(logits, {"min_p": 0.4}, 500)) == {0, 1}
    assert set(draw(logits, {"min_p": 0.4, "temperature": 0.5}, 500)) == {0}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("position", "allowed"), [(4, False), (5, True), (6, True)])
def test_forbidden_tokens_are_never_chosen_before_their_position(temperature, position, allowed):
    options = {"temperature": temperature, "min_position": 5, "forbidden_ids": (2, 4)}
    sampler = make_sampler(options)
    logits = np.where(np.isin(np.arange(6), (2, 4)), 20.0, 0.0)
    (token,) = sample(sampler, [logits], [0], [position])
    assert (token in (2, 4)) == allowed


def test_forbidden_tokens_of_a_row_do_not_affect_other_rows():
    forbidding = {"temperature": 0, "min_position": 9, "forbidden_ids": (1,)}
    sampler = make_sampler(forbidding, {"temperature": 0})
    assert sample(sampler, [[0.0, 5.0, 3.0]] * 2, [0, 1], [2, 2]) == [2, 1]


@pytest.mark.parametrize("forbidden_ids", [(), (3, 999), (999,)])
def test_forbidden_tokens_outside_the_vocabulary_are_ignored(forbidden_ids):
    options = {"temperature": 0, "min_position": 9, "forbidden_ids": forbidden_ids}
    sampler = make_sampler(options, vocab_size=4)
    expected = 1 if 3 in forbidden_ids else 3
    assert sample(sampler, [[0.0, 5.0, 1.0, 9.0]], [0], [2]) == [expected]


def test_greedy_rows_of_a_mixed_batch_take_the_largest_logit():
    options = [{"temperature": 0}, {"top_k": 3}, {"temperature": 0}, {"temperature": 2.0}]
    sampler = make_sampler(*options)
    random = np.random.default_rng(5)
    for position in range(50):
        logits = random.normal(0, 1, (4, 30))
        tokens = sample(sampler, logits, range(4), [position] * 4)
        assert [tokens[0], tokens[2]] == logits.astype(np.float32).argmax(1)[[0, 2]].tolist()


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.1}, {"min_p": 0.9}])
def test_filters_do_not_affect_greedy_rows(options):
    sampler = make_sampler({"temperature": 0} | options)
    assert sample(sampler, [[1.0, 1.0, 3.0, 2.9]], [0], [0]) == [2]


def test_greedy_sampling_takes_the_first_of_equal_logits():
    assert sample(make_sampler({"temperature": 0}), [[1.0, 4.0, 4.0]], [0], [0]) == [1]


MIXED = [
    {"seed": 11, "temperature": 0.8},
    {"seed": 12, "top_k": 4},
    {"temperature": 0},
    {"seed": 13, "top_p": 0.7, "temperature": 1.3},
    {"seed": 14, "min_p": 0.1},
    {"seed": 15, "min_position": 99, "forbidden_ids": (0, 1, 2)},
]


def test_a_draw_depends_on_nothing_else_in_the_batch():
    logits = np.random.default_rng(8).normal(0, 2, (6, 40))
    positions = np.arange(6) + 20
    together = sample(make_sampler(*MIXED), logits, range(6), positions)
    for index, options in enumerate(MIXED):
        alone = sample(make_sampler(options), [logits[index]], [0], [positions[index]])
        assert alone == [together[index]]


def test_a_draw_does_not_depend_on_row_or_order():
    logits = np.random.default_rng(9).normal(0, 2, (6, 40))
    together = sample(make_sampler(*MIXED), logits, range(6), [7] * 6)
    order = [4, 0, 5, 2, 1, 3]
    shuffled = make_sampler(*(MIXED[i] for i in order))
    assert sample(shuffled, logits[order], range(6), [7] * 6) == [together[i] for i in order]
    backwards = sample(shuffled, logits[order][::-1].copy(), range(5, -1, -1), [7] * 6)
    assert backwards == [together[i] for i in order][::-1]


def test_another_seed_or_position_gives_another_draw():
    logits = np.zeros(1000)
    by_seed = [draw(logits, {}, 1, seed=seed)[0] for seed in range(40)]
    by_position = draw(logits, {}, 40)
    assert len(set(by_seed)) > 35
    assert len(set(by_position.tolist())) > 35
