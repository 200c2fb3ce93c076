"""The reported log-probabilities: their values, the logits they come from, and their order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shmllm.core.plan import NewRequest, StepPlan
from shmllm.params.sampling import SamplingParams
from shmllm.worker import scoring
from shmllm.worker.batch import InputBatch
from shmllm.worker.cpu.sampler import CpuSampler
from shmllm.worker.scoring import ALL, score_in_pieces, score_tokens

SIZE = 40


def logits_of(rows, seed=1):
    return torch.tensor(np.random.default_rng(seed).normal(0, 3, (rows, SIZE)), dtype=torch.float32)


def log_softmax(logits):
    wide = logits.numpy().astype(np.float64)
    shifted = wide - wide.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def split(scored):
    """Return (logprob, rank, [(id, logprob), ...]) for each token."""
    ends = np.cumsum(scored.ks)
    return [
        (
            float(scored.logprobs[j]),
            int(scored.ranks[j]),
            list(
                zip(
                    scored.top_ids[end - k : end].tolist(),
                    scored.top_logprobs[end - k : end].tolist(),
                    strict=True,
                )
            ),
        )
        for j, (k, end) in enumerate(zip(scored.ks, ends, strict=True))
    ]


@pytest.mark.parametrize(
    "ks", [[0, 0, 0], [4, 4, 4], [0, 3, 7], [ALL, 2, 0], [ALL] * 3, [99, 1, 1]], ids=str
)
def test_scores_are_those_of_a_log_softmax(ks):
    logits, tokens = logits_of(3), torch.tensor([5, 39, 0])
    expected = log_softmax(logits)
    for row, (logprob, rank, top) in enumerate(split(score_tokens(logits, tokens, ks, True))):
        own = expected[row]
        assert logprob == pytest.approx(own[tokens[row]], abs=1e-5)
        assert rank == 1 + (own > own[tokens[row]]).sum()
        k = SIZE if ks[row] == ALL else min(ks[row], SIZE)
        assert [token for token, _ in top] == np.argsort(-own)[:k].tolist()
        assert [value for _, value in top] == pytest.approx(np.sort(own)[::-1][:k], abs=1e-5)


def test_raw_logits_are_reported_unchanged():
    logits, tokens = logits_of(2), torch.tensor([5, 6])
    scored = score_tokens(logits, tokens, [2, 2], False)
    assert scored.logprobs.tolist() == logits[[0, 1], [5, 6]].tolist()
    assert scored.top_logprobs.tolist() == logits.topk(2).values.ravel().tolist()


@pytest.mark.parametrize("k", [0, 3, ALL])
@pytest.mark.parametrize("rows_at_once", [1, 3, 7, 100])
def test_scores_in_pieces_equal_those_at_once(monkeypatch, rows_at_once, k):
    monkeypatch.setattr(scoring, "WORKSPACE_BYTES", rows_at_once * 4 * scoring._COPIES * SIZE)
    logits, tokens = logits_of(7), torch.arange(7)
    asked = []

    def logits_between(begin, end):
        asked.append(end - begin)
        return logits[begin:end]

    pieces = score_in_pieces(7, SIZE, logits_between, tokens, k, True)
    assert split(pieces) == split(score_tokens(logits, tokens, [k] * 7, True))
    assert max(asked) <= rows_at_once
    assert sum(asked) == 7


def test_the_workspace_of_a_large_vocabulary_stays_below_256_mib():
    """The logits have 8k rows of 152k entries; each row in a piece needs another 1.8 MB."""
    rows = []
    vocab_size, k = 152_000, 20

    def logits_between(begin, end):
        rows.append(end - begin)
        return torch.zeros(end - begin, vocab_size)

    score_in_pieces(100, vocab_size, logits_between, torch.zeros(100, dtype=torch.int64), k, True)
    # Logits, log-probabilities, and the arrays of the two comparisons.
    assert max(rows) * vocab_size * (4 + 4 + 4) <= 256 * 2**20


def sampler_of(mode, *options):
    batch = InputBatch(len(options), 16, 8, SIZE)
    plan = StepPlan(step=0)
    for row, each in enumerate(options):
        params = SamplingParams(**each)
        plan.new_requests.append(NewRequest(row, [1], [[1]], params, row, 0, (), 1))
    batch.update(plan)
    return CpuSampler(batch, mode)


def run(mode, logits, *options):
    rows = np.arange(len(options))
    return sampler_of(mode, *options)(logits.clone(), rows, np.full(len(rows), 1))


BIASED = {"temperature": 0.5, "logprobs": 3, "top_k": 2, "logit_bias": {3: 20.0, 4: 19.5}}
GREEDY = {"temperature": 0, "logprobs": 3, "logit_bias": {3: 20.0, 4: 19.5}}


@pytest.mark.parametrize("options", [BIASED, GREEDY], ids=["drawn", "greedy"])
@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits"])
def test_raw_modes_report_the_models_numbers(options, mode):
    logits = logits_of(1)
    result = run(mode, logits, options)
    ((value, _, top),) = split(result.logprobs)
    expected = log_softmax(logits)[0] if mode == "raw_logprobs" else logits[0].numpy()
    assert result.token_ids[0] in (3, 4)
    assert value == pytest.approx(expected[result.token_ids[0]], abs=1e-5)
    assert [token for token, _ in top] == np.argsort(-expected)[:3].tolist()


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
def test_processed_modes_report_the_numbers_that_the_token_was_drawn_from(mode):
    logits = logits_of(2)
    drawn, greedy = split(run(mode, logits, BIASED, GREEDY).logprobs)
    edited = logits.clone()
    edited[:, 3] += 20
    edited[:, 4] += 19.5
    values = edited / torch.tensor([[0.5], [1.0]])
    outside = values[0] < values[0].topk(2).values[1]
    values[0, outside] = -torch.inf
    if mode == "processed_logprobs":
        values = values.log_softmax(1)
    for row, (_, _, top) in enumerate((drawn, greedy)):
        best = values[row].topk(3)
        assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [token for token, _ in top][:2] == best.indices.tolist()[:2]


def test_only_rows_that_ask_are_scored_and_in_their_order():
    logits = logits_of(4)
    options = [{"logprobs": 1}, {}, {"logprobs": 0}, {}]
    options = [{"temperature": 0} | each for each in options]
    scored = run("raw_logprobs", logits, *options).logprobs
    expected = log_softmax(logits)
    assert scored.ks == [1, 0]
    assert scored.logprobs == pytest.approx(expected[[0, 2]].max(axis=1), abs=1e-5)
    assert run("raw_logprobs", logits, {}, {"temperature": 0}).logprobs is None


def test_a_new_request_in_a_row_does_not_ask_for_logprobs():
    sampler = sampler_of("raw_logprobs", {"temperature": 0, "logprobs": 2})
    plan = StepPlan(step=1)
    plan.new_requests.append(NewRequest(0, [1], [[1]], SamplingParams(temperature=0), 0, 0, (), 1))
    sampler._batch.update(plan)
    assert sampler(logits_of(1), np.array([0]), np.array([1])).logprobs is None


def test_a_selection_of_tokens_has_their_scores_only():
    logits, tokens = logits_of(4), torch.arange(4)
    scored = score_tokens(logits, tokens, [2, 0, 3, 1], True)
    columns = scored.columns([range(1), range(2, 3)], [5, 8])
    whole = split(scored)
    assert (columns.rows, columns.ks) == ([5, 8], [2, 3])
    assert columns.logprobs.tolist() == [whole[0][0], whole[2][0]]
    assert columns.top_ids.tolist() == [token for j in (0, 2) for token, _ in whole[j][2]]
