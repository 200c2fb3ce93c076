"""The noise is standard Gumbel noise, a function of seed, position and entry alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shmllm.worker.cpu import noise as noise_module
from shmllm.worker.cpu.noise import gumbel_noise as gumbel_noise_of_many
from shmllm.worker.cpu.noise import gumbel_noise_at

MASK_32, MASK_64 = 2**32 - 1, 2**64 - 1


def gumbel_noise(seed, position, size):
    return gumbel_noise_of_many(np.array([seed], np.uint64), np.array([position]), size)[0]


def mix_64(value):
    value = (value + 0x9E3779B97F4A7C15) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def reference_noise(seed, position, entry):
    """Compute one entry in Python's integers. A seed must give the same tokens in all versions."""
    key = mix_64(mix_64(seed) ^ position)
    bits = (entry * 0x9E3779B1 & MASK_32) ^ (key & MASK_32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = ((bits ^ (bits >> shift)) * factor) & MASK_32
    bits ^= bits >> 16
    bits = (bits + (key >> 32)) & MASK_32
    bits = ((bits ^ (bits >> 15)) * 0x2C1B3C6D) & MASK_32
    bits ^= bits >> 12
    return -math.log(-math.log((bits + 0.5) / 2.0**32))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 4095, 2**31])
def test_noise_equals_the_reference_hash(seed, position):
    noise = gumbel_noise(seed, position, 300)
    expected = [reference_noise(seed, position, entry) for entry in range(300)]
    assert noise == pytest.approx(np.array(expected), rel=1e-6, abs=1e-6)


def test_the_noise_of_a_row_does_not_depend_on_other_rows(monkeypatch):
    monkeypatch.setattr(noise_module, "BLOCK_ENTRIES", 250)
    seeds = np.array([3, 2**63 | 5, 3, 0, 9, 2**64 - 1, 7], np.uint64)
    positions = np.array([0, 17, 1, 5, 5, 2**20, 3])
    together = gumbel_noise_of_many(seeds, positions, 100)
    for row in range(len(seeds)):
        assert np.array_equal(
            together[row], gumbel_noise(int(seeds[row]), int(positions[row]), 100)
        )


def test_noise_of_single_entries_is_the_same():
    seeds, positions = np.array([4, 2**63 + 1, 8], np.uint64), np.array([2, 3, 5])
    rows, entries = np.array([0, 2, 2, 1, 0]), np.array([99, 0, 57, 13, 1])
    whole = gumbel_noise_of_many(seeds, positions, 100)
    assert np.array_equal(gumbel_noise_at(seeds, positions, rows, entries), whole[rows, entries])


def test_noise_depends_on_seed_and_position():
    assert np.array_equal(gumbel_noise(5, 9, 100), gumbel_noise(5, 9, 100))


def test_noise_of_an_entry_does_not_depend_on_the_vocabulary_size():
    assert np.array_equal(gumbel_noise(5, 9, 1000)[:10], gumbel_noise(5, 9, 10))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1, 2**64 - 1])
def test_noise_is_standard_gumbel(seed):
    noise = gumbel_noise(seed, 17, 200_000).astype(np.float64)
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.012)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.035)
    uniform = np.sort(np.exp(-np.exp(-noise)))
    distance = np.abs(uniform - (np.arange(len(uniform)) + 0.5) / len(uniform)).max()
    assert distance < 2.0 / len(uniform) ** 0.5


SIZE = 50_000
NEIGHBOURS = {
    "next position": ((3, 10), (3, 11)),
    "first positions": ((0, 0), (0, 1)),
    "next seed": ((3, 10), (4, 10)),
    "seed and position swapped": ((3, 10), (10, 3)),
    "seed and position shifted": ((3, 10), (4, 9)),
    "high bit of the seed": ((3, 10), (3 | 1 << 63, 10)),
    "unseeded neighbours": ((1 << 63 | 1, 10), (1 << 63 | 2, 10)),
}


@pytest.mark.parametrize("pair", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_neighbouring_noise_is_uncorrelated(pair):
    left, right = (gumbel_noise(seed, position, SIZE) for seed, position in pair)
    limit = 4.5 / SIZE**0.5
    assert abs(np.corrcoef(left, right)[0, 1]) < limit
    assert abs(np.corrcoef(left[1:], right[:-1])[0, 1]) < limit
    ranks = (np.exp(-np.exp(-noise.astype(np.float64))) > 0.9 for noise in (left, right))
    both = np.logical_and(*ranks).mean()
    assert both == pytest.approx(0.01, abs=4.5 * (0.01 / SIZE) ** 0.5)


def test_entries_of_one_draw_are_uncorrelated():
    noise = gumbel_noise(1, 1, SIZE)
    for distance in (1, 2, 3, 64, 256, 4096):
        correlation = np.corrcoef(noise[distance:], noise[:-distance])[0, 1]
        assert abs(correlation) < 4.5 / (SIZE - distance) ** 0.5


def test_one_entry_over_positions_is_uncorrelated_and_gumbel():
    noise = np.array([gumbel_noise(42, position, 2) for position in range(6000)], np.float64)
    assert abs(np.corrcoef(noise[1:, 0], noise[:-1, 0])[0, 1]) < 4.5 / 6000**0.5
    assert abs(np.corrcoef(noise[:, 0], noise[:, 1])[0, 1]) < 4.5 / 6000**0.5
    assert noise[:, 0].mean() == pytest.approx(0.5772, abs=4.5 * 1.2825 / 6000**0.5)
