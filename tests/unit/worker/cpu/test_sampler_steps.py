"""The logits processors and filters equal a simple reference that applies one after another."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmllm.core.plan import NewRequest, StepPlan
from shmllm.params.sampling import SamplingParams
from shmllm.worker.batch import InputBatch
from shmllm.worker.cpu.sampler import CpuSampler

VOCAB_SIZE = 23
MAX_LEN = 64
NUM_ROWS = 6
NEVER = -np.inf


def forbidden_tokens(output, params, bad_words, stop_ids):
    if params.allowed_token_ids is not None:
        yield from set(range(VOCAB_SIZE)) - set(params.allowed_token_ids)
    for word in bad_words:
        *before, last = word
        if len(before) <= len(output) and output[len(output) - len(before) :] == before:
            yield last
    if len(output) < params.min_tokens:
        yield from stop_ids


def reference_logits(logits, prompt, output, params, bad_words=(), stop_ids=()):
    """Compute the logits that the sampler should draw from, in Python's floats, entry by entry."""
    logits = [float(x) for x in logits]
    for token in forbidden_tokens(output, params, bad_words, stop_ids):
        logits[token] = NEVER
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in set(prompt) | set(output):
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(output):
        logits[token] -= params.frequency_penalty * output.count(token)
        logits[token] -= params.presence_penalty
    if not params.is_greedy:
        logits = [x / params.temperature for x in logits]
    return np.array(logits)


def make(requests, mode="processed_logits"):
    """Make a sampler with requests of (row, prompt, output so far, params, bad words, stop ids)."""
    batch = InputBatch(NUM_ROWS, MAX_LEN, 8, VOCAB_SIZE)
    add_requests(batch, requests)
    return CpuSampler(batch, mode), batch


def add_requests(batch, requests):
    plan = StepPlan(step=0)
    for row, prompt, output, params, bad_words, stop_ids in requests:
        plan.new_requests.append(
            NewRequest(
                row=row,
                token_ids=[*prompt, *output],
                block_ids=[[1]],
                params=params,
                seed=row,
                min_position=len(prompt) + params.min_tokens,
                forbidden_ids=tuple(stop_ids) if params.min_tokens else (),
                num_prompt_tokens=len(prompt),
                bad_words=tuple(map(tuple, bad_words)),
            )
        )
    batch.update(plan)


def seen_logits(sampler, logits, requests):
    """Return the logits that the sampler drew from, (rows, VOCAB_SIZE)."""
    rows = np.array([request[0] for request in requests])
    positions = np.array([len(prompt) + len(output) for _, prompt, output, *_ in requests])
    result = sampler(torch.tensor(logits, dtype=torch.float32), rows, positions)
    columns = result.logprobs
    seen = np.zeros((len(requests), VOCAB_SIZE))
    ids = columns.top_ids.reshape(len(requests), VOCAB_SIZE)
    np.put_along_axis(seen, ids, columns.top_logprobs.reshape(ids.shape), axis=1)
    return seen, result.token_ids


OPTIONS = {
    "allowed_token_ids": {"allowed_token_ids": [3, 5, 22]},
    "logit_bias": {"logit_bias": {2: 4.5, 7: -100, 22: float("-inf")}},
    "presence": {"presence_penalty": 1.5},
    "negative presence": {"presence_penalty": -1.5},
    "frequency": {"frequency_penalty": 0.75},
    "negative frequency": {"frequency_penalty": -2},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.4},
    "all penalties": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.6,
    },
    "temperature": {"temperature": 0.3},
    "min_tokens": {"min_tokens": 9},
    "min_tokens reached": {"min_tokens": 2},
    "everything": {
        "allowed_token_ids": [0, 1, 2, 3, 4, 5, 9],
        "logit_bias": {1: 2.0, 3: -1.0, 9: 0.5},
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.9,
        "min_tokens": 9,
        "temperature": 1.7,
    },
}


def params_of(options):
    return SamplingParams(**{"temperature": 0, "max_tokens": 30, "logprobs": -1} | options)


def logits_of(seed, count=1):
    return np.random.default_rng(seed).normal(0, 3, (count, VOCAB_SIZE)).astype(np.float32)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("output", [[], [4], [4, 9, 4, 1, 4]], ids=len)
def test_a_parameter_changes_the_logits_as_the_reference_does(options, output):
    request = (2, [1, 2, 2, 8], output, params_of(options), [], [5, 6])
    logits = logits_of(len(output))
    seen, tokens = seen_logits(make([request])[0], logits, [request])
    expected = reference_logits(logits[0], *request[1:])
    assert seen[0] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    if params_of(options).is_greedy:
        assert tokens[0] == expected.argmax()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("options", "best"),
    [
        ({"logit_bias": {2: 1e308}}, {2}),
        ({"logit_bias": {2: -1e308, 3: 1e39}, "temperature": 0.01}, {3}),
        ({"repetition_penalty": 1e39}, set(range(VOCAB_SIZE))),
        ({"repetition_penalty": 1e-320}, {1, 8}),
        ({"repetition_penalty": 1e-320, "temperature": 0.01}, {1, 8}),
    ],
    ids=str,
)
def test_numbers_that_float32_does_not_have_leave_logits_finite(options, best):
    request = (0, [1, 8], [], params_of(options | {"seed": 3}), [], [])
    logits = np.abs(logits_of(7))
    seen, tokens = seen_logits(make([request])[0], logits, [request])
    assert np.isfinite(seen).all()
    assert tokens[0] in best


@pytest.mark.parametrize(
    ("words", "output", "banned"),
    [
        ([[7]], [], {7}),
        ([[7], [8]], [1, 2], {7, 8}),
        ([[7, 8]], [], set()),
        ([[7, 8]], [7], {8}),
        ([[7, 8]], [7, 1], set()),
        ([[7, 8, 9]], [1, 7, 8], {9}),
        ([[7, 8, 9], [8, 3]], [7, 8], {9, 3}),
        ([[7, 8, 9]], [8], set()),
        ([[2, 8]], [], set()),
    ],
    ids=str,
)
def test_bad_words_ban_the_token_that_completes_them_in_the_output(words, output, banned):
    """The prompt ends with the first token of [2, 8], and bad words ignore the prompt."""
    request = (0, [1, 2], output, params_of({}), words, [])
    logits = logits_of(3)
    seen, _ = seen_logits(make([request])[0], logits, [request])
    assert set(np.flatnonzero(np.isinf(seen[0])).tolist()) == banned
    assert seen[0] == pytest.approx(reference_logits(logits[0], *request[1:]), abs=1e-5)


token = st.integers(0, VOCAB_SIZE - 1)


@st.composite
def one_request(draw, row):
    options = {
        "temperature": draw(st.sampled_from([0, 0, 0.5, 1.0, 1.9])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.0, 0.5, 1.8])),
        "frequency_penalty": draw(st.sampled_from([0.0, -0.7, 1.1])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.8, -1.4])),
        "min_tokens": draw(st.sampled_from([0, 0, 3])),
        "logit_bias": draw(st.none() | st.dictionaries(token, st.floats(-5, 5), max_size=3)),
        "allowed_token_ids": draw(st.none() | st.lists(token, min_size=3, max_size=9)),
    }
    words = draw(st.lists(st.lists(token, min_size=1, max_size=3), max_size=3))
    return (
        row,
        draw(st.lists(token, min_size=1, max_size=8)),
        draw(st.lists(token, max_size=8)),
        params_of(options),
        words,
        draw(st.lists(token, max_size=2)),
    )


@settings(max_examples=120, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_random_batches_equal_the_reference_row_by_row(data, seed):
    rows = data.draw(st.permutations(range(NUM_ROWS)))[: data.draw(st.integers(1, NUM_ROWS))]
    requests = [data.draw(one_request(row)) for row in rows]
    logits = logits_of(seed, len(requests))
    seen, tokens = seen_logits(make(requests)[0], logits, requests)
    for index, request in enumerate(requests):
        expected = reference_logits(logits[index], *request[1:])
        assert seen[index] == pytest.approx(expected, rel=1e-4, abs=1e-4)
        if request[3].is_greedy and np.isfinite(expected).any():
            best = np.sort(expected)[-2:]
            assert tokens[index] == expected.argmax() or best[1] - best[0] < 1e-4


def test_penalties_count_the_tokens_of_each_step():
    """The steps of one row: its counts are updated, and not recomputed."""
    params = params_of({"frequency_penalty": 0.5, "repetition_penalty": 1.4})
    prompt, output = [1, 2, 2], []
    sampler, batch = make([(3, prompt, output, params, [], [])])
    for step in range(40):
        request = (3, prompt, output, params, [], [])
        logits = logits_of(step)
        seen, tokens = seen_logits(sampler, logits, [request])
        assert seen[0] == pytest.approx(reference_logits(logits[0], *request[1:]), abs=1e-4)
        batch.token_ids[3, len(prompt) + len(output)] = tokens[0]
        output.append(int(tokens[0]))
    assert len(set(output)) > 5


def test_a_new_request_in_a_row_has_none_of_the_old_state():
    heavy = params_of(OPTIONS["everything"])
    sampler, batch = make([(1, [1, 2], [3, 4], heavy, [[5]], [6])])
    logits = logits_of(1)
    request = (1, [1, 2], [3, 4], heavy, [[5]], [6])
    seen_logits(sampler, logits, [request])
    plain = (1, [9], [], params_of({}), [], [])
    add_requests(batch, [plain])
    seen, _ = seen_logits(sampler, logits, [plain])
    assert seen[0] == pytest.approx(logits[0])
    again = (1, [9], [], params_of({"presence_penalty": 1.0}), [], [])
    add_requests(batch, [again])
    seen, _ = seen_logits(sampler, logits, [again])
    assert seen[0] == pytest.approx(logits[0])


def test_rows_without_logits_processors_are_unchanged():
    requests = [
        (0, [1], [2], params_of({}), [], []),
        (1, [1], [2], params_of(OPTIONS["everything"]), [[3]], [4]),
        (2, [1], [2], params_of({}), [], []),
    ]
    logits = logits_of(7, 3)
    seen, _ = seen_logits(make(requests)[0], logits, requests)
    assert np.array_equal(seen[0].astype(np.float32), logits[0])
    assert np.array_equal(seen[2].astype(np.float32), logits[2])


def test_a_mask_is_applied_before_everything_else():
    """A bias cannot allow tokens that the mask excludes, also in greedy rows."""
    params = params_of({"logit_bias": {4: 50.0}})
    sampler, _ = make([(0, [1], [], params, [], [])])

    def mask(logits):
        logits[:, 4] = -torch.inf

    result = sampler(torch.tensor(logits_of(2)), np.array([0]), np.array([1]), mask)
    assert result.token_ids[0] != 4


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_row_without_allowed_tokens_still_gives_a_token(temperature):
    options = {"allowed_token_ids": [5], "temperature": temperature, "top_p": 0.5}
    request = (0, [1], [], params_of(options), [[5]], [])
    result = make([request])[0](torch.tensor(logits_of(2)), np.array([0]), np.array([1]))
    assert 0 <= result.token_ids[0] < VOCAB_SIZE


def test_ids_outside_of_the_vocabulary_are_ignored():
    options = {"allowed_token_ids": [5, 500], "logit_bias": {600: 9.0, 5: 1.0}, "min_tokens": 3}
    request = (0, [1], [], params_of(options), [[800], [1, 900]], [700])
    result = make([request])[0](torch.tensor(logits_of(2)), np.array([0]), np.array([1]))
    assert result.token_ids[0] == 5
