"""Compares the sampling reference with the CPU's sampler, and Philox with its known answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shmllm.core.plan import NewRequest
from shmllm.params.sampling import SamplingParams
from shmllm.worker.cpu.filters import keep_top_k_top_p
from shmllm.worker.logits_processors import LogitsState, apply_logits_processors
from shmllm.worker.scoring import score_tokens
from shmllm_kernels.reference.philox import gumbel_noise, philox
from shmllm_kernels.reference.sampling import SamplingColumns, draw, filtered, penalise, score

# Counters, keys and words from Random123's known answers for philox4x32 with ten rounds.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_known_answers(counter, key, words):
    got = philox(*(tuple(np.array([word], np.uint64) for word in part) for part in (counter, key)))
    assert [int(word[0]) for word in got] == words


def test_noise_has_the_gumbel_distribution_and_is_independent_by_seed_and_position():
    seeds, positions = np.array([1, 1, 2, -5]), np.array([3, 4, 3, 3])
    noise = gumbel_noise(seeds, positions, 40_000)
    assert np.array_equal(noise[:, :39_999], gumbel_noise(seeds, positions, 39_999))
    assert np.abs(np.corrcoef(noise) - np.eye(4)).max() < 0.05
    assert abs(np.corrcoef(noise[0, 1:], noise[0, :-1])[0, 1]) < 0.05
    # Five standard errors of the mean and the variance of a Gumbel distribution.
    assert noise.mean() == pytest.approx(0.5772157, abs=5 * 1.2825 / 400)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=5 * 3.45 / 400)
    below = (noise < -np.log(np.log(2))).mean()
    assert below == pytest.approx(0.5, abs=5 * 0.5 / 400)


def test_draws_follow_the_softmax():
    logits = torch.tensor([[2.0, 0.0, -torch.inf, 1.0, -3.0]])
    draws = draw(logits.expand(40_000, 5), torch.full((40_000,), 7), torch.arange(40_000))
    shares = np.bincount(draws.numpy(), minlength=5) / 40_000
    np.testing.assert_allclose(shares, logits[0].softmax(0), atol=5 * 0.5 / 200)
    assert shares[2] == 0


def random_columns(generator, num_rows):
    columns = SamplingColumns.greedy(num_rows, "cpu")
    columns.temperature.uniform_(0.1, 2.0, generator=generator)
    columns.top_k.random_(0, 80, generator=generator)
    columns.top_p.uniform_(0.3, 1.0, generator=generator)
    columns.top_p[::3] = 1.0
    return columns


@pytest.mark.parametrize("vocab_size", [7, 100, 1000])
def test_filters_equal_those_of_the_cpus_sampler(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    columns = random_columns(generator, 60)
    logits = torch.randn(60, vocab_size, generator=generator) * 3
    logits[:20] = logits[:20].round()
    scaled = logits / columns.temperature[:, None]
    want = keep_top_k_top_p(scaled.clone(), columns.top_k.long(), columns.top_p)
    assert torch.equal(filtered(logits, columns), want)


def test_min_p_is_applied_before_the_other_filters():
    columns = SamplingColumns.greedy(1, "cpu")
    for name, value in (("temperature", 2.0), ("min_p", 0.5), ("top_p", 0.6)):
        getattr(columns, name).fill_(value)
    logits = 2 * torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # min_p keeps 0.4, 0.3 and 0.2, which is at its bound. Of their sum the best two have 7/9.
    kept = filtered(logits, columns)[0]
    assert (kept > -torch.inf).tolist() == [True, True, False, False]


def test_penalties_equal_those_of_the_cpus_sampler():
    generator = torch.Generator().manual_seed(3)
    prompt, output = [1, 2, 2, 30], [2, 5, 5, 5, 39]
    params = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=-0.8)
    state = LogitsState(NewRequest(0, prompt, [[1]], params, 0, 0, (), num_prompt_tokens=4), 40)
    logits = torch.randn(1, 40, generator=generator)
    columns = SamplingColumns.greedy(1, "cpu")
    columns.repetition.fill_(1.4)
    columns.frequency.fill_(0.3)
    columns.presence.fill_(-0.8)
    token_counts = torch.zeros(1, 40, dtype=torch.int32)
    token_counts[0, prompt] = 1
    for token in output:
        token_counts[0, token] += 2
    got = penalise(logits, token_counts, columns)
    apply_logits_processors(logits, [(0, state)], [np.array(prompt + output, np.int32)])
    torch.testing.assert_close(got, logits, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("normalise", [True, False])
def test_scores_equal_those_of_the_cpus_sampler(normalise):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(5, 200, generator=generator) * 4
    tokens = torch.randint(0, 200, (5,), generator=generator)
    chosen, ranks, top, ids = score(logits, tokens, 9, normalise)
    want = score_tokens(logits, tokens, [9] * 5, normalise)
    np.testing.assert_array_equal(chosen.numpy(), want.logprobs)
    np.testing.assert_array_equal(ranks.numpy(), want.ranks)
    np.testing.assert_array_equal(top.numpy().ravel(), want.top_logprobs)
    np.testing.assert_array_equal(ids.numpy().ravel(), want.top_ids)
